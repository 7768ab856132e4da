"""Tables in documents say what the result files say."""

import pytest

from benchmarks import figures


@pytest.mark.parametrize("document", figures.DOCUMENTS, ids=lambda path: path.name)
def test_documents_show_the_committed_results(document: figures.Path) -> None:
    text = document.read_text()
    assert figures.BLOCK.search(text)
    assert figures.filled(text) == text, "run python benchmarks/figures.py"


def test_a_figure_that_no_row_or_several_rows_match_is_refused() -> None:
    with pytest.raises(LookupError, match="0 rows match total_us"):
        figures.value("planner", "total_us", experts=7)
    with pytest.raises(LookupError, match="rows match total_us"):
        figures.value("planner", "total_us", experts=256)

from benchmarks.routepack_report import PAGE, page


def test_the_figures_of_the_page_are_those_of_the_result_files() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text

"""Histogram checks, the two measures of skew and routes of padding, against values worked out by hand."""

import numpy as np
import pytest

from megaflux_serve.errors import InputError
from megaflux_serve.routing import check_counts, check_topk_ids, expert_counts, kappa, max_over_mean, route_padding


def test_kappa_is_one_for_uniform_routing_and_E_for_a_single_expert() -> None:
    assert kappa([7, 7, 7, 7]) == pytest.approx(1.0)
    assert kappa([0, 12, 0, 0]) == pytest.approx(4.0)
    assert kappa([3, 1]) == pytest.approx(2 * (9 + 1) / 16)
    assert kappa([0, 0]) == 1.0


def test_max_over_mean_of_rank_loads() -> None:
    assert max_over_mean([3, 1]) == pytest.approx(1.5)
    assert max_over_mean([0, 0, 0]) == 1.0


def test_expert_counts_counts_every_assignment() -> None:
    assert expert_counts(np.array([[0, 2], [2, 3]], dtype=np.uint8), 5).tolist() == [1, 0, 2, 1, 0]
    assert expert_counts(np.empty((0, 2), dtype=np.int32), 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("topk_ids", "message"),
    [
        (np.array([[0, 4]]), r"ids: holds expert id 4; allowed: ids 0 to 3"),
        (np.array([[-1, 0]]), r"ids: holds expert id -1; allowed: ids 0 to 3"),
        (np.array([[0, 1], [2, 2]]), r"token 1 names an expert twice: \[2, 2\]"),
        (np.array([0, 1]), r"has shape \(2,\); allowed: \[tokens, top_k\]"),
        (np.array([[0.0, 1.0]]), r"has dtype float64"),
    ],
)
def test_ids_that_no_router_can_produce_are_refused(topk_ids: np.ndarray, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_topk_ids(topk_ids, 4, "ids")


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([[1, 2]], r"has shape \(1, 2\)"),
        ([[1, 2], [3, -4]], r"is -4 at rank 1, expert 1"),
        ([[0.5, 1], [1, 1]], r"has dtype float64"),
    ],
)
def test_a_histogram_that_cannot_be_one_is_refused(counts: list, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_counts(counts, 2, 2)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("real", [[[5, 2], [7, 1]], []], ids=["requests", "no requests"])
def test_padding_follows_the_first_row_and_real_rows_keep_their_routes(real: list[list[int]], padding: int) -> None:
    torch = pytest.importorskip("torch")
    ids = torch.tensor([*real, *[[-1, -1]] * padding], dtype=torch.int32).view(-1, 2)
    routed = route_padding(ids)
    assert routed.dtype == torch.int32
    followed = real[0] if real else [0, 1]
    assert routed.tolist() == [*real, *[followed] * padding]

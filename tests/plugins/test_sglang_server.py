"""Real SGLang servers on the CPU: tokens equal SGLang's own backend's, routes equal the model's, replicas really open,
weight updates reach every copy. Three servers, one after the other; ten minutes on two busy cores.
"""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.plugins.engine_runs import PROMPTS, TINY_MOE
from tests.plugins.random_moe import write_neighbours
from tests.plugins.scrapes import missing, scrape, total
from tests.plugins.sglang_runs import ATTENTION, MEGAFLUX, Server, needs_sglang, serve

pytest.importorskip("safetensors.torch")

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800), needs_sglang]

TWO_RANKS = ["--tp-size", "2", "--ep-size", "2", "--enable-return-routed-experts", "--enable-metrics", *MEGAFLUX]


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in which every expert has the weights of its neighbour."""
    return write_neighbours(TINY_MOE, tmp_path_factory.mktemp("models") / "other-weights")


def update_weights(server: Server, checkpoint: Path) -> None:
    """Load a checkpoint into the running server, which forgets what it cached."""
    assert server.post("/update_weights_from_disk", {"model_path": str(checkpoint)})["success"]


@pytest.fixture(scope="module")
def stock(other_weights: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[int]]]:
    """Tokens of SGLang's own backend on one rank, by weights."""
    with serve([], tmp_path_factory.mktemp("stock") / "server.log") as server:
        tokens = {"tiny": [server.complete(prompt) for prompt in PROMPTS]}
        update_weights(server, other_weights)
        tokens["other"] = [server.complete(prompt) for prompt in PROMPTS]
    assert tokens["tiny"] != tokens["other"]
    return tokens


@pytest.fixture(scope="module", params=ATTENTION)
def megaflux(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Server, Path]]:
    """How attention is spread, a server of two ranks, and the folder of its plan log."""
    folder = tmp_path_factory.mktemp("megaflux")
    options = {
        "block_rows": 4,
        "replica_slots": 3,
        "plan_log": str(folder),
    }  # small blocks: a few rows are worth moving
    flags = [*TWO_RANKS, *ATTENTION[request.param]]
    with serve(flags, folder / "server.log", {"MEGAFLUX_OPTIONS": json.dumps(options)}) as server:
        yield request.param, server, folder


def plans(folder: Path) -> list[dict[str, Any]]:
    """The records of a plan log."""
    return [json.loads(line) for line in (folder / "plan.jsonl").read_text().splitlines()]


def test_tokens_equal_sglangs_own_backend_one_request_after_the_other(
    megaflux: tuple[str, Server, Path], stock: dict[str, list[list[int]]]
) -> None:
    _, server, _ = megaflux
    assert [server.complete(prompt) for prompt in PROMPTS] == stock["tiny"]  # with data parallelism, one rank idles


def test_tokens_equal_under_uneven_concurrent_load(
    megaflux: tuple[str, Server, Path], stock: dict[str, list[list[int]]]
) -> None:
    _, server, _ = megaflux
    for count in (len(PROMPTS), 3):
        answers = server.generate_together(PROMPTS[:count])
        assert [answer["output_ids"] for answer in answers] == stock["tiny"][:count]
    assert server.is_healthy()


def test_replicas_open_and_no_rank_computes_more_than_without(megaflux: tuple[str, Server, Path]) -> None:
    _, _, folder = megaflux
    records = plans(folder)
    assert sum(plan["replicas"] for plan in records) > 0
    assert all(max(plan["loads"]) <= max(plan["fixed_loads"]) for plan in records)


def test_metrics_of_both_ranks_grow_with_the_load(megaflux: tuple[str, Server, Path]) -> None:
    _, server, _ = megaflux
    before = scrape(server.url)
    assert missing(before) == []
    server.generate_together(PROMPTS)
    after = scrape(server.url)
    batches = total(after, "megaflux_batches_total") - total(before, "megaflux_batches_total")
    assert batches > 0
    for rank in ("0", "1"):
        counts = (total(series, "megaflux_layer_seconds_count", rank=rank) for series in (after, before))
        assert np.subtract(*counts) == batches
    assert after["sglang:prompt_tokens_total"]


def test_routes_of_every_token_equal_a_plain_forward(megaflux: tuple[str, Server, Path]) -> None:
    pytest.importorskip("transformers")
    from tests.oracles.replay_transformers import route_oracle

    _, server, _ = megaflux
    oracle, tokenizer = route_oracle(TINY_MOE), tokenize()
    for prompt, answer in zip(PROMPTS, server.generate_together(PROMPTS, return_routed_experts=True), strict=True):
        wanted = oracle([*tokenizer(prompt), *answer["output_ids"]])[:-1]
        raw = base64.b64decode(answer["meta_info"]["routed_experts"])
        routes = np.frombuffer(raw, dtype=np.int32).reshape(wanted.shape)
        different = np.argwhere((np.sort(routes) != np.sort(wanted)).any(axis=2))
        assert not len(different), f"{prompt!r}: {len(different)} of {wanted[..., 0].size}, first {different[0]}"


def tokenize() -> Any:
    """From text to token ids, as the server does it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY_MOE).encode


def test_updated_weights_reach_every_replica(
    megaflux: tuple[str, Server, Path], stock: dict[str, list[list[int]]], other_weights: Path
) -> None:
    _, server, _ = megaflux
    update_weights(server, other_weights)
    assert [server.complete(prompt) for prompt in PROMPTS] == stock["other"]
    update_weights(server, TINY_MOE)
    assert [answer["output_ids"] for answer in server.generate_together(PROMPTS)] == stock["tiny"]

"""Metrics in vLLM: the hooks, and a real server on the CPU, whose figures agree with the load."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.plugins.engine_runs import PROMPTS, Server, serve
from tests.plugins.scrapes import missing, scrape, total

pytest.importorskip("vllm", reason="vLLM is not installed")

OPTIONS = {"megaflux": {"block_rows": 4, "replica_slots": 3}}
FLAGS = ("--moe-backend", "megaflux", "--enable-expert-parallel", "--data-parallel-size", "2")


def test_a_folder_is_named_for_a_server_with_the_backend_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from megaflux_vllm import metrics
    from vllm.usage.usage_lib import UsageContext

    from megaflux_serve.metrics import registries, snapshot

    named: list[str] = []
    monkeypatch.setattr(snapshot, "name_folder", lambda: named.append("named"))
    monkeypatch.setattr(registries, "show_layers", lambda: named.append("shown"))

    def create(args: Any, usage_context: Any = None) -> Any:
        config = {"megaflux": {"metrics": args.metrics}}
        return SimpleNamespace(kernel_config=SimpleNamespace(moe_backend=args.backend), additional_config=config)

    hooked = metrics._naming_a_folder(create)
    hooked(SimpleNamespace(backend="megaflux", metrics=True), UsageContext.LLM_CLASS)
    hooked(SimpleNamespace(backend="megaflux", metrics=True))
    hooked(SimpleNamespace(backend="triton", metrics=True), UsageContext.OPENAI_API_SERVER)
    hooked(SimpleNamespace(backend="megaflux", metrics=False), UsageContext.OPENAI_API_SERVER)
    assert named == []
    hooked(SimpleNamespace(backend="megaflux", metrics=True), usage_context=UsageContext.OPENAI_API_SERVER)
    assert named == ["named", "shown"]


def test_registering_again_changes_nothing() -> None:
    import megaflux_vllm
    from vllm.engine.arg_utils import EngineArgs

    megaflux_vllm.register()
    hooked = EngineArgs.create_engine_config
    megaflux_vllm.register()
    assert hooked.names_a_folder
    assert EngineArgs.create_engine_config is hooked


@pytest.fixture(scope="module", params=["1", "2"], ids=["one front end", "two front ends"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Both of vLLM's modes: metrics of one process, and prometheus-client's multiprocess mode."""
    flags = [*FLAGS, "--additional-config", json.dumps(OPTIONS), "--api-server-count", request.param]
    with serve(flags, tmp_path_factory.mktemp("metrics") / "server.log") as running:
        running.complete_together(PROMPTS)
        yield running


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_every_metric_of_layers_and_workers_is_there_beside_vllm_s_own(server: Server) -> None:
    series = scrape(server.url)
    assert missing(series) == []
    assert series["vllm:prompt_tokens_total"]
    assert {labels["rank"] for labels, _ in series["megaflux_planner_seconds_count"]} == {"0", "1"}


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_counters_grow_with_the_requests(server: Server) -> None:
    before = scrape(server.url)
    server.complete_together(PROMPTS)
    after = scrape(server.url)

    def growth(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    tokens = [growth("megaflux_tokens_total", layer=str(layer)) for layer in range(4)]
    served = growth("vllm:prompt_tokens_total") + growth("vllm:generation_tokens_total")
    assert len(set(tokens)) == 1  # every layer serves every token
    assert served * 0.5 < tokens[0]  # prefix hits are not computed again; idle ranks add dummy rows
    blocks = {
        placement: growth("megaflux_rank_blocks_total", placement=placement) for placement in ("fixed", "planned")
    }
    assert blocks["fixed"] == blocks["planned"] == growth("megaflux_blocks_total") > 0
    busiest = {p: growth("megaflux_busiest_rank_blocks_total", placement=p) for p in ("fixed", "planned")}
    assert growth("megaflux_balanced_rank_blocks_total") <= busiest["planned"] < busiest["fixed"]
    assert growth("megaflux_replicas_total", weights="resident") > 0
    assert growth("megaflux_plan_decisions_total") == growth("megaflux_batches_total") > 0
    assert growth("megaflux_layer_seconds_count", rank="1") == growth("megaflux_batches_total")

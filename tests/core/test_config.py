"""MegaFluxConfig: defaults, ranges, and one clear error for anything else."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.errors import ConfigError
from megaflux_serve.planning.gate import GateCosts
from megaflux_serve.planning.planner import PlannerOptions

COSTS = {"block_ns": 14_300, "replica_ns": 252_000, "plan_ns": 30_000, "hidden_permille": 700}


def test_no_options_mean_the_papers_planner_with_two_sticky_slots() -> None:
    config = MegaFluxConfig.parse({})
    assert config.planner_options == PlannerOptions(block_rows=128, reduction_penalty=0, transfer_cost_blocks=0)
    assert (config.executor, config.replica_slots, config.sticky) == ("auto", 2, True)
    assert (config.gate, config.gate_costs, config.plan_log) == ("auto", None, None)
    assert (config.min_tokens, config.handover_rows) == (None, 0)
    assert (config.transfer, config.max_tokens, config.timeout_s) == ("pipelined", None, 300)
    assert (config.metrics, config.capture) == (True, None)


def test_every_option_is_read() -> None:
    options = {
        "executor": "staged",
        "replica_slots": 3,
        "block_rows": 16,
        "reduction_penalty": 12,
        "transfer_cost_blocks": 4,
        "transfer": "staged",
        "max_tokens": 4096,
        "min_tokens": 64,
        "timeout_s": 3600,
        "sticky": False,
        "gate": COSTS,
        "plan_log": "out/plans",
        "metrics": False,
        "capture": "replay",
    }
    assert options.keys() == MegaFluxConfig.model_fields.keys()
    config = MegaFluxConfig.parse(options)
    assert config.planner_options == PlannerOptions(16, 12, 4)
    assert (config.executor, config.replica_slots, config.sticky) == ("staged", 3, False)
    assert config.gate == GateCosts(14_300, 252_000, 30_000, 700)
    assert (config.min_tokens, config.handover_rows) == (64, 64)
    assert (config.transfer, config.max_tokens, config.timeout_s) == ("staged", 4096, 3600)
    assert (config.plan_log, config.metrics, config.capture) == (Path("out/plans"), False, Path("replay"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"executor": "fast"}, "executor = 'fast' is not allowed; allowed: auto, reference, staged or megakernel"),
        ({"replica_slots": -1}, "replica_slots = -1 is not allowed; allowed: an integer of at least 0"),
        ({"replica_slots": "2"}, "replica_slots = '2' is not allowed; allowed: an integer of at least 0"),
        ({"replica_slots": True}, "replica_slots = True is not allowed; allowed: an integer of at least 0"),
        ({"replica_slots": 1.5}, "replica_slots = 1.5 is not allowed; allowed: an integer of at least 0"),
        ({"replica_slots": None}, "replica_slots = None is not allowed; allowed: an integer of at least 0"),
        ({"min_tokens": -1}, "min_tokens = -1 is not allowed; allowed: null or an integer of at least 0"),
        ({"max_tokens": 0}, "max_tokens = 0 is not allowed; allowed: null or an integer of at least 1"),
        ({"timeout_s": 0}, "timeout_s = 0 is not allowed; allowed: an integer from 1 to 3600 (seconds)"),
        ({"timeout_s": 3601}, "timeout_s = 3601 is not allowed; allowed: an integer from 1 to 3600 (seconds)"),
        ({"transfer": "fast"}, "transfer = 'fast' is not allowed; allowed: pipelined or staged"),
        ({"metrics": 1}, "metrics = 1 is not allowed; allowed: true or false"),
        ({"capture": 7}, "capture = 7 is not allowed; allowed: null or the path of a directory"),
        ({"block_rows": 0}, "block_rows = 0 is not allowed; allowed: an integer from 1 to 128"),
        ({"block_rows": 129}, "block_rows = 129 is not allowed; allowed: an integer from 1 to 128"),
        (
            {"reduction_penalty": -1},
            "reduction_penalty = -1 is not allowed; allowed: an integer of at least 0 (blocks)",
        ),
        (
            {"transfer_cost_blocks": -4},
            "transfer_cost_blocks = -4 is not allowed; allowed: an integer of at least 0 (b",
        ),
        (
            {"transfer_cost_blocks": 2**31},
            "transfer_cost_blocks = 2147483648 is not allowed; allowed: an integer of at least 0 (blocks) and at most",
        ),
        ({"sticky": "yes"}, "sticky = 'yes' is not allowed; allowed: true or false"),
        (
            {"gate": 7},
            "gate = 7 is not allowed; allowed: auto, null, integers block_ns, replica_ns and plan_ns (0 to 10^9)",
        ),
        ({"gate": {**COSTS, "plan_ns": -1}}, "gate.plan_ns = -1 is not allowed; allowed: 0 to 1000000000 nanoseconds"),
        ({"gate": {**COSTS, "plan_ns": "7"}}, "gate.plan_ns = '7' is not allowed; allowed: an integer"),
        ({"gate": {**COSTS, "link_ns": 1}}, "gate.link_ns = 1 is not allowed; allowed: auto, null, integers block_ns"),
        ({"gate": {"block_ns": 1}}, "gate = {'block_ns': 1} is not allowed; allowed: auto, null, integers block_ns"),
        ({"plan_log": 7}, "plan_log = 7 is not allowed; allowed: null or the path of a directory"),
        (
            {"replica_slot": 2},
            "replica_slot = 2 is not allowed; allowed: one of the options executor, replica_slots, bl",
        ),
        ({"block_rows": 0, "sticky": 3}, "block_rows = 0 is not allowed"),
        ([1, 2], "megaflux = [1, 2] is not allowed; allowed: an object with the keys executor, replica_slots, bl"),
        (None, "megaflux = None is not allowed; allowed: an object"),
    ],
)
def test_a_wrong_option_is_one_error_with_field_value_and_what_is_allowed(options: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MegaFluxConfig.parse(options)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_options_cannot_be_changed_afterwards() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        MegaFluxConfig().replica_slots = 4  # type: ignore[misc]


def test_a_single_rank_gets_no_replica_slots() -> None:
    assert MegaFluxConfig(replica_slots=2).slot_layout(8, 1).num_replica_slots == 0


def test_replica_slots_end_at_the_experts_of_other_ranks() -> None:
    assert MegaFluxConfig(replica_slots=6).slot_layout(8, 4).num_replica_slots == 6
    with pytest.raises(ConfigError, match=r"replica_slots = 7 is not allowed; allowed: 0 to 6: .*E = 8, P = 4"):
        MegaFluxConfig(replica_slots=7).slot_layout(8, 4)


def test_experts_must_divide_among_ranks() -> None:
    with pytest.raises(ConfigError, match=r"num_ranks = 3 is not allowed; allowed: a divisor of the 16 experts"):
        MegaFluxConfig().slot_layout(16, 3)


def test_the_home_map_of_an_engine_is_kept() -> None:
    layout = MegaFluxConfig().slot_layout(4, 2, [0, 1, 0, 1])
    assert layout.home_rank.tolist() == [0, 1, 0, 1]
    with pytest.raises(ConfigError, match=r"home_rank = .*exactly 2 experts on every rank"):
        MegaFluxConfig().slot_layout(4, 2, [0, 0, 0, 1])

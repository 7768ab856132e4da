import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray
from typer.testing import CliRunner

import megaflux_serve.routepack as routepack
from megaflux_serve.cli.routepack import app
from megaflux_serve.errors import ConfigError, InputError, MegafluxError
from megaflux_serve.routepack import (
    Demand,
    FillingWindow,
    Placement,
    PlanOptions,
    SearchOptions,
    Topology,
    compare_policies,
    load_plan,
    plan_window,
    repair_placement,
    save_plan,
    stages_from_shape,
)
from megaflux_serve.routepack.bounds import AdmissionTimes, excess_removed, lower_bound
from megaflux_serve.routepack.communication import expected_rank_copies, rank_copies, traffic
from megaflux_serve.routepack.layout import Layout
from megaflux_serve.routepack.plan import certify_rows
from megaflux_serve.routepack.rows import RowChoice
from megaflux_serve.routepack.score import Problem, row_costs
from tests.core.routepack_cases import COST, check_schedule, window, windows

OPTIONS = PlanOptions(COST, search=SearchOptions(proposals=4_000, candidates=3))
TOPOLOGY = Topology(num_ranks=4, num_slots=4, capacity=300)


@settings(derandomize=True, deadline=None, max_examples=25)
@given(windows())
def test_a_plan_keeps_every_contract(case: tuple[Demand, Topology]) -> None:
    demand, topology = case
    plan = plan_window(demand, None, topology, OPTIONS)
    check_schedule(plan.layout, demand, topology)
    assert plan.bound.total <= plan.score.primary * (1 + 1e-12)
    assert plan.score <= plan.ffd_score
    assert plan.layout.num_rows >= plan.rows_bound
    # Demand is conserved: the ranks of all row-shards together carry every routed row.
    owner = plan.placement.owner
    assert demand.rank_demand(owner, topology.num_ranks).sum() == demand.counts.sum()
    assert np.array_equal(plan.layout.cell, plan.layout.canonical(topology.num_shards).cell)


def test_the_same_arguments_give_the_same_plan() -> None:
    demand = window(40)
    assert_same_plan(plan_window(demand, None, TOPOLOGY, OPTIONS), plan_window(demand, None, TOPOLOGY, OPTIONS))


def assert_same_plan(one: routepack.WindowPlan, other: routepack.WindowPlan) -> None:
    assert np.array_equal(one.layout.cell, other.layout.cell)
    assert np.array_equal(one.placement.slots, other.placement.slots)
    assert np.array_equal(one.before.slots, other.before.slots)
    keep = ("topology", "cost", "rows_bound", "score", "ffd_score", "bound", "excess", "proposals", "history")
    assert [getattr(one, name) for name in keep] == [getattr(other, name) for name in keep]


def test_no_schedule_crosses_the_bound_and_one_that_is_even_meets_it() -> None:
    # Four equal trajectories, two experts used alike: any layout with one each is perfectly even.
    demand = Demand.of(np.full((4, 1, 2), 5), [10] * 4)
    plan = plan_window(demand, None, Topology(2, 2, 10), OPTIONS)
    assert plan.score.primary == pytest.approx(plan.bound.total)
    assert plan.excess.window == 0
    assert plan.excess.row_local == pytest.approx(0)


def test_the_placement_is_carried_from_window_to_window() -> None:
    first = plan_window(window(32, seed=1), None, TOPOLOGY, OPTIONS)
    second = plan_window(window(32, seed=2), None, TOPOLOGY, OPTIONS, first.placement)
    assert np.array_equal(second.before.slots, first.placement.slots)
    again = plan_window(window(32, seed=1), None, TOPOLOGY, OPTIONS, first.placement)
    assert again.num_moved == 0


def test_a_fixed_row_count_is_kept_and_one_that_cannot_hold_the_window_is_refused() -> None:
    demand = window(40)
    rows = plan_window(demand, None, TOPOLOGY, OPTIONS).layout.num_rows
    wider = plan_window(demand, None, TOPOLOGY, replace(OPTIONS, num_rows=rows + 1))
    assert wider.layout.num_rows == rows + 1
    with pytest.raises(ConfigError, match="num_rows"):
        plan_window(demand, None, TOPOLOGY, replace(OPTIONS, num_rows=rows - 1))


def test_rows_that_packing_leaves_open_are_decided_on_request() -> None:
    pytest.importorskip("ortools", reason="certified rows need ortools")
    # The bound allows one row of two cells of 100, and only 54 + 24 + 22 with 53 + 26 + 21 fills them.
    lengths = np.array([54, 53, 26, 24, 22, 21])
    choice = certify_rows(RowChoice(2, 1, np.zeros(6, np.int32)), lengths, Topology(2, 2, 100), seconds=10)
    assert (choice.num_rows, choice.certified) == (1, True)
    assert np.bincount(choice.bins, weights=lengths).tolist() == [100, 100]
    choice = certify_rows(RowChoice(2, 1, choice.bins), lengths, Topology(2, 2, 99), seconds=10)
    assert (choice.num_rows, choice.certified) == (2, True)


def test_a_proof_for_more_rows_settles_the_fewer_that_were_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {2: (None, False), 4: (None, True), 6: (None, False)}  # by cells: open, proven, open
    monkeypatch.setattr(
        "megaflux_serve.routepack.plan.pack_exactly", lambda lengths, capacity, cells, _: answers[cells]
    )
    choice = certify_rows(RowChoice(4, 1, np.zeros(8, np.int32)), np.ones(8, np.int64), Topology(2, 2, 9), seconds=1)
    assert (choice.num_rows, choice.lower_bound) == (4, 3)


def test_without_search_options_the_window_s_size_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, for_size = [], SearchOptions.for_size

    def noted(num_trajectories: int, **options: int) -> SearchOptions:
        asked.append(num_trajectories)
        return replace(for_size(num_trajectories, **options), proposals=1000)

    monkeypatch.setattr(SearchOptions, "for_size", noted)
    demand = window(16, num_layers=2, seed=0)
    plan = plan_window(demand, None, Topology(2, 4, 400), PlanOptions(COST))
    assert asked == [16]
    assert list(plan.seconds) == ["place", "rows", "tables", "seeds", "search"]


def test_a_filling_window_ends_as_the_window_and_places_early() -> None:
    demand = window(40)
    filling = FillingWindow(demand.num_layers, demand.num_experts)
    identity = Placement.identity(demand.num_layers, demand.num_experts, 4)
    for i in range(40):
        if i == 30:
            early = filling.early_placement(identity)
        filling.add(demand.counts[i], int(demand.lengths[i]))
    assert len(filling) == 40
    assert np.array_equal(filling.seal().counts, demand.counts)
    assert np.array_equal(filling.expert_loads(), demand.expert_loads())
    assert np.array_equal(early.slots, repair_placement(demand.select(range(30)).expert_loads(), identity).slots)
    with pytest.raises(InputError, match="counts: have shape"):
        filling.add(demand.counts[0][:, :8] * 0, 5)
    with pytest.raises(InputError, match="window: is empty"):
        FillingWindow(1, 1).seal()


def test_the_pipeline_floor_sets_the_rows() -> None:
    plan = plan_window(window(40), None, replace(TOPOLOGY, pipeline_stages=4), OPTIONS)
    assert plan.layout.num_rows == 8


def test_extra_terms_only_add_cost() -> None:
    demand = window(40)
    plain = plan_window(demand, None, TOPOLOGY, OPTIONS)
    cost = replace(COST, communication=0.5, pipeline_bubble=True)
    topology = replace(TOPOLOGY, pipeline_stages=2)
    full = plan_window(demand, None, topology, replace(OPTIONS, cost=cost))
    assert full.score.primary > plain.score.primary
    check_schedule(full.layout, demand, topology)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda c, t: (np.where(c == c.max(), np.nan, c.astype(float)), t), "demand: is nan at"),
        (lambda c, t: (c - 1, t), "demand: is -1 at trajectory"),
        (lambda c, t: (c + 0.5, t), "demand: holds fractions"),
        (lambda c, t: (c[:, 0], t), r"demand: has shape \(16, 16\)"),
        (lambda c, t: (c, t[:-1]), "demand: has 16 trajectories; allowed: 15"),
        (lambda c, t: (np.concatenate([c[:, :1] * 2, c[:, 1:]], axis=1), t), "demand: (trajectory|sends)"),
        (lambda c, t: (c, np.where(np.arange(16) == 3, 0, t)), "lengths: trajectory 3 has 0 tokens"),
        (
            lambda c, t: (c, np.where(np.arange(16) == 3, 301, t)),
            "lengths: trajectory 3 has 301 tokens; .* capacity 300",
        ),
        (lambda c, t: (c[:3], t[:3]), "lengths: 3 trajectories cannot fill"),
        (lambda c, t: (c.astype(str), t), "demand: has dtype"),
        (lambda c, t: (c * 0, t), "demand: routes no rows"),
    ],
)
def test_a_bad_window_is_refused_by_name(
    spoil: Callable[[NDArray[np.int64], NDArray[np.int64]], tuple[object, object]], message: str
) -> None:
    demand = window(16)
    counts, lengths = spoil(demand.counts.astype(np.int64), demand.lengths)
    with pytest.raises(InputError, match=message):
        plan_window(counts, lengths, TOPOLOGY, OPTIONS)  # type: ignore[arg-type]


def test_layers_that_disagree_are_refused_by_name() -> None:
    counts = np.array([[[2, 2], [2, 1]]])
    with pytest.raises(InputError, match="trajectory 0 routes 3 rows in one layer and 4 in another"):
        Demand.of(counts, [2])


def test_a_placement_for_other_layers_or_ranks_is_refused() -> None:
    demand = window(16)
    for before in (Placement.identity(5, 16, 4), Placement.identity(3, 16, 8)):
        with pytest.raises(InputError, match="placement"):
            plan_window(demand, None, TOPOLOGY, OPTIONS, before)


def test_routes_are_counted_and_filler_is_dropped() -> None:
    experts = np.array([[[0, 1]], [[1, 2]], [[-1, -1]], [[3, 0]]], dtype=np.int8)
    demand = Demand.from_routes(experts, [0, 3, 4], num_experts=4)
    assert demand.counts.tolist() == [[[1, 2, 1, 0]], [[1, 0, 0, 1]]]
    assert demand.lengths.tolist() == [3, 1]


@pytest.mark.parametrize(
    ("experts", "offsets", "message"),
    [
        ([[[0, 0]]], [0, 1], "token 0, layer 0 is"),
        ([[[0, -1]]], [0, 1], "some ids and some -1"),
        ([[[0, 4]]], [0, 1], "holds expert 4"),
        ([[[0, 1]]], [0, 2], "offsets"),
        ([[[0, 1]], [[0, 1]]], [0, 1, 1, 2], "offsets"),
        ([[[0, 1]], [[0, 1]]], [1, 2], "offsets"),
        ([[0, 1]], [0, 1], "experts"),
        ([[[]]], [0, 1], r"experts: is int16 \(1, 1, 0\)"),
    ],
)
def test_routes_that_no_router_makes_are_refused(experts: list[object], offsets: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Demand.from_routes(np.array(experts, dtype=np.int16), offsets, num_experts=4)


def test_copies_count_a_token_once_a_rank() -> None:
    experts = np.array([[[0, 1]], [[1, 2]], [[2, 3]]])
    owner = np.array([[0, 0, 1, 1]], dtype=np.int32)
    assert rank_copies(experts, np.array([0, 2, 3]), owner, 2)[:, :, 0].tolist() == [[2, 1], [0, 1]]


def test_expected_copies_agree_with_exact_ones_on_independent_routes() -> None:
    rng = np.random.default_rng(0)
    experts = np.argsort(rng.random((4000, 2, 16)), axis=2)[:, :, :4]
    demand = Demand.from_routes(experts, [0, 2000, 4000], 16)
    owner = Placement.identity(2, 16, 4).owner
    exact = rank_copies(experts, np.array([0, 2000, 4000]), owner, 4)
    # Without replacement a token repeats a rank less often than the estimate assumes: 3 % more copies here.
    assert expected_rank_copies(demand, owner, 4) == pytest.approx(exact, rel=0.08)


def test_traffic_by_hand() -> None:
    # One row of two cells on two ranks. Cell 0 sends 3 to rank 0 (local) and 5 to rank 1; cell 1 sends 2 and 4.
    units = np.array([[[3], [5]], [[2], [4]]], dtype=np.int32)
    layout = Layout(np.array([0, 1], dtype=np.int32), 1, 2)
    found = traffic(units, layout, Topology(2, 2, 10))
    assert (found.volume, found.local, found.endpoint_peak) == (7, 7, 5)
    assert found.rho == pytest.approx(10 / 7)
    assert found.efficiency == pytest.approx(0.7)


def test_bounds_and_admission_by_hand() -> None:
    assert excess_removed(110, 104, 100) == pytest.approx(0.6)
    assert excess_removed(100, 100, 100) == 0
    hidden = AdmissionTimes(place=0.3, reschedule=3.0, auxiliary=1.0, state=7.0)
    assert (hidden.target, hidden.exposed) == (8.0, 0.0)
    late = AdmissionTimes(place=0.3, reschedule=9.0, auxiliary=1.0, state=7.0)
    assert late.target == pytest.approx(9.3)
    assert late.exposed == pytest.approx(1.3)


def test_the_dense_bound_is_the_even_share_of_every_stage() -> None:
    demand = Demand.of(np.full((4, 1, 2), 5), [10, 10, 5, 5])
    topology = Topology(2, 2, 10)
    table = demand.rank_demand(Placement.identity(1, 2, 2).owner, 2)
    bound = lower_bound(Problem.of(table, demand.lengths, topology, COST), np.array([[20, 20]]))
    # Linear stages: 25 * 3 tokens / C over 2 slots; quadratic: 8 * 2.5 over 2; experts: 20 / 10.
    assert bound.dense == pytest.approx(25 * 3 / 2 + 8 * 2.5 / 2)
    assert bound.expert == pytest.approx(2)


def test_stages_from_a_shape_by_hand() -> None:
    (stage,) = stages_from_shape(num_layers=2, hidden=10, intermediate=5, attention_width=10, capacity=30)
    # A row is 300 operations; projections 800 a token and layer, pairs 2 * 10 * 30 * 30 a full cell and layer.
    assert stage.linear == pytest.approx(2 * 800 / 300)
    assert stage.quadratic == pytest.approx(2 * 2 * 10 * 30 * 30 / (30 * 300))


def test_policies_are_compared_against_base() -> None:
    demand = window(64)
    plan = plan_window(demand, None, TOPOLOGY, OPTIONS)
    reports = compare_policies(demand, plan, OPTIONS)
    assert [report.policy for report in reports][::5] == ["Base", "RoutePack"]
    assert reports[0].saved == 0
    assert reports[-1].primary == pytest.approx(plan.score.primary)
    assert reports[-1].saved == pytest.approx(1 - reports[-1].primary / reports[0].primary)
    assert reports[-1].window_excess == pytest.approx(plan.excess.window)
    costs = row_costs(
        Problem.of(demand.rank_demand(plan.placement.owner, 4), demand.lengths, TOPOLOGY, COST), plan.layout
    )
    assert reports[-1].dense + reports[-1].expert == pytest.approx(costs.joint.sum())


def test_a_window_that_base_cannot_schedule_has_no_savings(tmp_path: Path) -> None:
    # Groups of four go to two slots in turn: slot 0 has five full cells, slot 1 only four trajectories.
    lengths = np.array([10] * 4 + [1] * 4 + [10])
    counts = np.zeros((9, 1, 2), dtype=np.int64)
    counts[:, 0, 0] = lengths
    demand, topology = Demand.of(counts, lengths), Topology(2, 2, 10)
    reports = compare_policies(demand, plan_window(demand, None, topology, OPTIONS), OPTIONS)
    assert [(report.policy, report.saved) for report in reports] == [
        ("slime", None),
        ("Global FFD", None),
        ("RoutePack", None),
    ]
    np.savez(tmp_path / "window.npz", counts=counts, lengths=lengths)
    job = ["--ranks", "2", "--slots", "2", "--capacity", "10", "--stage", "a=1", "--proposals", "100"]
    for command in ("plan", "replay"):
        png = tmp_path / f"{command}.png"
        result = CliRunner().invoke(app, [command, str(tmp_path / "window.npz"), *job, "--png", str(png)])
        assert result.exit_code == 0, result.output
        assert png.read_bytes().startswith(b"\x89PNG")


def test_a_saved_plan_comes_back_as_it_was(tmp_path: Path) -> None:
    plan = plan_window(window(40), None, TOPOLOGY, OPTIONS)
    save_plan(plan, tmp_path / "plan")
    assert_same_plan(load_plan(tmp_path / "plan"), plan)
    assert [path.name for path in tmp_path.iterdir()] == ["plan"]
    with pytest.raises(ConfigError, match="does not exist yet"):
        save_plan(plan, tmp_path / "plan")


def test_a_damaged_plan_is_refused_by_file(tmp_path: Path) -> None:
    folder = tmp_path / "plan"
    save_plan(plan_window(window(40), None, TOPOLOGY, OPTIONS), folder)
    cells = folder / "cells.npy"
    data = bytearray(cells.read_bytes())
    data[-1] ^= 1
    cells.write_bytes(data)
    with pytest.raises(InputError, match=r"cells\.npy.*hash"):
        load_plan(folder)
    cells.unlink()
    with pytest.raises(InputError, match=r"cells\.npy.*cannot be read"):
        load_plan(folder)
    stored = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps(stored | {"version": 99}))
    with pytest.raises(InputError, match="version 99"):
        load_plan(folder)
    with pytest.raises(InputError, match=r"plan\.json"):
        load_plan(tmp_path / "nowhere")
    for damaged in (
        {name: value for name, value in stored.items() if name != "tables"},
        stored | {"tables": {}},
        stored | {"tables": []},
        stored | {"score": None},
        stored | {"topology": stored["topology"] | {"num_slots": "4"}},
        stored | {"cost": stored["cost"] | {"stages": [{"name": "attention"}]}},
    ):
        save_plan(plan_window(window(40), None, TOPOLOGY, OPTIONS), tmp_path / str(id(damaged)))
        (tmp_path / str(id(damaged)) / "plan.json").write_text(json.dumps(damaged))
        with pytest.raises(InputError, match=r"plan\.json: cannot be read"):
            load_plan(tmp_path / str(id(damaged)))


@pytest.fixture
def window_file(tmp_path: Path) -> Path:
    demand = window(40)
    np.savez(tmp_path / "window.npz", counts=demand.counts, lengths=demand.lengths)
    return tmp_path / "window.npz"


JOB = ["--ranks", "4", "--slots", "4", "--capacity", "300", "--stage", "attention=20,8", "--proposals", "2000"]


def test_the_command_plans_saves_and_draws(window_file: Path, tmp_path: Path) -> None:
    out, png = tmp_path / "plan", tmp_path / "plan.png"
    result = CliRunner().invoke(app, ["plan", str(window_file), *JOB, "--out", str(out), "--png", str(png)])
    assert result.exit_code == 0, result.output
    assert "experts moved" in result.output
    assert "RoutePack" in result.output
    assert png.read_bytes().startswith(b"\x89PNG")
    assert result.stdout.splitlines()[1].startswith(" experts moved")  # no progress bar above the tables
    assert result.stderr == ""
    again = CliRunner().invoke(app, ["plan", str(window_file), *JOB, "--previous", str(out), "--json"])
    assert json.loads(again.stdout)["experts_moved"] == 0
    assert json.loads(again.stdout)["num_rows"] == load_plan(out).layout.num_rows


def test_the_command_line_says_what_a_plan_moves(tmp_path: Path, window_file: Path) -> None:
    out, run = tmp_path / "plan", CliRunner()
    assert run.invoke(app, ["plan", str(window_file), *JOB, "--out", str(out)]).exit_code == 0
    shape = ["moves", str(out), "--hidden", "64", "--intermediate", "32"]
    found = json.loads(run.invoke(app, [*shape, "--parameter-bytes", "2", "--json"]).stdout)
    assert found["expert_bytes"] == 3 * 64 * 32 * 2
    assert found["moved"] == sum(found["received"]) + sum(found["local"]) > 0
    assert found["seconds_on_the_link"] == pytest.approx(max(found["received"]) * found["expert_bytes"] / 50e9)
    shown = run.invoke(app, shape, env={"COLUMNS": "120"}).stdout
    assert f"{found['moved']} of {load_plan(out).placement.slots.size} experts change their slot" in shown
    assert "the largest layer needs" in shown
    assert run.invoke(app, [*shape, "--hidden", str(10**20)]).exit_code == 2
    refused = run.invoke(app, [*shape, "--parameter-bytes", "1e300"])
    assert "--parameter-bytes = 1e+300 is not allowed; allowed: at most 1.78957e+08" in str(refused.exception)
    refused = run.invoke(app, [*shape, "--staging-gib", "0.00001"])
    assert "staging_bytes = 10737: layer" in str(refused.exception)
    for option in ("--parameter-bytes", "--staging-gib", "--link-gbps"):
        for value in ("0.0", "nan", "inf"):
            refused = run.invoke(app, [*shape, option, value])
            assert f"{option} = {value} is not allowed; allowed: a finite number above 0" in str(refused.exception)


def test_the_command_replays_and_compares(window_file: Path, tmp_path: Path) -> None:
    png = tmp_path / "replay.png"
    two = [str(window_file), str(window_file)]
    result = CliRunner().invoke(app, ["replay", *two, *JOB, "--png", str(png)])
    assert result.exit_code == 0, result.output
    assert result.output.count("window.npz") == 2
    assert png.read_bytes().startswith(b"\x89PNG")
    result = CliRunner().invoke(app, ["compare", str(window_file), *JOB], env={"COLUMNS": "80"})
    assert "RoutePack" in result.stdout
    assert "…" not in result.stdout  # a figure that is cut short is none
    result = CliRunner().invoke(app, ["compare", str(window_file), *JOB, "--json"])
    assert {row["policy"] for row in json.loads(result.stdout)} >= {"Base", "verl", "slime", "RoutePack"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--stage", "attention"], "--stage"),
        (["--shape", "1,2,3,4"], "--stage"),
        (["--stage", "attention=nan"], "--stage = 'attention=nan'"),
        (["--slots", "3", "--shards", "2"], "--shards = 2"),
        (["--ranks", "5"], "--ranks = 5"),
        (["--out", "/dev/null/plan"], "--out = '/dev/null/plan'"),
        (["--metrics-file", "/"], "--metrics-file = '/'"),
        (
            ["--metrics-file", "metrics.txt"],
            "--metrics-file = 'metrics.txt' is not allowed; allowed: a file whose name ends in .prom",
        ),
        (["--png", "/dev/null"], "--png = '/dev/null'"),
        (["--capacity", "50"], "lengths"),
        (["--capacity", str(10**20)], f"--capacity = {10**20} is not allowed; allowed: an integer of at least 1"),
        (["--seed", str(10**20)], f"--seed = {10**20} is not allowed; allowed: an integer of at least 0"),
        (["--pipeline", "0"], "--pipeline = 0"),
        (["--move-cost", "-1"], "--move-cost = -1.0"),
    ],
)
def test_the_command_refuses_by_name(window_file: Path, change: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["plan", str(window_file), *JOB, *change])
    assert isinstance(result.exception, MegafluxError)
    assert message in str(result.exception)


def test_a_shape_without_width_is_refused_by_name(window_file: Path) -> None:
    job = ["--ranks", "4", "--slots", "4", "--capacity", "300", "--shape", "24,2880,0,4096"]
    result = CliRunner().invoke(app, ["plan", str(window_file), *job])
    assert isinstance(result.exception, ConfigError)
    assert "--shape = '24,2880,0,4096' is not allowed; allowed: four integers of at least 1" in str(result.exception)


def test_a_damaged_window_file_is_refused_or_read_as_it_was(tmp_path: Path) -> None:
    demand, path = window(16), tmp_path / "window.npz"
    np.savez_compressed(path, counts=demand.counts, lengths=demand.lengths)
    whole = path.read_bytes()
    for at in range(0, len(whole), 5):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            read = Demand.load(path)
        except InputError as error:
            assert "window.npz" in str(error)  # noqa: PT017
        else:
            assert np.array_equal(read.counts, demand.counts)
            assert np.array_equal(read.lengths, demand.lengths)
    for size in (0, len(whole) // 2):
        path.write_bytes(whole[:size])
        with pytest.raises(InputError, match=r"window\.npz: is no \.npz file"):
            Demand.load(path)
    np.save(tmp_path / "array.npy", demand.counts)
    with pytest.raises(InputError, match=r"array\.npy: is no \.npz file"):
        Demand.load(tmp_path / "array.npy")
    for shape in ((0, 1, 2), (4, 0, 2), (4, 2, 0)):
        np.savez(path, experts=np.zeros(shape, np.int16), offsets=[0, shape[0]])
        with pytest.raises(InputError, match=r"experts|offsets"):
            Demand.load(path)


def test_routes_of_a_file_count_as_many_experts_as_their_ids_need_in_eights(tmp_path: Path) -> None:
    for highest, num_experts in ((6, 8), (7, 8), (8, 16)):
        np.savez(tmp_path / "routes.npz", experts=np.array([[[0, highest]]], dtype=np.int16), offsets=[0, 1])
        assert Demand.load(tmp_path / "routes.npz").counts.shape == (1, 1, num_experts)


def test_a_bad_window_names_its_file(tmp_path: Path) -> None:
    path = tmp_path / "window.npz"
    np.savez(path, counts=np.full((4, 2, 4), -1), lengths=np.full(4, 2))
    with pytest.raises(InputError) as refused:
        Demand.load(path)
    assert str(refused.value).startswith(f"{path}: demand: is -1 at trajectory 0")


def test_a_window_file_that_is_none_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    (tmp_path / "text.npz").write_text("no archive")
    for name in ("missing.npz", "other.npz", "text.npz"):
        with pytest.raises(InputError, match=name.replace(".", r"\.")):
            Demand.load(tmp_path / name)


def test_the_public_names_are_these() -> None:
    assert sorted(routepack.__all__) == routepack.__all__
    assert all(hasattr(routepack, name) for name in routepack.__all__)

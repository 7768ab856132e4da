"""The device planner as it is compiled for Hopper, executed on a CPU: equal to the reference, in any order of warps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from megaflux_kernels import planner_buffers
from megaflux_kernels.layout import STALE, PlanLayout, SearchShape, Wait
from megaflux_kernels.planner_buffers import home_table
from megaflux_kernels.planner_map import THREADS, PlannerMap, PlannerShape
from megaflux_kernels.search import NUM_CANDIDATES
from megaflux_kernels.symmetric import SymmetricMemory
from megaflux_kernels.totals_map import Total
from megaflux_kernels.worklist import LayerShape

from benchmarks import planner_rig
from benchmarks.bench_planner_equality import differing_batch
from benchmarks.planner_cases import expected_tables, first_difference, groups
from benchmarks.planner_rig import Tables
from megaflux_serve.planning import planner
from megaflux_serve.planning.plan import ReplicaPlan
from megaflux_serve.planning.totals import LayerTotals, totals_map
from megaflux_serve.planning.workload import zipf_shares
from megaflux_serve.routing import expert_counts
from megaflux_serve.slots import SlotLayout
from tests.kernels.cubin import compile_kernels
from tests.kernels.ptx_machine import Machine, MachineError
from tests.kernels.ptx_program import Program

Ids = NDArray[np.int32]
PLAN_THREADS = 256
TOP_K, TOKENS, CHUNKS = 4, 300, 2
PLANS = """
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from megaflux_kernels.layout import SearchShape
from megaflux_kernels.plan_counts import PlanCounts
arguments = (*[Int64(0)] * 4, *[Int32(0)] * 3, *[Int64(0)] * 3, Int32(0))
cute.compile(PlanCounts(SearchShape(*{shape})), *arguments, cutlass.cuda.default_stream())
"""
PLANNER = """
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from megaflux_kernels.layout import SearchShape
from megaflux_kernels.own_tables import ForwardTables
from megaflux_kernels.planner import Planner
from megaflux_kernels.planner_map import PlannerShape
from megaflux_kernels.totals_map import TotalsMap
from megaflux_kernels.worklist import LayerShape, Tiling
layer = {layer}
search = SearchShape(layer.num_experts, layer.num_ranks, layer.num_replica_slots)
shape, tables = PlannerShape(search, layer.top_k, {tokens}, {chunks}), ForwardTables(layer, Tiling())
planner = Planner(shape, tables, False, {totals})
arguments = (*[Int64(0)] * 7, *[Int32(0)] * 4, *[Int64(0)] * 3, Int32(0), Int64(0))
cute.compile(planner, *arguments, cutlass.cuda.default_stream())
"""


def plans_of(
    program: Program,
    layout: PlanLayout,
    counts: NDArray[Any],
    homes: NDArray[np.int32],
    resident: NDArray[np.int32],
    options: Sequence[int],
    seed: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Plans int32 [n, words] of counts [n, P, E], and the copies held afterwards, int32 [n, P, s]."""
    machine = Machine(1 << 24, PLAN_THREADS)
    inputs = [
        machine.tensor(array.shape, torch.int32).copy_(torch.from_numpy(array.astype(np.int32)))
        for array in (counts, homes, resident)
    ]
    plans = machine.tensor((len(counts), layout.num_words), torch.int32, -77)
    arguments = (*(tensor.data_ptr() for tensor in (*inputs, plans)), *options)
    machine.run(program, (len(counts), 1), [arguments], seed)
    return plans.numpy(), inputs[2].numpy()


@pytest.mark.parametrize("shape", [(8, 2, 1), (64, 8, 2), (256, 8, 8), (144, 72, 2), (16, 1, 0)])
def test_plans_of_given_counts_equal_the_reference(shape: tuple[int, int, int], tmp_path: Path) -> None:
    (kernel,) = compile_kernels(PLANS.format(shape=shape), tmp_path)
    program, layout = Program.parse(kernel.ptx), SearchShape(*shape).plan
    for seed, group in enumerate(groups(shape, 10, seed=3)):
        homes = home_table(group.layout.num_experts, group.layout.num_ranks, group.layout.home_rank)
        gate = group.gate
        costs = (gate.block_ns, gate.replica_ns, gate.plan_ns, gate.hidden_permille) if gate else (0, 0, 0, 0)
        options = (group.options.transfer_cost_blocks, group.options.reduction_penalty, *costs)
        plans, held = plans_of(program, layout, group.counts, homes, group.resident, options, seed)
        for case in range(len(plans)):
            expected = expected_tables(group.plan(case), case % shape[1], case + 1)
            assert first_difference(expected, layout.split(plans[case])) is None
            assert np.array_equal(held[case], expected["replica_experts"])


def test_plans_of_batches_that_follow_each_other_equal_the_reference(tmp_path: Path) -> None:
    """Copies stay and shares drift, so that searches with and without regard to copies win."""
    shape, rng = (64, 8, 1), np.random.default_rng(1)
    (kernel,) = compile_kernels(PLANS.format(shape=shape), tmp_path)
    layout, resident, expected = SlotLayout(*shape), [SlotLayout(*shape).no_replicas()], list[ReplicaPlan]()
    logits = np.log(zipf_shares(64, 4))[rng.permutation(64)]
    for _ in range(24):
        logits += 0.1 * rng.standard_normal(64)
        counts = rng.multinomial(8_192, np.exp(logits) / np.exp(logits).sum(), size=8)
        expected.append(planner.plan_replicas(counts, layout, resident=resident[-1]))
        resident.append(expected[-1].replica_experts)
    assert {plan.candidate < NUM_CANDIDATES // 2 for plan in expected} == {True, False}
    homes, counts = home_table(64, 8, layout.home_rank), np.stack([plan.counts for plan in expected])
    program, tables = Program.parse(kernel.ptx), SearchShape(*shape).plan
    plans, _ = plans_of(program, tables, counts, homes, np.stack(resident[:-1]), [0] * 6, seed=2)
    for case, plan in enumerate(expected):
        assert first_difference(expected_tables(plan, case % 8, case + 1), tables.split(plans[case])) is None


class Ranks:
    """Planners of all ranks in one machine, each launched by itself as on a GPU of its own.

    Attributes:
        layer: whose tables they fill.
        layout: ranks, experts, slots.
        ranks: buffers by rank.
        tables: the forward kernel's tables by rank.
        resident: int32 [P, P, s], copies held, by rank.
        totals: int64 [P, words], what each rank adds up.
    """

    def __init__(self, program: Program, layer: LayerShape) -> None:
        self.program, self.layer, self.machine = program, layer, Machine(1 << 24, THREADS)
        num_ranks, slots = layer.num_ranks, layer.num_replica_slots
        self.layout = SlotLayout(layer.num_experts, num_ranks, slots)
        self.tables = [Tables(layer, memory) for memory in self.symmetric(Tables.num_bytes(layer))]
        for tables in self.tables:
            for name in ("header", "tasks", "transfers", "counters", "peers"):
                tensor = getattr(tables, name)
                setattr(tables, name, self.machine.tensor(tensor.shape, tensor.dtype).copy_(tensor))
        shape = PlannerShape(SearchShape(layer.num_experts, num_ranks, slots), TOP_K, TOKENS, CHUNKS)
        memories = self.symmetric(PlannerMap(shape).num_bytes)
        self.ranks = [planner_rig.planner(shape, *own, None, False) for own in zip(memories, self.tables, strict=True)]
        self.topk_ids = self.machine.tensor((num_ranks, TOKENS, TOP_K), torch.int32)
        self.num_tokens = self.machine.tensor((num_ranks, 1), torch.int32)
        self.resident = self.machine.tensor((num_ranks, num_ranks, slots), torch.int32, -1)
        num_words = totals_map(num_ranks, layer.num_experts).num_words
        self.totals = self.machine.tensor((num_ranks, num_words), torch.int64)

    def symmetric(self, num_bytes: int) -> list[SymmetricMemory]:
        """An allocation a rank."""
        buffers = [self.machine.tensor((num_bytes,), torch.uint8) for _ in range(self.layer.num_ranks)]
        addresses = [buffer.data_ptr() for buffer in buffers]
        return [SymmetricMemory(rank, buffer, addresses) for rank, buffer in enumerate(buffers)]

    def launch(self, ids: Sequence[Ids], ranks: Sequence[int], timeout_s: float = 10.0, seed: int = 0) -> None:
        """Plan a batch, int32 [M, k] of every rank, on some ranks side by side."""
        for rank, own in enumerate(ids):
            self.topk_ids[rank, : len(own)] = torch.from_numpy(own)
            self.num_tokens[rank] = len(own)
        arguments = []
        for rank in ranks:
            tensors = (self.topk_ids, self.num_tokens, self.resident, self.totals)
            inputs = [tensor[rank].data_ptr() for tensor in tensors]
            region, options = self.ranks[rank].memory.buffer.data_ptr(), [0] * 6
            arguments.append([inputs[0], 0, *inputs[1:], region, 0, rank, *options, int(timeout_s * 1e9)])
        self.machine.run(self.program, (1 + CHUNKS, 1), arguments, seed)

    def difference(self, ids: Sequence[Ids], held: NDArray[np.int32], launch: int) -> tuple[str | None, ReplicaPlan]:
        """What differs from the reference on any rank, None if nothing does, and the reference's plan."""
        counts = np.stack([expert_counts(own, self.layout.num_experts) for own in ids])
        plan = planner.plan_replicas(counts, self.layout, resident=held)
        return differing_batch(self, plan, list(ids), self.layer, launch), plan


@pytest.fixture
def ranks(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """Ranks for the (E, P, s) that a test asks for."""
    monkeypatch.setattr(planner_buffers, "compile_planner", lambda *shape: None)  # it is executed, not launched
    experts, num_ranks, slots = request.param
    layer = LayerShape(num_ranks, experts, slots, 512, 384, TOP_K, TOKENS)
    (kernel,) = compile_kernels(
        PLANNER.format(layer=layer, tokens=TOKENS, chunks=CHUNKS, totals=totals_map(num_ranks, experts)), tmp_path
    )
    return Ranks(Program.parse(kernel.ptx), layer)


def random_ids(rng: np.random.Generator, num_tokens: int, experts: int, skew: float) -> Ids:
    scores = rng.random((num_tokens, experts)) + skew * np.linspace(0, 1, experts)
    return np.argsort(-scores, axis=1)[:, :TOP_K].astype(np.int32)


def differing_totals(words: torch.Tensor, expected: LayerTotals) -> list[str]:
    """Names of the sums that are not the reference's; times are the machine's own."""
    found, wanted = expected.map.split(words.numpy()), expected.map.split(expected.words)
    clocks = [Total.PLANNER_NS, Total.LAYER_NS, Total.STARTED, Total.FINISHED]
    found["sums"], wanted["sums"] = np.delete(found["sums"], clocks), np.delete(wanted["sums"], clocks)
    return [n for n in wanted if n not in ("planner_time", "layer_time") and not np.array_equal(found[n], wanted[n])]


@pytest.mark.parametrize("ranks", [(8, 2, 1), (32, 4, 2)], indirect=True)
def test_batches_of_ranks_side_by_side_equal_the_reference(ranks: Ranks) -> None:
    rng, held = np.random.default_rng(5), ranks.layout.no_replicas()
    num_ranks, everyone = ranks.layer.num_ranks, range(ranks.layer.num_ranks)
    totals = LayerTotals(num_ranks, ranks.layer.num_experts)
    sizes = [(TOKENS,) * num_ranks, (0,) * num_ranks, (0, 1, TOKENS, 70)[-num_ranks:], (31, 32, 33, 1)[:num_ranks]]
    for launch, tokens in enumerate(sizes, start=1):
        ids = [random_ids(rng, num, ranks.layer.num_experts, 0.5 * launch) for num in tokens]
        ranks.launch(ids, everyone, seed=launch)
        assert [own.failure() for own in ranks.ranks] == [None] * num_ranks
        difference, plan = ranks.difference(ids, held, launch)
        assert difference is None
        held = plan.replica_experts
        totals.add(plan)
        assert [differing_totals(own, totals) for own in ranks.totals] == [[]] * num_ranks
    ranks.resident[num_ranks - 1].fill_(STALE)  # weights of one rank have changed: all forget
    ranks.launch(ids, everyone, seed=9)
    assert ranks.difference(ids, ranks.layout.no_replicas(), 5)[0] is None


@pytest.mark.parametrize("ranks", [(32, 4, 2)], indirect=True)
def test_a_rank_without_its_peers_names_one_then_sends_nothing_and_waits_for_none(ranks: Ranks) -> None:
    ids = [random_ids(np.random.default_rng(7), TOKENS, 32, 1.0)] * 4
    own, peers = ranks.ranks[1], [ranks.ranks[peer] for peer in (0, 2, 3)]
    for timeout_s in (1e-3, 1e6):  # the second would not end
        ranks.launch(ids, [1], timeout_s)
        failure = own.failure()
        assert failure is not None
        assert (failure.wait, failure.rank in (0, 2, 3), failure.slot, failure.epoch) == (Wait.COUNTS, True, 1, 1)
        assert [peer.regions["counts_flags"].tolist() for peer in peers] == [[0, 1, 0, 0]] * 3
        assert (ranks.tables[1].tasks == -1).all()  # no tables from a plan without everyone's counts


def test_an_access_outside_of_the_memory_is_named_with_its_instruction(tmp_path: Path) -> None:
    (kernel,) = compile_kernels(PLANS.format(shape=(8, 2, 1)), tmp_path)
    with pytest.raises(MachineError, match=r"an address outside of the memory: thread \d+, 'ld.global"):
        Machine(1 << 12, PLAN_THREADS).run(Program.parse(kernel.ptx), (1, 1), [[0] * 10])

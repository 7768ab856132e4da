"""How ranks wait for one another: a model of two ranks, every state of it visited. It specifies the protocol.

A rank's stream runs for every batch what ``STEPS`` names: planner, with a copy of the batch's rows beside it, forward
kernel, combine. An access to memory that both ranks use lasts from one step to a later one, and the steps of the ranks,
and of the warps that work side by side, interleave in every order. A wait for the other rank may end unanswered at any
moment, since a peer may be late by any time, and rank 1 may die between any two steps. A rank that has given up goes on
with what is queued. All warps of a kind are one here: what the CTAs of a rank owe each other, local counters say.

Nothing that is reached may break one of these rules:

* What a rank that has not failed reads was written for this launch, from the beginning of the read to its end. Rows of
  a rank that has failed are left out: their results return to that rank alone.
* A rank that has not failed ends a launch with all of its results.
* A rank's first failure names the other rank.
* A rank that has failed waits no more: what is queued would take a timeout a layer.
* A rank that lives comes to its end, and where nobody is late or dies, without a failure.

``FAULTS`` are changes that must be found, among them four that the kernels had.
"""

from __future__ import annotations

from collections import deque
from dataclasses import astuple, dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = "kernels/megaflux_kernels"
STEPS = {  # step of the model: file and function that take it
    "begins": "megaflux_serve/executors/megakernel.py forward",
    "sends counts": f"{KERNELS}/planner.py exchange",
    "sees counts": f"{KERNELS}/planner.py exchange",
    "plans": f"{KERNELS}/planner.py plan",
    "writes routes": f"{KERNELS}/planner.py write",
    "starts": f"{KERNELS}/pull.py run",
    "pulls weights": f"{KERNELS}/pull.py weights",
    "sees the start, to pull": f"{KERNELS}/launch.py await_peers",
    "pulls rows": f"{KERNELS}/pull.py rows",
    "sees the start, to store": f"{KERNELS}/launch.py await_peers",
    "sees rows and weights": f"{KERNELS}/schedule.py wait_for_inputs",
    "reads origins": f"{KERNELS}/stores.py result_rows",
    "stores results": f"{KERNELS}/stores.py store_rows",
    "is done": f"{KERNELS}/stores.py finish",
    "sees the end": f"{KERNELS}/launch.py await_peers",
    "combines": f"{KERNELS}/combine.py kernel",
}
"""A wait that nobody answers ends in the same place; the step is then "gives up" instead of "sees"."""

FAULTS = {  # change of the protocol: the first rule that breaks
    "starts although it has failed": "reads tables",  # until 30 November: a rank that could not plan
    "stores before the others start": "reads tables",  # until 29 November: a CTA whose first task is FC2
    "plans although it has failed": "reads tables",  # until 1 December
    "waits although it has failed": "waits again, for counts",  # until 1 December: the planner
    "is done although it has failed": "reads results",
    "ends before the others are done": "reads results",
    "says that it has started when it sends its counts": "reads tables",
    "pulls weights before it plans": "reads weights",
    "numbers compared without their wrap": "reads counts",
}

TORN = 0
"""Stands for a launch number in memory that is being written, or has never been."""
BEGIN, SEND, AWAIT_COUNTS, PLAN, ROUTE, FORWARD, COMBINE, OVER = range(8)
"""What a rank's stream is doing."""
START, WEIGHTS, AWAIT_START, ROWS, PULLED = range(5)
"""What the pull warps of its forward kernel are doing."""
AWAIT_PEERS, AWAIT_INPUTS, ORIGINS, RESULTS, AWAIT_PULLS, AWAIT_DONE = range(6)
"""What its store warps are doing, and the scheduler for them."""


@dataclass
class Rank:
    """A rank and its memory: each word the number of the launch that wrote it, a flag that of the launch it is for."""

    launch: int = 1
    stage: int = BEGIN
    pull: int = START
    store: int = AWAIT_PEERS
    has_weights: bool = False
    has_rows: bool = False
    failed_in: int = 0  # kernel of the first failure: 2 * launch, the planner, or one more, the forward kernel
    alive: bool = True
    rows: int = TORN  # written by this rank, like ``weights``; all below by its peer
    weights: int = TORN
    even_counts: int = TORN
    odd_counts: int = TORN
    tables: int = TORN
    results: int = TORN
    sent: int = 0
    started: int = 0
    done: int = 0


State = tuple[tuple[int, ...], tuple[int, ...]]


class BrokenRuleError(Exception):
    """A rule does not hold; the message says which, and the steps that lead there."""


class Protocol:
    """Two ranks that serve ``launches`` batches without a pause.

    Args:
        launches: batches.
        first: number on the device, 32 bits, of the first launch.
        fault: one of ``FAULTS``, or none.
        disturbed: a rank may be late, and rank 1 may die.
    """

    def __init__(self, launches: int, first: int = 1, fault: str = "", disturbed: bool = True) -> None:
        self.launches, self.first, self.fault, self.disturbed = launches, first, fault, disturbed

    # ---- every state ----------------------------------------------------------------------------------------------

    def explore(self) -> int:
        """Visit every state that can be reached; returns their number.

        Raises:
            BrokenRuleError: as soon as a rule does not hold.
        """
        initial: State = (astuple(Rank()), astuple(Rank()))
        came_from: dict[State, tuple[State, str] | None] = {initial: None}
        todo = deque([initial])
        while todo:
            state = todo.popleft()
            try:
                steps = self.steps(state)
            except BrokenRuleError as broken:
                names, step = [], came_from[state]
                while step is not None:
                    names.append(step[1])
                    step = came_from[step[0]]
                raise BrokenRuleError(f"{broken}; after: {', '.join(reversed(names))}") from None
            for name, after in steps:
                if after not in came_from:
                    came_from[after] = state, name
                    todo.append(after)
        return len(came_from)

    def steps(self, state: State) -> list[tuple[str, State]]:
        """(name, state after it) of every step that can be taken.

        A step that only begins a read is taken at once and alone: the sooner a read begins, the longer it lasts. A wait
        for what the rank itself brings is given up when nothing else of the rank is left: it may take twice the time.
        """
        every: list[tuple[str, State]] = []
        for number in range(2):
            self.state, self.number, self.me, self.peer = state, number, Rank(*state[number]), Rank(*state[1 - number])
            if not self.me.alive or self.me.stage == OVER:
                continue
            self.at_once: list[tuple[str, State]] = []
            self.found: list[tuple[str, State]] = []
            self.stream()
            if self.at_once:
                return self.at_once
            if self.disturbed and number == 1:
                self.step("dies", alive=False)
            every += self.found
        if not every and any(rank.alive and rank.stage != OVER for rank in (Rank(*memory) for memory in state)):
            raise BrokenRuleError("a rank that lives can go no further")
        return every

    def step(self, name: str, theirs: dict[str, int] | None = None, *, at_once: bool = False, **mine: int) -> None:
        """A step that changes ``mine`` and, in the peer's memory, ``theirs``."""
        me, peer = tuple((vars(self.me) | mine).values()), tuple((vars(self.peer) | (theirs or {})).values())
        after = (me, peer) if self.number == 0 else (peer, me)
        (self.at_once if at_once else self.found).append((f"rank {self.number} {name}", after))

    # ---- rules ----------------------------------------------------------------------------------------------------

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            raise BrokenRuleError(f"rank {self.number} in launch {self.me.launch} {what}")

    def read(self, what: str, launch: int) -> None:
        """Memory that this rank reads is of this launch; asked when a read begins and when it ends."""
        self.require(self.me.failed_in > 0 or launch == self.me.launch, f"reads {what} of launch {launch}")

    def wait(self, what: str, flag: int, kernel: int, *, takes_time: bool, **then: int) -> None:
        """Go on when the peer's flag is there, or give up."""
        failed = self.me.failed_in
        if not self.is_late(flag):
            self.step(f"sees {what}", at_once=True, **then)
        elif self.disturbed or failed:
            self.require(failed in (0, kernel) or not takes_time, f"waits again, for {what}")
            self.step(f"gives up {what}", **then, failed_in=failed or kernel)

    def is_late(self, flag: int) -> bool:
        """Whether this launch is after the flag's, by their 32-bit numbers."""
        mine, theirs = self.first + self.me.launch - 1, self.first + flag - 1
        if self.fault == "numbers compared without their wrap":
            return int32(mine) > int32(theirs)
        return int32(mine - theirs) > 0

    def may(self, deed: str) -> bool:
        """Whether this rank does what a rank that has failed must not do."""
        return self.me.failed_in == 0 or self.fault == f"{deed} although it has failed"

    # ---- a rank ---------------------------------------------------------------------------------------------------

    def stream(self) -> None:
        """Planner, forward kernel, combine. What a step begins to write is torn until the step that ends it."""
        me, launch = self.me, self.me.launch
        counts = "odd_counts" if launch % 2 else "even_counts"
        if me.stage == BEGIN:
            weights = me.weights if me.failed_in else launch  # new ones come between steps, which a failure ends
            self.step("begins", {counts: TORN} if self.may("plans") else {}, stage=SEND, weights=weights)
        elif me.stage == SEND:
            sent = {counts: launch, "sent": launch} if self.may("plans") else {}
            if self.fault == "says that it has started when it sends its counts":
                sent["started"] = launch
            self.step("sends counts", sent, stage=AWAIT_COUNTS)
        elif me.stage == AWAIT_COUNTS:
            if self.fault == "pulls weights before it plans":
                self.read("weights", self.peer.weights)
            if not self.is_late(me.sent):
                self.read("counts", getattr(me, counts))
            self.wait("counts", me.sent, 2 * launch, takes_time=self.may("waits"), stage=PLAN)
        elif me.stage == PLAN:
            self.read("counts", getattr(me, counts))
            self.step("plans", {"tables": TORN} if self.may("plans") else {}, stage=ROUTE)
        elif me.stage == ROUTE:
            fresh = {"pull": START, "store": AWAIT_PEERS, "has_weights": False, "has_rows": False, "rows": launch}
            self.step("writes routes", {"tables": launch} if self.may("plans") else {}, stage=FORWARD, **fresh)
        elif me.stage == FORWARD:
            self.pull_warps()
            self.store_warps()
        elif me.stage == COMBINE:
            self.read("results", me.results)
            self.require(self.disturbed or me.failed_in == 0, "fails without a cause")
            weights = me.weights if me.failed_in else TORN
            next_batch = {"launch": launch + 1, "stage": BEGIN, "rows": TORN, "weights": weights}
            self.step("combines", **(next_batch if launch < self.launches else {"stage": OVER}))

    def pull_warps(self) -> None:
        """Say that this rank has started, pull weights, then, when the peer has started too, rows."""
        me, kernel = self.me, 2 * self.me.launch + 1
        if me.pull == START:
            self.read("weights", self.peer.weights)
            started = {"started": me.launch} if self.may("starts") else {}
            self.step("starts", started, pull=AWAIT_START if me.failed_in else WEIGHTS)
        elif me.pull == WEIGHTS:
            self.read("weights", self.peer.weights)
            self.step("pulls weights", pull=AWAIT_START, has_weights=True)
        elif me.pull == AWAIT_START:
            pull = PULLED
            if not self.is_late(me.started):
                self.read_rows()
                pull = PULLED if me.failed_in else ROWS
            self.wait("the start, to pull", me.started, kernel, takes_time=me.failed_in == 0, pull=pull)
        elif me.pull == ROWS:
            self.read_rows()
            self.step("pulls rows", pull=PULLED, has_rows=True)

    def read_rows(self) -> None:
        self.read("tables", self.me.tables)
        if not self.peer.failed_in:
            self.read("rows", self.peer.rows)

    def store_warps(self) -> None:
        """Wait for the start and for the inputs of tasks, store results, say so, wait for the peer to say so."""
        me, kernel, takes_time = self.me, 2 * self.me.launch + 1, self.me.failed_in == 0
        too_soon = self.fault == "stores before the others start"
        if me.store == AWAIT_PEERS and not too_soon:
            self.wait("the start, to store", me.started, kernel, takes_time=takes_time, store=AWAIT_INPUTS)
        elif me.store <= AWAIT_INPUTS:
            if too_soon or (me.has_weights and me.has_rows):
                self.read("tables", me.tables)
                self.step("sees rows and weights", at_once=True, store=ORIGINS)
            elif not self.found and not self.at_once:
                self.require(me.failed_in > 0, "blames itself for rows or weights")
                self.step("gives up rows and weights", store=ORIGINS)
        elif me.store == ORIGINS:
            self.read("tables", me.tables)
            if me.failed_in:
                self.step("reads origins", store=AWAIT_PULLS)
            else:
                self.step("reads origins", {"results": TORN}, store=RESULTS)
        elif me.store == RESULTS:
            self.step("stores results", {"results": me.launch}, store=AWAIT_PULLS)
        elif me.store == AWAIT_PULLS and me.pull == PULLED:
            self.step("is done", {"done": me.launch} if self.may("is done") else {}, store=AWAIT_DONE)
        elif me.store == AWAIT_DONE:
            done = me.launch if self.fault == "ends before the others are done" else me.done
            if not self.is_late(done):
                self.read("results", me.results)
            self.wait("the end", done, kernel, takes_time=takes_time, stage=COMBINE)


def int32(number: int) -> int:
    """A number as 32 bits with a sign hold it."""
    return (number + 2**31) % 2**32 - 2**31


@pytest.mark.parametrize("first", [1, 2**31 - 2, 2**32 - 2], ids=["from 1", "over the sign", "over the wrap"])
def test_no_order_of_steps_breaks_a_rule_whoever_is_late_or_dies(first):
    assert Protocol(launches=3, first=first).explore() > 50_000


def test_where_nobody_is_late_or_dies_nobody_fails():
    assert Protocol(launches=5, disturbed=False).explore() > 500


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_protocol_is_found(fault):
    with pytest.raises(BrokenRuleError, match=FAULTS[fault]):
        Protocol(launches=3, first=2**31 - 2, fault=fault).explore()


@pytest.mark.parametrize("name", STEPS)
def test_the_kernels_have_what_takes_a_step(name):
    path, function = STEPS[name].split()
    assert f"def {function}(" in (ROOT / path).read_text()

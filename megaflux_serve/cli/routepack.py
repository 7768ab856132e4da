"""``megaflux routepack``: plan a window, replay several, compare policies.

Parses, calls and prints. A window is an ``.npz`` file with ``counts`` and ``lengths``, or with ``experts`` and
``offsets``.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megaflux_serve.cli.command import Commands, MetricsFile, file_to_write, folder_to_make
from megaflux_serve.cli.moves import moves
from megaflux_serve.cli.render import progress
from megaflux_serve.durable import write_atomically
from megaflux_serve.errors import ConfigError, InputError
from megaflux_serve.routepack.demand import Demand
from megaflux_serve.routepack.files import load_plan, save_plan, summary
from megaflux_serve.routepack.placement import Placement, PlacementOptions
from megaflux_serve.routepack.plan import PlanOptions, WindowPlan, plan_window
from megaflux_serve.routepack.population import SearchOptions
from megaflux_serve.routepack.report import PolicyReport, compare_policies
from megaflux_serve.routepack.topology import CostModel, DenseStage, Topology, stages_from_shape

app = Commands(
    name="routepack",
    help="Place experts and schedule trajectories for RL training, from routing replay.",
    no_args_is_help=True,
)

Window = Annotated[
    Path, typer.Argument(help="Window: .npz with counts and lengths, or experts and offsets; or a store.")
]
Ranks = Annotated[int, typer.Option(help="Expert-parallel ranks P.")]
Slots = Annotated[int, typer.Option(help="Data-parallel slots D.")]
Capacity = Annotated[int, typer.Option(help="Tokens that a cell holds, C.")]
Shards = Annotated[int, typer.Option(help="EDP shards G.")]
Pipeline = Annotated[int, typer.Option(help="Pipeline stages PP; rows are at least 2 PP where PP > 1.")]
Stage = Annotated[
    list[str] | None,
    typer.Option(help="Dense stage NAME=LINEAR[,QUADRATIC] in units of C routed rows; repeat for each stage."),
]
Shape = Annotated[
    str | None,
    typer.Option(help="Instead of --stage: LAYERS,HIDDEN,INTERMEDIATE,ATTENTION_WIDTH, costs from operation counts."),
]
Budget = Annotated[float, typer.Option(help="Seconds of search.")]
Proposals = Annotated[
    int | None, typer.Option(help="Moves to propose instead of --budget; the plan is then repeatable exactly.")
]
Seed = Annotated[int, typer.Option(help="Seed of the search.")]
MoveCost = Annotated[
    float, typer.Option(help="Routed rows of straggler time that moving one expert is worth; 0 goes to the CV target.")
]
Communication = Annotated[float, typer.Option(help="Cost of a received token copy in routed rows; 0 leaves it out.")]
Bubble = Annotated[bool, typer.Option("--bubble", help="Count the fill and drain of the pipeline.")]
Png = Annotated[Path | None, typer.Option(help="Write a picture to this file.", callback=file_to_write)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@dataclass(frozen=True)
class Job:
    """Options of every command that plans: the machine, what work costs on it, how hard to search."""

    ranks: Ranks
    slots: Slots
    capacity: Capacity
    shards: Shards = 1
    pipeline: Pipeline = 1
    stage: Stage = None
    shape: Shape = None
    budget: Budget = 1.0
    proposals: Proposals = None
    seed: Seed = 0
    move_cost: MoveCost = 0.0

    @property
    def topology(self) -> Topology:
        """The machine."""
        return Topology(self.ranks, self.slots, self.capacity, self.shards, self.pipeline)

    def options(self, num_trajectories: int, communication: float = 0.0, bubble: bool = False) -> PlanOptions:
        """How to plan a window of so many trajectories."""
        cost = CostModel(_stages(self.stage, self.shape, self.capacity), communication, bubble)
        effort: dict[str, Any] = {"budget_s": self.budget} if self.proposals is None else {"proposals": self.proposals}
        search = SearchOptions.for_size(num_trajectories, seed=self.seed, **effort)
        return PlanOptions(cost, PlacementOptions(move_cost_rows=self.move_cost), search)


def with_options_of_job(command: Callable[..., None]) -> Callable[..., None]:
    """A command that takes a ``Job`` as one that takes the job's fields in its place, as Typer reads it."""
    options = inspect.signature(Job, eval_str=True).parameters
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        parameters += options.values() if parameter.name == "job" else [parameter]

    @wraps(command)
    def run(**values: Any) -> None:
        command(job=Job(**{name: values.pop(name) for name in options}), **values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


@app.command()
@with_options_of_job
def plan(
    window: Window,
    job: Job,
    communication: Communication = 0.0,
    bubble: Bubble = False,
    certify_rows: Annotated[
        float, typer.Option(help="Seconds of CP-SAT for each row count that bounds leave open; needs ortools.")
    ] = 0.0,
    previous: Annotated[Path | None, typer.Option(help="Saved plan whose placement the slots hold now.")] = None,
    out: Annotated[Path | None, typer.Option(help="Save the plan to this new folder.", callback=folder_to_make)] = None,
    metrics_file: MetricsFile = None,
    png: Png = None,
    as_json: Json = False,
) -> None:
    """Plan one window.

    Says which expert goes to which rank, and which trajectories share a cell (a micro-batch of one slot) and a row of
    cells (a step that all slots take together), and compares the plan with other schedules.

    Example: megaflux routepack plan window.npz --ranks 8 --slots 8 --capacity 8192 --shape 24,2880,2880,4096
    """
    topology = job.topology
    demand = Demand.load(window)
    options = replace(job.options(demand.num_trajectories, communication, bubble), certify_rows_s=certify_rows)
    before = load_plan(previous).placement if previous else None
    console = Console()
    with _progress() as report:
        made = plan_window(demand, None, topology, options, before, progress=report)
    policies = compare_policies(demand, made, options) if png or not as_json else []
    if out:
        save_plan(made, out)
    if metrics_file:
        from megaflux_serve.metrics.events import window_planned
        from megaflux_serve.metrics.textfile import add_to_textfile

        window_planned(made)
        add_to_textfile(metrics_file)
    if png:
        _draw_window(png, demand, made, policies)
    if as_json:
        print(json.dumps(summary(made), indent=2))
        return
    console.print(plan_table(made))
    console.print(policy_table(policies))


@app.command()
@with_options_of_job
def compare(
    window: Window,
    job: Job,
    png: Png = None,
    as_json: Json = False,
) -> None:
    """Compare RoutePack with DP-local FFD, global FFD, verl's and slime's schedules on one window."""
    topology = job.topology
    demand = Demand.load(window)
    options = job.options(demand.num_trajectories)
    console = Console()
    with _progress() as report:
        made = plan_window(demand, None, topology, options, progress=report)
    policies = compare_policies(demand, made, options)
    if png:
        _draw_window(png, demand, made, policies)
    if as_json:
        print(json.dumps([report.as_json() for report in policies], indent=2))
    else:
        console.print(policy_table(policies))


@app.command()
@with_options_of_job
def replay(
    windows: Annotated[list[Path], typer.Argument(help="Windows in order; the placement is carried forward.")],
    job: Job,
    png: Png = None,
    as_json: Json = False,
) -> None:
    """Plan several windows one after another, each from the placement that the one before left."""
    topology = job.topology
    console, placement = Console(), None
    made: list[WindowPlan] = []
    policies: list[list[PolicyReport]] = []
    for path in windows:
        demand = Demand.load(path)
        options = job.options(demand.num_trajectories)
        with _progress() as report:
            made.append(plan_window(demand, None, topology, options, placement, progress=report))
        placement = made[-1].placement
        identity = Placement.identity(demand.num_layers, demand.num_experts, job.ranks)
        policies.append(compare_policies(demand, made[-1], options, identity))
    if png:
        from megaflux_serve.routepack.pictures import replay_picture

        write_atomically(png, replay_picture(policies))
    if as_json:
        print(json.dumps([summary(plan) for plan in made], indent=2))
    else:
        console.print(replay_table(windows, made, policies))


app.command()(moves)


def plan_table(made: WindowPlan) -> Table:
    """What a plan decides, one line a fact."""
    table = Table(box=SIMPLE_HEAD, show_header=False, pad_edge=False)
    certified = "certified" if made.rows_certified else f"bound {made.rows_bound}"
    lines = (
        ("experts moved", f"{made.num_moved} of {made.placement.slots.size}"),
        ("rows", f"{made.layout.num_rows} ({certified})"),
        ("modelled cost", f"{made.score.primary:.1f}"),
        ("of global FFD", f"{made.ffd_score.primary:.1f}"),
        ("lower bound", f"{made.bound.total:.1f}"),
        ("excess removed", f"{100 * made.excess_removed:.1f} %"),
        ("global expert excess left", f"{100 * made.excess.window:.2f} %"),
        ("row-local expert excess left", f"{100 * made.excess.row_local:.2f} %"),
        ("moves proposed", f"{sum(made.proposals):,}"),
        ("seconds", ", ".join(f"{step} {seconds:.3f}" for step, seconds in made.seconds.items())),
    )
    for line in lines:
        table.add_row(*line)
    return table


def policy_table(policies: Sequence[PolicyReport]) -> Table:
    """One line a policy; 80 columns hold it, costs of five digits too."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("policy", no_wrap=True)
    shares = ("global\nexcess\n%", "row-\nlocal\nexcess\n%")
    for name in ("rows", "used\n%", "dense", "expert", "joint", *shares, "rho", "saved\n%"):
        table.add_column(name, justify="right", no_wrap=True)
    for report in policies:
        table.add_row(
            report.policy,
            str(report.num_rows),
            f"{100 * report.utilization:.1f}",
            f"{report.dense:.1f}",
            f"{report.expert:.1f}",
            f"{report.primary:.1f}",
            f"{100 * report.window_excess:.2f}",
            f"{100 * report.row_local_excess:.2f}",
            f"{report.rho:.3f}",
            _percent(report.saved),
        )
    return table


def replay_table(
    paths: Sequence[Path], made: Sequence[WindowPlan], policies: Sequence[Sequence[PolicyReport]]
) -> Table:
    """One line a window."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("window")
    for name in ("moved", "rows", "excess\nremoved, %", "saved against\nBase, %", "seconds"):
        table.add_column(name, justify="right")
    for path, plan_made, reports in zip(paths, made, policies, strict=True):
        table.add_row(
            path.name,
            str(plan_made.num_moved),
            str(plan_made.layout.num_rows),
            f"{100 * plan_made.excess_removed:.1f}",
            _percent(reports[-1].saved),
            f"{sum(plan_made.seconds.values()):.2f}",
        )
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f}"


def _stages(stage: Sequence[str] | None, shape: str | None, capacity: int) -> tuple[DenseStage, ...]:
    if bool(stage) == bool(shape):
        problem = "both are given" if stage else "neither is given"
        raise InputError("--stage and --shape", problem, "one of them, such as --stage attention=42.9,53.3")
    if shape:
        try:
            layers, hidden, intermediate, width = (int(part) for part in shape.split(","))
            return stages_from_shape(layers, hidden, intermediate, width, capacity)
        except ValueError as error:
            allowed = "four integers of at least 1, LAYERS,HIDDEN,INTERMEDIATE,ATTENTION_WIDTH"
            raise ConfigError("--shape", shape, allowed) from error
    return tuple(_stage(text) for text in stage or ())


def _stage(text: str) -> DenseStage:
    name, _, numbers = text.partition("=")
    try:
        linear, *quadratic = (float(part) for part in numbers.split(","))
        return DenseStage(name, linear, *quadratic)
    except (TypeError, ValueError) as error:
        raise ConfigError("--stage", text, "NAME=LINEAR[,QUADRATIC], such as attention=42.9,53.3") from error


def _draw_window(path: Path, demand: Demand, made: WindowPlan, policies: Sequence[PolicyReport]) -> None:
    from megaflux_serve.routepack.pictures import window_picture  # loads matplotlib, which only pictures need

    write_atomically(path, window_picture(demand, made, policies))


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """A progress bar that names the step."""
    with progress(counted=False) as bar:
        task = bar.add_task("place", total=1.0)
        yield lambda step, share: bar.update(task, description=step, completed=share)

"""``megaflux plan``: what would replication do for my routing?"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from megaflux_serve.cli.command import file_to_write
from megaflux_serve.cli.forecast import Resize, Scenario, Step, forecast_layer
from megaflux_serve.cli.picture import draw_loads
from megaflux_serve.cli.render import layer_table, progress
from megaflux_serve.cli.summary import LayerSummary, summarise_layer, summarise_model
from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.durable import write_atomically
from megaflux_serve.errors import ConfigError, InputError
from megaflux_serve.planning import GateCosts
from megaflux_serve.trace import MAX_EXPERTS, Trace, read_trace

GATE_COSTS = (
    "integers block_ns, replica_ns and plan_ns (0 to 10^9) and hidden_permille (0 to 1000), as in "
    '\'{"block_ns": 14300, "replica_ns": 252000, "plan_ns": 30000, "hidden_permille": 600}\''
)


def plan(
    trace: Annotated[
        Path, typer.Argument(help="Expert counts (.csv, .json), routed experts (.npy, .npz) or a folder.")
    ],
    ranks: Annotated[int, typer.Option("--ranks", "-p", help="Expert-parallel ranks.")],
    slots: Annotated[int, typer.Option("--slots", "-s", help="Replica slots on each rank.")] = 2,
    block_rows: Annotated[int, typer.Option(help="Rows of a token block; the kernels use 128.")] = 128,
    experts: Annotated[int | None, typer.Option(help="Experts of the model; default: as the trace says.")] = None,
    layer: Annotated[list[str] | None, typer.Option(help="Only these layers; shell patterns; repeatable.")] = None,
    batch_tokens: Annotated[int | None, typer.Option(help="Cut the tokens into batches of all ranks.")] = None,
    sticky: Annotated[bool, typer.Option("--sticky", help="Keep replicas from batch to batch.")] = False,
    transfer_cost_blocks: Annotated[int, typer.Option(help="A new replica must win more blocks than this.")] = 0,
    gate: Annotated[
        str | None, typer.Option(help="Costs as a JSON object, as a server takes them; see the last example.")
    ] = None,
    tokens_per_rank: Annotated[int | None, typer.Option(help="Scale every batch to this many tokens a rank.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Experts a token, to scale; default: as the trace says.")] = None,
    rebin: Annotated[int | None, typer.Option(help="Scale to this many experts (MegaFlux, appendix B.1).")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write every figure to this file.", callback=file_to_write)
    ] = None,
    png_file: Annotated[
        Path | None, typer.Option("--png", help="Draw the load of each rank to this file.", callback=file_to_write)
    ] = None,
) -> None:
    """What would replication do for my routing?

    Plans every layer of a routing trace and shows how far the load of the busiest rank falls, what moves for it, and
    the predicted speed-up of the expert computation. Counts are a batch; figures of several batches are medians.

    Without --gate only token blocks of the busiest rank are compared. With it, planning and weight transfers cost time,
    and a plan that does not pay is dropped.

    [bold]Examples[/bold]

      [cyan]megaflux plan counts.csv --ranks 4[/cyan]

      [cyan]megaflux plan routed_experts.npz --ranks 8 --batch-tokens 8192 --sticky[/cyan]

      [cyan]megaflux plan counts.json --ranks 8 --layer 'olmoe/*' --png loads.png[/cyan]

      [cyan]megaflux plan counts.csv --ranks 4 --gate \\
        '{"block_ns": 14300, "replica_ns": 252000, "plan_ns": 30000, "hidden_permille": 600}'[/cyan]
    """
    config = _config(
        replica_slots=slots,
        block_rows=block_rows,
        transfer_cost_blocks=transfer_cost_blocks,
        sticky=sticky,
        gate=_costs(gate),
    )
    if experts is not None and not 1 <= experts <= MAX_EXPERTS:
        raise ConfigError("--experts", experts, f"an integer of at least 1 and at most {MAX_EXPERTS}")
    routing = read_trace(trace, experts, layer or ())
    most = routing.num_tokens
    if batch_tokens is not None and most is not None and not 1 <= batch_tokens <= most:
        raise ConfigError("--batch-tokens", batch_tokens, f"1 to {most}, the tokens of the trace")
    scenario = Scenario(ranks, config, batch_tokens, _resize(routing, tokens_per_rank, top_k, rebin))
    steps = _forecast(routing, scenario)
    layers = [summarise_layer(name, [step.outcome for step in of_layer]) for name, of_layer in steps.items()]
    total = summarise_model([[step.outcome for step in of_layer] for of_layer in steps.values()])

    console = Console(highlight=False, soft_wrap=True)
    console.print(escape(_heading(routing, scenario, total)))
    console.print(layer_table(layers, total))
    if sticky:
        console.print(_saved_transfers(steps))
    if config.gate is not None:
        num_plans = sum(len(of_layer) for of_layer in steps.values())
        console.print(f"gate: {sum(layer.gated for layer in layers)} of {num_plans} plans did not pay and were dropped")
    if json_file:
        write_atomically(json_file, _document(routing, scenario, layers, total, steps))
        console.print(escape(f"figures: {json_file}"))
    if png_file:
        write_atomically(png_file, draw_loads(layers, f"{trace.name} on {ranks} ranks, {slots} replica slots", "rows"))
        console.print(escape(f"picture: {png_file}"))


# ---- options ---------------------------------------------------------------------------------------------------------


def _config(**options: Any) -> MegaFluxConfig:
    """The options that a server takes too; an error names the flag."""
    try:
        return MegaFluxConfig.parse(options)
    except ConfigError as error:
        name, _, part = error.field.partition(".")
        flag = "--slots" if name == "replica_slots" else f"--{name.replace('_', '-')}"
        raise ConfigError(f"{flag} {part}".strip(), error.value, error.allowed) from None


def _costs(text: str | None) -> dict[str, Any] | None:
    """The value of ``--gate``."""
    if text is None:
        return None
    try:
        costs = json.loads(text)
    except ValueError:
        costs = None
    if not isinstance(costs, dict) or costs.keys() != {field.name for field in fields(GateCosts)}:
        raise ConfigError("--gate", text, GATE_COSTS)
    return costs


def _resize(routing: Trace, tokens_per_rank: int | None, top_k: int | None, rebin: int | None) -> Resize | None:
    """The size to bring batches to, or None."""
    if tokens_per_rank is None:
        for flag, value in (("--rebin", rebin), ("--top-k", top_k)):
            if value is not None:
                raise ConfigError(flag, value, "only together with --tokens-per-rank")
        return None
    top_k = routing.top_k if top_k is None else top_k
    if top_k is None:
        raise InputError("--top-k", "is missing", "experts a token, which a trace of totals does not tell")
    fewest = min(layer.num_experts for layer in routing.layers)
    if rebin is None and top_k > fewest:
        raise ConfigError("--top-k", top_k, f"1 to the {fewest} experts")
    return Resize(tokens_per_rank, top_k, rebin)


# ---- work and results ------------------------------------------------------------------------------------------------


def _forecast(routing: Trace, scenario: Scenario) -> dict[str, list[Step]]:
    """Every layer's steps by name. All layers are checked against the scenario before the first plan."""
    for layer in routing.layers:
        scenario.layout(layer)
    num_plans = sum(layer.num_batches(scenario.batch_tokens) for layer in routing.layers)
    with progress() as bar:
        task = bar.add_task("planning batches", total=num_plans)
        steps: dict[str, list[Step]] = {}
        for layer in routing.layers:
            steps[layer.name] = []
            for step in forecast_layer(layer, scenario):
                steps[layer.name].append(step)
                bar.advance(task)
    return steps


def _heading(routing: Trace, scenario: Scenario, total: LayerSummary) -> str:
    """What was read and what was planned, in two lines."""
    experts = "/".join(str(n) for n in sorted({layer.num_experts for layer in routing.layers}))
    source = f"{routing.source}: {len(routing.layers)} layers, {experts} experts"
    if routing.experts_inferred:
        source += " (largest id + 1; --experts sets it)"
    if routing.num_tokens is not None:
        source += f", top-{routing.top_k}, {routing.num_tokens:,} tokens"
    batches = "the whole trace as one batch"
    if scenario.batch_tokens is not None:
        batches = f"{total.num_batches} batches of {scenario.batch_tokens:,} tokens, medians over batches"
    if scenario.resize is not None:
        resize = scenario.resize
        resized = f"{resize.num_experts} experts, " if resize.num_experts else ""
        batches += f", scaled to {resized}{resize.tokens_per_rank:,} tokens a rank, top-{resize.top_k}"
    slots = f"{scenario.config.replica_slots} replica slots a rank, blocks of {scenario.config.block_rows} rows"
    return f"{source}\n{scenario.num_ranks} ranks, {slots}; {batches}"


def _transfers(steps: dict[str, list[Step]]) -> tuple[int, int]:
    """Weight transfers of the whole trace: as planned, and if no replica were kept."""
    everything = [step for of_layer in steps.values() for step in of_layer]
    return sum(step.outcome.transfers for step in everything), sum(step.fresh_transfers for step in everything)


def _saved_transfers(steps: dict[str, list[Step]]) -> str:
    """What keeping replicas saved."""
    made, fresh = _transfers(steps)
    share = f" ({100 * (fresh - made) / fresh:.0f} % saved)" if fresh else ""
    return f"weight transfers, all layers and batches: {fresh} without --sticky, {made} with it{share}"


def _document(
    routing: Trace, scenario: Scenario, layers: list[LayerSummary], total: LayerSummary, steps: dict[str, list[Step]]
) -> bytes:
    """The figures as JSON."""
    made, fresh = _transfers(steps)
    document = {
        "trace": {"source": routing.source, "tokens": routing.num_tokens, "top_k": routing.top_k},
        "ranks": scenario.num_ranks,
        "batch_tokens": scenario.batch_tokens,
        "resize": asdict(scenario.resize) if scenario.resize else None,
        "config": scenario.config.model_dump(mode="json", exclude={"executor", "plan_log"}),
        "layers": [asdict(layer) for layer in layers],
        "total": {key: value for key, value in asdict(total).items() if key not in ("layer", "fixed_loads", "loads")},
        "transfers": {"made": made, "without_sticky": fresh},
    }
    return json.dumps(document, indent=2).encode() + b"\n"

"""``megaflux replay``: look into a store of captured routes, check it, seal windows, and pass routes on.

Parses, calls and prints; figures come from ``capture.profile``.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megaflux_serve.capture.files import EXPORTS, IMPORTS, export_records, import_records
from megaflux_serve.capture.frame import Damage, Entry
from megaflux_serve.capture.profile import LayerProfile, layer_profiles, task_distances
from megaflux_serve.capture.record import ModelShape
from megaflux_serve.capture.sealing import seal
from megaflux_serve.capture.store import ReplayStore
from megaflux_serve.capture.window import SealedWindow, open_window, windows_of
from megaflux_serve.cli.command import Commands, MetricsFile, file_to_write
from megaflux_serve.cli.render import progress
from megaflux_serve.durable import write_atomically
from megaflux_serve.errors import ConfigError, InputError

app = Commands(
    name="replay",
    help="Captured routes of rollouts: look, check, seal windows, exchange with training frameworks.",
    no_args_is_help=True,
)

DAMAGED = 1
"""Exit status of ``verify`` on a store with damage."""

Store = Annotated[Path, typer.Argument(help="Folder of a replay store.")]
Window = Annotated[str | None, typer.Option("--window", help="Name of a sealed window; default: the newest.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@app.command()
def inspect(store: Store, as_json: Json = False) -> None:
    """Say what is in a store: model, records, windows, damage. Reads no routes."""
    opened = ReplayStore(store)
    entries, damages = opened.scan()
    windows, faults = windows_of(opened)
    faults = [*map(str, damages), *faults]
    if as_json:
        print(json.dumps(_contents(opened, entries, faults, windows), indent=2))
        return
    console = Console()
    model = opened.model
    console.print(
        f"{escape(str(store))}: {len(model.moe_layers)} MoE layers of {model.num_layers}, {model.num_experts} experts, "
        f"top-{model.top_k}, ids in {model.id_dtype.name}",
        highlight=False,
    )
    console.print(_record_table(opened, entries))
    if windows:
        console.print(_window_table(windows))
    _print_damages(console, faults)


@app.command()
def verify(store: Store) -> None:
    """Read every byte: each record, each window, and each record of each window. Status 1 where there is damage."""
    opened, console = ReplayStore(store), Console()
    entries, damages = opened.scan()
    windows, faults = windows_of(opened)
    num_windows = len(windows) + len(faults)
    faults = [*map(str, damages), *faults]
    with progress() as bar:
        for entry in bar.track(entries, description="records"):
            if not opened.is_sound(entry):
                lost = "the checksum of the body does not match, or it cannot be read"
                faults.append(str(Damage(entry.shard, entry.offset, entry.size, lost, entry.id)))
        for window in windows:
            for index in bar.track(range(len(window)), description=f"window {escape(window.name)}"):
                try:
                    window.read(index)
                except InputError as error:
                    faults.append(f"window {window.name!r}: {error}")
    num_sealed = sum(map(len, windows))
    console.print(
        f"{len(entries):,} records, {num_windows} windows with {num_sealed:,} records, {len(faults)} faults",
        highlight=False,
    )
    _print_damages(console, faults)
    if faults:
        raise typer.Exit(DAMAGED)


@app.command("seal")
def seal_window(
    store: Store,
    name: Annotated[str, typer.Argument(help="Name of the new window.")],
    weights: Annotated[
        list[str] | None, typer.Option(help="Weights version that may be in it; repeat for several. Default: one.")
    ] = None,
    metrics_file: MetricsFile = None,
) -> None:
    """Seal a window of every record that no window holds yet."""
    start = time.perf_counter()
    window = seal(ReplayStore(store), name, weights_versions=weights)
    if metrics_file:
        from megaflux_serve.metrics.events import window_sealed
        from megaflux_serve.metrics.textfile import add_to_textfile

        window_sealed(time.perf_counter() - start)
        add_to_textfile(metrics_file)
    print(f"window {window.name}: {len(window):,} records, {int(window.lengths.sum()):,} tokens")


@app.command()
def stats(
    store: Store,
    window: Window = None,
    ranks: Annotated[int, typer.Option(help="Expert-parallel ranks P of the identity placement.")] = 8,
    png: Annotated[Path | None, typer.Option(help="Write a picture to this file.", callback=file_to_write)] = None,
    as_json: Json = False,
) -> None:
    """Expert shares, skew, lengths and distances between tasks of a window (RoutePack Figure 5)."""
    opened = open_window(ReplayStore(store), window)
    layers = layer_profiles(opened.counts, ranks)
    labels, distances = task_distances(opened.counts, [record.task for record in opened.records], ranks)
    if png:
        from megaflux_serve.capture.picture import window_picture  # loads matplotlib, which only pictures need

        write_atomically(png, window_picture(opened, ranks))
    if as_json:
        rows = [[None if np.isnan(value) else float(value) for value in row] for row in distances]
        figures = {"layers": list(map(asdict, layers)), "tasks": labels, "distances": rows}
        print(json.dumps({"window": opened.name, "records": len(opened), "ranks": ranks} | figures, indent=2))
        return
    console = Console()
    middle, high = np.percentile(opened.lengths, (50, 95))
    console.print(
        f"window {escape(opened.name)}: {len(opened):,} records, {int(opened.lengths.sum()):,} tokens, length P50/P95 "
        f"{middle:,.0f}/{high:,.0f}, {ranks} ranks of identity placement",
        highlight=False,
    )
    console.print(_layer_table(opened.store.model, layers))
    if len(labels) > 1:
        console.print(_distance_table(labels, distances))
    if png:
        console.print(f"picture: {escape(str(png))}", highlight=False)


@app.command()
def export(
    store: Store,
    form: Annotated[str, typer.Argument(help=f"One of {', '.join(EXPORTS)}.")],
    out: Annotated[Path, typer.Argument(help="File to write.", callback=file_to_write)],
    window: Window = None,
) -> None:
    """Write the routes of a window in the form of a training framework."""
    opened = open_window(ReplayStore(store), window)
    with progress() as bar:
        records = list(bar.track(opened, total=len(opened), description="read"))
    export_records(records, form, out)
    print(f"{out}: {len(records):,} records as {form}")


@app.command("import")
def import_file(
    source: Annotated[Path, typer.Argument(help="File, or folder of .npy responses.")],
    form: Annotated[str, typer.Argument(help=f"One of {', '.join(IMPORTS)}.")],
    store: Annotated[Path, typer.Argument(help="Folder of the store; made where there is none, from --model.")],
    model: Annotated[
        str | None, typer.Option(help="EXPERTS,TOP_K,LAYERS[,FIRST_MOE_LAYER], for a store that does not exist yet.")
    ] = None,
    prompt_tokens: Annotated[int | None, typer.Option(help="Prompt length, for files that do not say.")] = None,
    task: Annotated[str, typer.Option(help="Task label, for files that do not say.")] = "",
    weights: Annotated[str, typer.Option(help="Weights version, for files that do not say.")] = "",
) -> None:
    """Append routes from a file of another form to a store: all of them, or none where one is refused."""
    if model is None and not store.exists():
        raise InputError("--model", "is missing", f"EXPERTS,TOP_K,LAYERS[,FIRST_MOE_LAYER] of the new store {store}")
    shape = ReplayStore(store).model if model is None else _model(model)
    records = list(import_records(source, form, shape, prompt_tokens, task=task, weights_version=weights))
    with ReplayStore.create(store, shape).writer() as writer, progress() as bar:
        for record in bar.track(records, description="append"):
            writer.append(record)
    print(f"{store}: {writer.num_records:,} records appended, {writer.num_bytes:,} bytes")


def _contents(
    store: ReplayStore, entries: list[Entry], faults: list[str], windows: list[SealedWindow]
) -> dict[str, object]:
    return {
        "model": asdict(store.model),
        "records": len(entries),
        "tokens": sum(entry.num_tokens for entry in entries),
        "bytes": sum(entry.size for entry in entries),
        "weights_versions": dict(Counter(entry.weights_version for entry in entries)),
        "tasks": dict(Counter(entry.task for entry in entries)),
        "windows": {window.name: len(window) for window in windows},
        "damages": faults,
    }


def _record_table(store: ReplayStore, entries: list[Entry]) -> Table:
    """One line for each weights version and task."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("weights", "task"):
        table.add_column(name, overflow="fold")
    for name in ("records", "groups", "tokens", "rows without\nroutes", "bytes\na token", "raw int32\nbytes a token"):
        table.add_column(name, justify="right")
    raw = 4 * store.model.num_layers * store.model.top_k
    for weights, task in sorted({(entry.weights_version, entry.task) for entry in entries}):
        chosen = [entry for entry in entries if (entry.weights_version, entry.task) == (weights, task)]
        tokens = sum(entry.num_tokens for entry in chosen)
        table.add_row(
            escape(weights) or "-",
            escape(task) or "-",
            f"{len(chosen):,}",
            f"{len({entry.group for entry in chosen if entry.group}):,}",
            f"{tokens:,}",
            f"{sum(entry.num_tokens - 1 - entry.num_valid for entry in chosen):,}",
            f"{sum(entry.size for entry in chosen) / tokens:.1f}",
            str(raw),
        )
    return table


def _window_table(windows: list[SealedWindow]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("window", overflow="fold")
    for name in ("records", "tokens"):
        table.add_column(name, justify="right")
    for name in ("weights", "sealed", "damage when sealed"):
        table.add_column(name)
    for window in windows:
        weights = sorted({record.weights_version or "-" for record in window.records})
        tokens = f"{int(window.lengths.sum()):,}"
        damage = str(len(window.damages) or "-")
        name, versions = escape(window.name), escape(", ".join(weights))
        table.add_row(name, f"{len(window):,}", tokens, versions, window.sealed_at, damage)
    return table


def _layer_table(model: ModelShape, layers: list[LayerProfile]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in (
        "layer",
        "rows",
        "kappa",
        "hottest\nexpert",
        "share\nover 1/E",
        "experts\nwithout rows",
        "rank\nmax/mean",
    ):
        table.add_column(name, justify="right")
    for layer, figures in zip(model.moe_layers, layers, strict=True):
        table.add_row(
            str(layer),
            f"{figures.rows:,}",
            f"{figures.kappa:.2f}",
            str(figures.hottest),
            f"{figures.hottest_over_uniform:.2f}",
            str(figures.idle),
            f"{figures.rank_max_over_mean:.3f}",
        )
    return table


def _distance_table(labels: list[str], distances: NDArray[np.float64]) -> Table:
    title = "root JSD of rank loads between tasks; diagonal: two halves of one task"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", justify="right")
    table.add_column("task", overflow="fold")
    for number in range(1, len(labels) + 1):
        table.add_column(str(number), justify="right", no_wrap=True)
    for number, (label, row) in enumerate(zip(labels, distances, strict=True), 1):
        table.add_row(str(number), escape(label) or "-", *("-" if np.isnan(value) else f"{value:.3f}" for value in row))
    return table


def _print_damages(console: Console, damages: list[str]) -> None:
    for damage in damages:
        console.print(f"damage: {escape(damage)}", style="red", highlight=False)


def _model(text: str) -> ModelShape:
    try:
        parts = [int(part) for part in text.split(",")]
        experts, top_k, layers, first = parts if len(parts) == 4 else (*parts, 0)
        return ModelShape(experts, top_k, layers, tuple(range(first, layers)) or (first,))
    except ValueError as error:
        raise ConfigError("--model", text, "EXPERTS,TOP_K,LAYERS[,FIRST_MOE_LAYER], such as 128,8,24") from error

"""How results look: the layer table of the terminal, numbers and progress.

Decides columns and formats. Computes nothing but what it prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from megaflux_serve.cli.summary import LayerSummary


def progress(counted: bool = True) -> Progress:
    """A progress bar on standard error that vanishes when the work is done; none where that is no terminal.

    Args:
        counted: show how many steps of how many are done.
    """
    console = Console(stderr=True)
    counts = (MofNCompleteColumn(),) if counted else ()
    columns = (TextColumn("{task.description}"), BarColumn(), *counts, TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def layer_table(layers: Sequence[LayerSummary], total: LayerSummary) -> Table:
    """Skew, balance and cost of every layer, and ``total`` as the line at the end.

    A folder that all names share, as in ``olmoe/github/0``, is said once, above.
    """
    folders = zip(*(layer.layer.split("/")[:-1] for layer in layers), strict=False)
    shared = [names[0] for names in takewhile(lambda names: len(set(names)) == 1, folders)]
    title = escape(f"layers of {'/'.join(shared)}") if shared else None
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("layer", overflow="fold", min_width=8)
    for name in (
        "kappa",
        "max/mean\nfixed",
        "\nafter",
        "excess\nremoved",
        "replicas\nin use",
        "blocks\nmoved",
        "weights\nsent",
        "speed-up\npredicted",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for layer in layers:
        table.add_row(escape("/".join(layer.layer.split("/")[len(shared) :])), *_figures(layer))
    table.add_section()
    table.add_row(escape(total.layer), *_figures(total), style="bold")
    return table


def _figures(layer: LayerSummary) -> list[str]:
    """One row of the table without its name."""
    return [
        f"{layer.kappa:.2f}",
        f"{layer.max_over_mean_before:.3f}",
        f"{layer.max_over_mean_after:.3f}",
        "-" if layer.eta is None else f"{100 * layer.eta:.1f} %",
        f"{layer.replicas:g}",
        f"{layer.blocks_moved:g}",
        f"{layer.transfers:g}",
        f"{layer.speedup:.2f}x",
    ]

"""How the figures of ``megaflux top`` look: tables, units, and what is shown in red.

Decides columns and formats. Computes nothing but what it prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from megaflux_serve.cli.top.figures import Balance, Figures, Rank

BAR_CELLS, BAR = 20, " " * 20
FIXED_LINES = 18
"""Lines around the rows of ranks and layers: headings, the summary, and the lines that say how many are left out."""
SILENT_S = 30.0
"""A worker that has been silent for longer is shown as a fault, as in the alert MegafluxWorkerSilent."""


def view(url: str, seen: Figures, height: int | None = None) -> RenderableType:
    """Everything as text.

    Args:
        url: where it comes from.
        seen: the figures.
        height: lines of the terminal; None shows every rank and layer.
    """
    below = [*hottest(seen), *capture_lines(seen), *faults(seen)]
    room = len(seen.ranks) + len(seen.layers) if height is None else max(height - FIXED_LINES - len(below), 4)
    ranks = rank_table(seen.ranks, max(room // 2, room - len(seen.layers)))
    layers = layer_table(seen.layers, max(room // 2, room - len(seen.ranks)))
    return Group(heading(url, seen), summary(seen), ranks, layers, *below)


def heading(url: str, seen: Figures) -> str:
    """What runs, and what time the figures are of."""
    builds = "; ".join(
        f"{build['model']} on {build['engine']} {build['engine_version']}, megaflux {build['version']}, "
        f"{build['executor']}, sticky {build['sticky']}, gate {build['gate']}"
        for build in seen.servers
    )
    span = "since the server started" if seen.seconds is None else f"last {seen.seconds:.1f} s"
    return f"[bold]megaflux top[/bold] {escape(url)}, {span}\n{escape(builds)}\n"


def summary(seen: Figures) -> Table:
    """The figures of all layers together."""
    total, seconds = seen.total, seen.seconds
    table = Table(box=None, pad_edge=False, show_header=True, header_style="dim")
    columns = {
        "tokens" if seconds is None else "tokens/s": number(total.tokens / (seconds or 1)),
        "batches" if seconds is None else "batches/s": number(total.batches / (seconds or 1)),
        "speed-up": factor(total.fixed and total.planned and total.fixed / total.planned),
        "max/mean fixed": plain(total.fixed),
        "after": plain(total.planned),
        "excess removed": percent(total.removed),
        "replicas a batch": plain(total.replicas, 1),
        "resident": percent(total.resident),
        "refused by the gate": percent(total.refused),
        "copied" if seconds is None else "copied/s": size(total.copied_bytes / (seconds or 1)),
    }
    for name in columns:
        table.add_column(name, justify="right", overflow="fold")
    table.add_row(*columns.values(), style="bold")
    return table


def rank_table(ranks: Sequence[Rank], room: int) -> Table:
    """Load and time of the ranks; the bar is the load with replicas, full at twice the mean.

    Where not all fit, the most loaded ones are shown.
    """
    shown = ranks if len(ranks) <= room else sorted(ranks, key=lambda rank: rank.planned or 0.0, reverse=True)[:room]
    table = figure_table(
        "rank", "load\nfixed", "\nafter", BAR, "layer\nmean", "\np99", "planner's\nshare", "replica\nslots"
    )
    for rank in shown:
        filled = min(round((rank.planned or 0.0) / 2 * BAR_CELLS), BAR_CELLS)
        times = (duration(rank.layer_s), duration(rank.layer_p99_s), percent(rank.planner_share))
        table.add_row(rank.rank, plain(rank.fixed), plain(rank.planned), "━" * filled, *times, size(rank.slot_bytes))
    say_rest(table, len(ranks) - len(shown))
    return table


def layer_table(layers: Sequence[Balance], room: int) -> Table:
    """Balance of the layers, the hottest first."""
    shown = layers[:room]
    names = (
        "max/mean\nfixed",
        "\nafter",
        "excess\nremoved",
        "replicas\na batch",
        "resident",
        "refused",
        "weights\ncopied",
    )
    table = figure_table("layer, hottest first", *names)
    for layer in shown:
        table.add_row(
            escape(layer.name),
            plain(layer.fixed),
            plain(layer.planned),
            percent(layer.removed),
            plain(layer.replicas, 1),
            percent(layer.resident),
            percent(layer.refused),
            size(layer.copied_bytes),
        )
    say_rest(table, len(layers) - len(shown))
    return table


def say_rest(table: Table, num_left: int) -> None:
    """A last line for what is left out."""
    if num_left:
        table.add_row(f"and {num_left} more", style="dim")


def figure_table(first: str, *others: str) -> Table:
    """An empty table: a name, then figures."""
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="left" if name == BAR else "right", no_wrap=True)
    return table


def hottest(seen: Figures) -> list[str]:
    """The hottest experts, one a line."""
    lines = [
        f"  layer {escape(one.layer)}, expert {one.expert} of rank {one.home_rank}: "
        f"{percent(one.chosen_by)} of the tokens"
        for one in seen.experts
    ]
    return ["hottest experts", *lines] if lines else []


def capture_lines(seen: Figures) -> list[str]:
    """What was captured since the server started."""
    found = seen.capture
    if found is None:
        return []
    each = f", {found.num_bytes / found.tokens:.1f} bytes a token" if found.tokens else ""
    return [f"captured: {number(found.records)} requests, {number(found.tokens)} tokens, {size(found.num_bytes)}{each}"]


def faults(seen: Figures) -> list[str]:
    """What must not be."""
    silent = [rank.rank for rank in seen.ranks if rank.silent_s > SILENT_S]
    lines = [f"silent for more than {SILENT_S:.0f} s: ranks {', '.join(silent)}"] if silent else []
    lines += counted("waits that timed out", seen.timeouts)
    lines += counted("requests whose routes were lost", seen.capture.dropped if seen.capture else {})
    return [f"[red]{line}[/red]" for line in lines]


def counted(what: str, counts: Mapping[str, float]) -> list[str]:
    """A line that names each count, if there are any."""
    return [f"{what}: {', '.join(f'{number(count)} {name}' for name, count in counts.items())}"] if counts else []


# ---- formats ---------------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def plain(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def factor(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    scale, unit = next(((s, u) for limit, s, u in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms")) if seconds < limit), (1.0, "s"))
    return f"{seconds * scale:.3g} {unit}"


def size(num_bytes: float | None) -> str:
    if num_bytes is None:
        return "-"
    scale, unit = next(
        ((s, u) for s, u in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")) if num_bytes >= s), (1, "B")
    )
    return f"{num_bytes / scale:.3g} {unit}" if scale > 1 else f"{num_bytes:.0f} B"


__all__ = ["view"]

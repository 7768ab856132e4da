"""Results of the layer on eight ranks from runs of ``bench_layer_ep8``, and MegaFlux's figures 3, 4 and 5 with them.

    python benchmarks/ep8_report.py layer_ep8.json layer_ep8/64_1.json layer_ep8/64_2.json ...

Decides what a result is (the paper's appendix B.1): the latency of a configuration is the median over its realisations
and processes, of those where every variant was measured; its speed-up is fixed placement's latency over it. The share
of the transfer that is hidden (section 4.3) is one minus the excess of pipelined by that of staged, both over the same
plan with replicas already there; it is left out where staged costs less than 2 %, which noise decides.

Writes the runs together (``layer_ep8_runs.json``), the results, and ``_figure3.png`` to ``_figure5.png`` beside them.
What the paper says in numbers is drawn in black.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import ep8_paper as paper
from benchmarks.ep8_grid import EXPERTS, HIDING_EXPERTS, HIDING_ROUTING, HIDING_TOKENS, ROUTINGS
from benchmarks.harness.figure import figure
from benchmarks.harness.rows import ResultRow, merge_results, read_results, write_records
from benchmarks.harness.table import print_table
from benchmarks.layer_timing import hidden_pct

BENCH = "layer_ep8"
VARIANTS = ("fixed", "staged", "pipelined")
STAGED_ROUTINGS = ("real-low", "real-high", "zipf-k3", "zipf-k6")
"""Those of Figure 4."""

Record = dict[str, Any]
Times = dict[tuple[int, int], dict[str, float]]
"""(realisation, process): latency by variant, milliseconds."""


def results(runs: Sequence[Record]) -> list[Record]:
    """The rows of all configurations.

    Args:
        runs: rows of ``bench_layer_ep8``, of one number of GPUs.

    Raises:
        ValueError: runs on different numbers of GPUs.
    """
    if len(gpus := {row["case"]["gpus"] for row in runs}) != 1:
        raise ValueError(f"runs on {sorted(gpus)} GPUs; allowed: one number, other runs are other results")
    found = []
    for rows in _configurations(runs).values():
        times: Times = defaultdict(dict)
        for row in rows:
            if row["metric"] == "latency_ms":
                times[row["case"]["realisation"], row["case"]["process"]][row["case"]["variant"]] = row["value"]
        complete = {key: by_variant for key, by_variant in times.items() if set(VARIANTS) <= set(by_variant)}
        if complete:
            ideal = [row["value"] for row in rows if row["metric"] == "ideal_speedup"]
            found += list(_configuration(rows[-1], complete, float(np.median(ideal))))
    return found


def _configurations(runs: Sequence[Record]) -> dict[tuple[int, int, str], list[Record]]:
    """Rows by experts, tokens a rank and routing."""
    found = defaultdict(list)
    for row in runs:
        if row["metric"] != "left_out_points":
            found[row["case"]["experts"], row["case"]["tokens_per_rank"], row["case"]["routing"]].append(row)
    return found


def _configuration(like: Record, times: Times, ideal: float) -> Iterator[Record]:
    """The rows of one configuration; ``like`` is one of its runs' rows, for machine, commit and date."""
    of_run = ("realisation", "process", "variant")
    case = {name: value for name, value in like["case"].items() if name not in of_run}

    def row(variant: str, metric: str, value: float, unit: str, baseline: Record | None = None) -> Record:
        own = {"bench": BENCH, "case": case | {"variant": variant}, "metric": metric, "value": value, "unit": unit}
        return like | own | {"baseline": baseline}

    median = {variant: float(np.median([measured[variant] for measured in times.values()])) for variant in VARIANTS}
    fixed = median["fixed"]
    yield row("fixed", "latency_ms", fixed, "ms")
    yield row("fixed", "measurements", len(times), "1")
    for variant in VARIANTS[1:]:
        yield row(variant, "latency_ms", median[variant], "ms", {"name": "fixed", "value": fixed})
        yield row(variant, "speedup_over_fixed", fixed / median[variant], "1")
    yield row("pipelined", "ideal_speedup", ideal, "1")
    hidden = _hidden_pct(times)
    if hidden is not None:
        known = paper.HIDDEN_PCT.get(case["tokens_per_rank"])
        baseline = None if known is None else {"name": paper.MACHINE, "value": known}
        yield row("pipelined", "hidden_pct", hidden, "%", baseline)


def _hidden_pct(times: Times) -> float | None:
    """Mean over processes of the hidden share, each of medians over realisations; None where noise would decide."""
    by_process = defaultdict(list)
    for (_, process), measured in times.items():
        if "resident" in measured:
            by_process[process].append([measured[name] for name in ("staged", "pipelined", "resident")])
    shares = []
    for realisations in by_process.values():
        share = hidden_pct(*np.median(realisations, axis=0))
        if share is None:
            return None
        shares.append(share)
    return float(np.mean(shares)) if shares else None


class Values:
    """Values of the results by metric, variant, experts, routing and tokens a rank."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.case = records[0]["case"]
        self._found: dict[tuple[str, str, int, str], dict[int, float]] = {}
        for record in records:
            case = record["case"]
            key = (record["metric"], case["variant"], case["experts"], case["routing"])
            self._found.setdefault(key, {})[case["tokens_per_rank"]] = record["value"]

    def by_tokens(self, metric: str, variant: str, experts: int, routing: str) -> dict[int, float]:
        """The values of one curve, small batches first."""
        return dict(sorted(self._found.get((metric, variant, experts, routing), {}).items()))

    @property
    def where(self) -> str:
        """On how many GPUs, in words."""
        gpus = self.case["gpus"]
        return f"eight ranks on {gpus} GPU{'s' * (gpus > 1)}" + (", emulated" if self.case.get("emulated") else "")


def draw_figure3(values: Values, path: Path) -> None:
    """Pipelined over fixed by tokens a rank: a panel a routing, a curve a number of experts."""
    curves = {
        (routing, experts): values.by_tokens("speedup_over_fixed", "pipelined", experts, routing)
        for routing in ROUTINGS
        for experts in EXPERTS
    }
    routings = [routing for routing in ROUTINGS if any(curves[routing, experts] for experts in EXPERTS)]
    gains = [1.0, *paper.PEAKS.values(), *(gain for curve in curves.values() for gain in curve.values())]
    title = f"Speed-up over fixed placement, {values.where}; black: {paper.MACHINE}"
    with figure(path, len(routings), title=title, panel_inches=(2.6, 2.8)) as axes:
        for axis, routing in zip(axes, routings, strict=True):
            for experts in EXPERTS:
                if curve := curves[routing, experts]:
                    axis.plot([*curve], [*curve.values()], marker="o", ms=3, label=f"E {experts}")
            if routing in paper.PEAKS:
                axis.axhline(paper.PEAKS[routing], color="black", ls=":", lw=1, label="paper's highest")
            if routing == HIDING_ROUTING:
                known = paper.REAL_HIGH_256
                axis.plot([*known], [*known.values()], "x", color="black", label="paper, E 256")
            axis.axhline(1.0, color="0.4", lw=0.8)
            axis.set_ylim(min(gains) - 0.05, max(gains) + 0.05)
            _tokens_axis(axis, {m for experts in EXPERTS for m in curves[routing, experts]})
            axis.set_title(routing)
        labelled = {
            label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        axes[0].figure.legend(labelled.values(), labelled.keys(), loc="outside lower center", ncols=len(labelled))


def draw_figure4(values: Values, path: Path) -> None:
    """Staged and pipelined over fixed at E = 256, with the paper's ranges of staged as black bars."""
    curves = {
        (routing, variant): values.by_tokens("speedup_over_fixed", variant, HIDING_EXPERTS, routing)
        for routing in STAGED_ROUTINGS
        for variant in VARIANTS[1:]
    }
    routings = [routing for routing in STAGED_ROUTINGS if curves[routing, "staged"]]
    if not routings:
        return
    title = f"Replicas in a stage of their own and pipelined, E {HIDING_EXPERTS}, {values.where}"
    with figure(path, len(routings), title=title, panel_inches=(2.9, 2.8)) as axes:
        for axis, routing in zip(axes, routings, strict=True):
            for variant in VARIANTS[1:]:
                curve = curves[routing, variant]
                axis.plot([*curve], [*curve.values()], marker="o", ms=3, label=variant)
            for index, (tokens, ends) in enumerate(paper.STAGED_256.items()):
                label = None if index else "staged, paper, all four routings"
                axis.plot([tokens, tokens], ends, "-", color="black", lw=2, label=label)
            axis.axhline(1.0, color="0.4", lw=0.8)
            _tokens_axis(axis, {*curves[routing, "staged"], *paper.STAGED_256})
            axis.set_title(routing)
        axes[0].figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)


def draw_figure5(values: Values, path: Path) -> None:
    """The hidden share of the transfer beside the paper's."""
    hidden = values.by_tokens("hidden_pct", "pipelined", HIDING_EXPERTS, HIDING_ROUTING)
    if not hidden:
        return
    title = f"Transfer hidden by pipelining, {HIDING_ROUTING}, E {HIDING_EXPERTS}, %"
    with figure(path, title=title) as (axis,):
        for offset, color, shares, label in (
            (-0.2, "C0", hidden, values.where),
            (0.2, "black", paper.HIDDEN_PCT, paper.MACHINE),
        ):
            at = [index + offset for index, tokens in enumerate(HIDING_TOKENS) if tokens in shares]
            axis.bar(
                at, [shares[tokens] for tokens in HIDING_TOKENS if tokens in shares], 0.38, color=color, label=label
            )
        axis.set_xticks(range(len(HIDING_TOKENS)), [f"{tokens // 1024}K" for tokens in HIDING_TOKENS])
        axis.set_xlabel("tokens a rank")
        axis.figure.legend(loc="outside lower center", ncols=2)


def _tokens_axis(axis: Any, tokens: set[int]) -> None:
    """Batch sizes on a logarithmic axis."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(tokens), [f"{m / 1024:g}" for m in sorted(tokens)], fontsize=7)
    axis.set_xlabel("tokens a rank (K)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", type=Path, help="the file to write")
    parser.add_argument("runs", type=Path, nargs="+", help="files of bench_layer_ep8")
    options = parser.parse_args()
    if missing := [str(path) for path in options.runs if not path.is_file()]:
        parser.error(f"runs: {', '.join(missing)} is no file; allowed: files that bench_layer_ep8 has written")
    together = options.results.with_name(f"{options.results.stem}_runs.json")
    merge_results(together, options.runs)
    runs = read_results(together)
    records = results(runs)
    write_records(options.results, records)
    print_table([ResultRow(**{name: row[name] for name in ResultRow.__dataclass_fields__}) for row in records], BENCH)
    for row in runs:
        if row["metric"] == "left_out_points":
            case = row["case"]
            print(f"left out: E {case['experts']}, {case['tokens_per_rank']} tokens a rank, process {case['process']}: "
                  f"{row['value']:g} points, {case['reason']}")  # fmt: skip
    values = Values(records)
    for number, draw in ((3, draw_figure3), (4, draw_figure4), (5, draw_figure5)):
        draw(values, options.results.with_name(f"{options.results.stem}_figure{number}.png"))


if __name__ == "__main__":
    main()

"""Pictures of the layer benchmarks' rows. Knows the names of their cases; measures nothing.

    python benchmarks/layer_pictures.py layer_forward.json part.json part.json ...

merges the rows of several runs into the first file and draws those of more than one rank beside it: by routing and
variant at 8192 tokens a rank, and gains by batch size.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.harness.figure import figure
from benchmarks.harness.rows import ResultRow, merge_results, read_results

STAGES = {
    "peers started": "waits for peers",
    "rows pulled": "rows arrive",
    "last task stored": "products",
    "end": "ends",
}
"""Marks inside the forward kernel, and what a CTA mostly does up to each."""


def draw_results(rows: Sequence[ResultRow], path: Path) -> None:
    """Sustained TFLOP/s a GPU: a panel a shape and batch size, a group a routing, a bar a variant."""
    values = {
        (
            f"{row.case['shape']}, {row.case['tokens_per_rank']}",
            str(row.case["routing"]),
            str(row.case["variant"]),
        ): row.value
        for row in rows
        if row.metric == "tflops_per_gpu" and row.case["protocol"] == "sustained"
    }
    panels, routings, variants = (list(dict.fromkeys(key[i] for key in values)) for i in range(3))
    if not panels:
        return
    across = min(4, len(panels)) if len(routings) < 4 else 1
    size = (max(4.4, 1.8 * len(routings)), 3.2)
    title = "Forward layer, sustained TFLOP/s a GPU"
    with figure(path, across, -(-len(panels) // across), panel_inches=size, title=title) as axes:
        for axis, panel in zip(axes, panels, strict=False):
            for i, variant in enumerate(variants):
                at = [(j, values[panel, routing, variant]) for j, routing in enumerate(routings)
                      if (panel, routing, variant) in values]  # fmt: skip
                left = [j + (i - len(variants) / 2) / (len(variants) + 1) for j, _ in at]
                axis.bar(left, [value for _, value in at], 1 / (len(variants) + 1), align="edge", label=variant)
            axis.set_title(f"{panel} tokens a rank")
            axis.set_xticks(range(len(routings)), routings, rotation=15)
        for axis in axes[len(panels) :]:
            axis.set_axis_off()
        axes[0].figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(variants))


def draw_tokens(rows: Sequence[ResultRow], path: Path) -> None:
    """Gains over fixed by batch size, sustained, beside the ideal: a panel a shape and routing with several sizes."""
    gains = [row for row in rows if row.metric in ("speedup_over_fixed", "ideal_speedup")]
    gains = [row for row in gains if row.case["protocol"] == "sustained"]
    sizes: dict[tuple[object, object], set[object]] = {}
    for row in gains:
        sizes.setdefault((row.case["shape"], row.case["routing"]), set()).add(row.case["tokens_per_rank"])
    panels = [panel for panel, tokens in sizes.items() if len(tokens) > 2]
    if not panels:
        return
    curves = {
        "ideal": ("ideal_speedup", "pipelined"),
        "pipelined": ("speedup_over_fixed", "pipelined"),
        "staged": ("speedup_over_fixed", "staged"),
    }
    with figure(path, len(panels), title="Forward layer, gain over fixed placement, sustained") as axes:
        for axis, (shape, routing) in zip(axes, panels, strict=True):
            for label, (metric, variant) in curves.items():
                own = {"shape": shape, "routing": routing, "variant": variant}
                found = [row for row in gains if row.metric == metric and own.items() <= row.case.items()]
                points = sorted((row.case["tokens_per_rank"], row.value) for row in found)
                style = "--" if label == "ideal" else "-"
                axis.plot(*zip(*points, strict=True), style, marker="o", ms=3, label=label)
            axis.axhline(1.0, color="0.4", lw=0.8)
            axis.set_xscale("log", base=2)
            axis.set_xticks(sorted(sizes[shape, routing]))
            axis.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1024:g}K")
            axis.set_title(f"{shape}, {routing}")
            axis.set_xlabel("tokens a rank")
        axes[0].figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(curves))


def draw_trace(rows: Sequence[ResultRow], path: Path) -> None:
    """Mean times inside a launch: a panel a shape and routing, a bar a variant and rank."""
    means = [row for row in rows if row.metric == "mean_us" and row.case["mark"] in STAGES]
    panels = list(dict.fromkeys(f"{row.case['shape']}, {row.case['routing']}" for row in means))
    with figure(path, len(panels), title="Inside the forward kernel, mean over CTAs") as axes:
        for axis, panel in zip(axes, panels, strict=True):
            own = [row for row in means if f"{row.case['shape']}, {row.case['routing']}" == panel]
            labels = list(dict.fromkeys(f"{row.case['variant']}, rank {row.case['rank']}" for row in own))
            begin = [0.0] * len(labels)
            for mark, stage in STAGES.items():
                ends = {f"{row.case['variant']}, rank {row.case['rank']}": row.value for row in own
                        if row.case["mark"] == mark}  # fmt: skip
                widths = [ends[label] - at for label, at in zip(labels, begin, strict=True)]
                axis.barh(labels, widths, left=begin, label=stage)
                begin = [ends[label] for label in labels]
            axis.invert_yaxis()
            axis.set_title(panel)
            axis.set_xlabel("microseconds since the first CTA's start")
        axes[0].figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(STAGES))


__all__ = ["draw_results", "draw_tokens", "draw_trace"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Merge result files of the forward layer and draw them.")
    parser.add_argument("merged", type=Path, help="the file to write")
    parser.add_argument("parts", type=Path, nargs="+", help="files of single runs")
    options = parser.parse_args()
    merge_results(options.merged, options.parts)
    fields = ResultRow.__dataclass_fields__
    rows = [ResultRow(**{name: row[name] for name in fields}) for row in read_results(options.merged)]
    rows = [row for row in rows if row.case["ranks"] != 1]
    draw_results([row for row in rows if row.case["tokens_per_rank"] == 8192], options.merged.with_suffix(".png"))
    draw_tokens(rows, options.merged.with_name(f"{options.merged.stem}_tokens.png"))


if __name__ == "__main__":
    main()

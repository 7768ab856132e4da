"""Draw what the committed training.json and report.json hold, and print their figures into the README beside them.

Decides pictures and wording only; every figure is read from the two files.
Run ``python models/tiny-moe/report.py`` after ``measure.py``; README.md is rewritten between its two markers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from corpus import DOMAINS

FOLDER = Path(__file__).parent
COLOURS = {"code": "tab:blue", "prose": "tab:orange", "arithmetic": "tab:green"}
BEGIN, END = "<!-- figures: written by report.py -->", "<!-- end of figures -->"


def draw_loss(training: dict[str, Any], path: Path) -> None:
    """Training loss of each domain against tokens read."""
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    tokens = [record["tokens"] / 1e6 for record in training["loss"]]
    for domain in DOMAINS:
        axes.plot(tokens, [record[domain] for record in training["loss"]], color=COLOURS[domain], label=domain)
    axes.set(xlabel="tokens read, millions", ylabel="training loss, nats a token", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_expert_use(use: dict[str, Any], path: Path) -> None:
    """Share of rows that each expert gets, one panel a layer, one row of cells a domain; a line parts the two ranks."""
    num_layers, num_experts = len(use["share"]["code"]), len(use["share"]["code"][0])
    top = max(max(layer) for share in use["share"].values() for layer in share)
    figure, panels = plt.subplots(
        num_layers, 1, figsize=(8, 1.25 * num_layers + 0.4), sharex=True, layout="constrained"
    )
    for layer, axes in enumerate(panels):
        image = axes.imshow([use["share"][domain][layer] for domain in DOMAINS], vmin=0, vmax=top, aspect="auto")
        axes.axvline(num_experts / 2 - 0.5, color="white", linewidth=2)
        axes.set_yticks(range(len(DOMAINS)), DOMAINS)
        axes.set_title(f"layer {layer}", fontsize=9, loc="left")
    panels[-1].set_xticks(range(num_experts))
    panels[-1].set_xlabel("expert")
    figure.colorbar(image, ax=panels, label="share of rows")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def figures(training: dict[str, Any], report: dict[str, Any]) -> str:
    """The figures of the two files as Markdown."""
    held_out, use = report["held_out"], report["expert_use"]
    learnt = table(
        ["held-out text", "tokens", "bytes a token", "perplexity a token", "unigram perplexity"],
        [
            [
                d,
                f"{v['tokens']:,}",
                str(v["bytes_per_token"]),
                f"{v['perplexity']:.2f}",
                f"{v['unigram_perplexity']:.0f}",
            ]
            for d, v in held_out.items()
        ],
    )
    sums = table(
        ["arithmetic, numbers below", "problems", "exact as a line", "exact as a chat", "commonest answer"],
        [
            [f"{limit}, {split.replace('_', ' ')}", f"{v['problems']:,}"]
            + [f"{v[key]:.1%}" for key in ("lines", "chats", "commonest_answer")]
            for limit in report["arithmetic"]["train"]
            for split in ("train", "held_out")
            for v in [report["arithmetic"][split][limit]]
        ],
    )
    layers = [f"layer {layer}" for layer in range(len(use["kappa"]["code"]))]
    skew = table(
        ["skew", *layers],
        [
            *([f"kappa, {d}", *(f"{x:.2f}" for x in v)] for d, v in use["kappa"].items()),
            *([f"EP 2 max/mean, {d}", *(f"{x:.2f}" for x in v)] for d, v in use["ep2_max_over_mean"].items()),
            *([f"distance, {d}", *(f"{x:.2f}" for x in v)] for d, v in use["js_distance"].items()),
        ],
    )
    samples = "\n\n".join(f"{s['prompt']}|{s['continuation']}" for s in report["continuations"])
    return f"""\
{report["parameters"]:,} parameters, {report["weight_bytes"] / 1e6:.1f} MB. Trained for {training["steps"]:,} steps on \
{training["loss"][-1]["tokens"] / 1e6:.1f} million tokens, in {training["minutes"]:.0f} minutes on \
{training["threads"]} thread(s) of a busy CPU.

{learnt}

{sums}

{skew}

Greedy continuations; `|` stands where the prompt ends:

```text
{samples}
```"""


def with_figures(readme: str, text: str) -> str:
    """The README with ``text`` between its two markers.

    Raises:
        ValueError: a marker is missing.
    """
    head, _, rest = readme.partition(BEGIN)
    _, found, tail = rest.partition(END)
    if not found:
        raise ValueError(f"README.md lacks the markers {BEGIN!r} and {END!r}")
    return f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}"


def main() -> None:
    training, report = (json.loads((FOLDER / name).read_text()) for name in ("training.json", "report.json"))
    draw_loss(training, FOLDER / "loss.png")
    draw_expert_use(report["expert_use"], FOLDER / "experts.png")
    readme = FOLDER / "README.md"
    readme.write_text(with_figures(readme.read_text(), figures(training, report)))


if __name__ == "__main__":
    main()

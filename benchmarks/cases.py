"""The routing workloads that benchmarks share: MegaFlux appendix B.1 on real traces and on controlled families.

Decides which source histograms make which family, so that two benchmarks that name a routing mean the same loads. Real
traces are read from ``MEGAFLUX_TRACES`` (default ``../shared/traces`` beside the repository):

* ``real-low`` to ``real-extreme``: the paper's skew bands over gpt-oss-20b, an event being a batch of 8,192 consecutive
  tokens of the trace, a histogram one of its 24 layers;
* ``olmoe-<domain>``: OLMoE-1B-7B on one text domain, the three realisations being its layers 0, 7 and 15;
* ``balanced``, ``zipf-k3``, ``zipf-k6``: controls.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megaflux_serve.planning import workload
from megaflux_serve.routing import CountArray, kappa
from megaflux_serve.trace import read_trace

TRACES = Path(os.environ.get("MEGAFLUX_TRACES", Path(__file__).resolve().parents[2] / "shared" / "traces"))
GPT_OSS = TRACES / "gptoss20b" / "routed_experts.npz"
OLMOE = TRACES / "olmoe" / "expert_counts.json"

EVENT_TOKENS = 8192
TOP_K = 8
CONTROLS = ("balanced", "zipf-k3", "zipf-k6")
OLMOE_DOMAINS = ("arxiv", "book", "c4", "github", "tulu", "wikipedia")
REAL = (*workload.BANDS, *(f"olmoe-{domain}" for domain in OLMOE_DOMAINS))


@dataclass(frozen=True)
class Setting:
    """One routing workload.

    Attributes:
        experts: E.
        ranks: P.
        tokens_per_rank: M.
        routing: a family of ``CONTROLS`` or ``REAL``.
    """

    experts: int
    ranks: int
    tokens_per_rank: int
    routing: str

    def realisations(self) -> list[CountArray]:
        """int64 [E] rows per expert of the three realisations, seeds 17, 29 and 43, top-8."""
        num_tokens = self.ranks * self.tokens_per_rank
        shares = family_shares(self.routing, self.experts)
        return [
            workload.permute(workload.scale_counts(share, num_tokens, TOP_K), seed)
            for share, seed in zip(shares, workload.SEEDS, strict=True)
        ]


def families() -> tuple[tuple[str, ...], str | None]:
    """The families that this machine has, and why the real ones are left out where they are."""
    missing = [str(path) for path in (GPT_OSS, OLMOE) if not path.is_file()]
    if missing:
        return CONTROLS, f"real traces are left out: no {', '.join(missing)} (set MEGAFLUX_TRACES)"
    return CONTROLS + REAL, None


def family_shares(routing: str, num_experts: int) -> tuple[NDArray[np.float64], ...]:
    """float64 [E] shares of the three realisations of a family."""
    if routing == "balanced":
        return (workload.balanced_shares(num_experts),) * len(workload.SEEDS)
    if routing.startswith("zipf-k"):
        return (workload.zipf_shares(num_experts, float(routing.removeprefix("zipf-k"))),) * len(workload.SEEDS)
    return tuple(workload.rebin(histogram, num_experts) for histogram in _real_histograms()[routing])


@cache
def _real_histograms() -> Mapping[str, list[CountArray]]:
    """Three source histograms of every real family."""
    histograms, events = [], []
    for layer in read_trace(GPT_OSS).layers:
        for event, counts in enumerate(layer.batches(EVENT_TOKENS)):
            histograms.append(counts)
            events.append(event)
    bands = workload.select_bands([kappa(counts) for counts in histograms], events)
    chosen = {band: [histograms[i] for i in indices] for band, indices in bands.items()}
    for domain in OLMOE_DOMAINS:
        layers = read_trace(OLMOE, layers=[f"olmoe/expert_counts/{domain}/*"]).layers
        chosen[f"olmoe-{domain}"] = [layer.counts for layer in layers]
    return chosen

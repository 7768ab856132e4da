"""What the MegaFlux paper says in numbers about eight ranks (8 x B200, MXFP4 and MXFP8, forward), and where.

Only numbers of its text, tables and bar labels; curves without numbers are not read off.
"""

from __future__ import annotations

MACHINE = "paper, 8 x B200"

GEOMETRIC_MEAN, BALANCED_MEAN = 1.45, 0.985
"""Section 4.2: speed-up over fixed placement, geometric means over the grid and over balanced routes."""

PEAKS = {"real-median": 2.14, "real-high": 1.99, "real-extreme": 1.93, "zipf-k3": 1.53, "zipf-k6": 1.86}
"""Section 4.2: the highest speed-up of a routing family."""

REAL_HIGH_256 = {1024: 1.29, 65536: 1.77}
"""Section 4.2: speed-up at E = 256 under real-high routing by tokens a rank."""

STAGED_256 = {1024: (1.03, 1.17), 32768: (1.37, 1.74)}
"""Section 4.3: range of the separate-stage speed-up over real-low, real-high, kappa 3 and 6 at E = 256."""

PIPELINING_SAVES_PCT = {1024: (9.6, 13.2), 32768: (-0.3, 0.2)}
"""Section 4.3: how much shorter pipelined is than separate stages there, percent."""

HIDDEN_PCT = {1024: 76, 2048: 65, 4096: 68, 6144: 56}
"""Figure 5 (a), labels of the bars: the share of the weight transfer that is hidden, real-high, E = 256."""

PLANNER_US = {128: (42.6, 65.9), 256: (49.8, 72.0)}
"""Section 4.5: planning from 1K to 128K tokens a rank by E, microseconds."""

PREFILL = {
    (8, 16384): 1.128,
    (8, 32768): 1.133,
    (16, 16384): 1.227,
    (16, 32768): 1.238,
    (32, 16384): 1.165,
    (32, 32768): 1.260,
}
"""Table 1: prefill of DeepSeek-V4-Pro in vLLM over fixed placement, by (batch, chunk budget of a GPU)."""

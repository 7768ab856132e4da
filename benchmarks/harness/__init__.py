"""What every benchmark shares: time calls, keep result rows, print them and draw them.

A benchmark is cases and a call; what it measures becomes ``ResultRow`` values::

    samples = time_call(lambda: plan_replicas(counts, layout))
    rows.append(ResultRow("planner_cpu", case, "plan_us", summarise(samples).median_us, "us"))
    write_results(RESULTS / "planner_cpu.json", rows, RunContext.current(cpu_name(), "numpy", "numba"))
    print_table(rows)
    with figure(RESULTS / "planner_cpu.png", columns=2) as axes: ...
"""

from benchmarks.harness.figure import figure
from benchmarks.harness.rows import (
    RESULTS,
    Plain,
    ResultRow,
    RunContext,
    cpu_name,
    merge_results,
    read_results,
    write_results,
)
from benchmarks.harness.table import print_table
from benchmarks.harness.timing import Timing, summarise, time_call

__all__ = [
    "RESULTS",
    "Plain",
    "ResultRow",
    "RunContext",
    "Timing",
    "cpu_name",
    "figure",
    "merge_results",
    "print_table",
    "read_results",
    "summarise",
    "time_call",
    "write_results",
]

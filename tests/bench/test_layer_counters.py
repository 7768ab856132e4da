"""Rows from what Nsight Compute prints."""

from __future__ import annotations

import pytest

from benchmarks.layer_counters import COUNTERS, rows

HEAD = "  kernel_cutlass_kernel_megaflux_kernelsforward{name}_object_at_0x0_0 (132, 1, 1)x(384, 1, 1), Device 0, CC 9.0"
UNITS = {
    "latency_ms": "us",
    "dram_read_gb": "Mbyte",
    "dram_write_gb": "Gbyte",
    "l2_hit_pct": "%",
    "tensor_active_pct": "%",
}


def printed(name: str, value: str, counters: dict[str, tuple[str, str]] = COUNTERS) -> str:
    """A launch as Nsight Compute prints it, every counter with the same number."""
    lines = [f"    {counter}      {UNITS[metric]}      {value}" for counter, (metric, _) in counters.items()]
    return "\n".join([HEAD.format(name=name), "    Section: Command line profiler metrics", *lines, ""])


def test_values_are_means_of_the_launches_in_the_units_of_the_rows():
    text = printed("Forward", "1,000.00") + printed("Combine", "2.00") + printed("Forward", "3,000.00")
    found = {(row.case["kernel"], row.metric): row.value for row in rows("olmoe", text + printed("Combine", "4.00"))}
    assert found["forward", "latency_ms"] == pytest.approx(2.0)
    assert found["forward", "dram_read_gb"] == pytest.approx(2.0)
    assert found["forward", "dram_write_gb"] == pytest.approx(2000.0)
    assert found["combine", "l2_hit_pct"] == pytest.approx(3.0)
    assert len(found) == 2 * len(COUNTERS)


def test_a_missing_launch_or_counter_is_an_error_that_names_it():
    launches = printed("Forward", "1.00") * 2 + printed("Combine", "1.00")
    with pytest.raises(ValueError, match="1 of 2 values of combine gpu__time_duration"):
        list(rows("olmoe", launches))
    fewer = {name: COUNTERS[name] for name in list(COUNTERS)[:-1]}
    with pytest.raises(ValueError, match="0 of 2 values of forward sm__pipe_tensor"):
        list(rows("olmoe", printed("Forward", "1.00", fewer) * 2 + printed("Combine", "1.00") * 2))

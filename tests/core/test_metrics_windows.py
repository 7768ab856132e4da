"""Window metrics of a process that has planned nothing yet, in a process of its own: the registry is one a process."""

import subprocess
import sys

PROGRAM = """
import prometheus_client
from megaflux_serve.metrics import catalogue, events
events.prepare_windows()
shown = prometheus_client.REGISTRY.get_sample_value
assert shown("megaflux_window_seal_seconds_count") == shown("megaflux_window_trajectories_total") == 0
events.window_sealed(0.5)
assert shown("megaflux_window_seal_seconds_count") == 1
assert shown("megaflux_window_rows") is None
"""


def test_counters_of_windows_start_at_0_and_gauges_with_the_first_plan() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

"""Clock and power of a GPU while something runs on it, sampled through NVML. Knows no benchmark.

NVML's own power reading is a mean over a second, longer than most runs; sampled is the instantaneous one.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np

PERIOD_S = 0.01


@dataclass(frozen=True)
class GpuState:
    """Means over an interval.

    Attributes:
        sm_clock_mhz: clock of the multiprocessors.
        power_w: of the whole board.
        samples: how many were taken.
    """

    sm_clock_mhz: float
    power_w: float
    samples: int


class GpuMeter:
    """Samples one GPU between ``start`` and ``stop``, from a thread of its own.

    Args:
        uuid: of the device as torch names it, without the prefix ``GPU-``.

    Raises:
        ImportError: nvidia-ml-py is not installed.
        RuntimeError: NVML does not answer.
    """

    def __init__(self, uuid: str) -> None:
        import pynvml

        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._device = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self._read()
        except pynvml.NVMLError as error:
            raise RuntimeError(f"NVML: {error}") from None
        self._samples: list[tuple[float, float, float]] = []
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def _read(self) -> tuple[float, float]:
        """(MHz, W) now."""
        nvml = self._nvml
        (power,) = nvml.nvmlDeviceGetFieldValues(self._device, [nvml.NVML_FI_DEV_POWER_INSTANT])
        if power.nvmlReturn != nvml.NVML_SUCCESS:
            raise nvml.NVMLError(power.nvmlReturn)
        return float(nvml.nvmlDeviceGetClockInfo(self._device, nvml.NVML_CLOCK_SM)), power.value.uiVal / 1000

    def _run(self) -> None:
        while not self._stopped.wait(PERIOD_S):
            self._samples.append((time.monotonic(), *self._read()))

    def start(self) -> None:
        """Forget earlier samples and begin."""
        self._samples.clear()
        self._stopped.clear()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self, last_s: float) -> GpuState:
        """End, and give the means over the last ``last_s`` seconds.

        Raises:
            RuntimeError: no sample fell into them.
        """
        since = time.monotonic() - last_s
        self._stopped.set()
        assert self._thread is not None, "start comes first"
        self._thread.join()
        kept = [(clock, power) for at, clock, power in self._samples if at >= since]
        if not kept:
            raise RuntimeError(f"NVML gave no sample in {last_s:.3f} s")
        clock, power = np.mean(kept, axis=0)
        return GpuState(float(clock), float(power), len(kept))

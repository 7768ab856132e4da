"""Meter: adds up what the layers of one worker process do, and publishes it once a second.

Decides how totals leave the layers. Where the host plans, the meter is an observer that adds every report. Where the
device plans, the device adds (``megaflux_kernels.totals``), captured graphs included, and a thread copies the totals on
a stream of its own: the host never waits for a batch, and a batch never waits for the host.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.executors import DeviceExecutor, Executor
from megaflux_serve.layer import LayerReport, ReplicatedMoE
from megaflux_serve.metrics.device_copies import DeviceCopies, allow_during_capture
from megaflux_serve.metrics.snapshot import FOLDER_VARIABLE, LayerInfo, Snapshot, Worker
from megaflux_serve.planning.totals import LayerTotals
from megaflux_serve.workspace import ExpertSlots, replica_bytes

LOGGER = logging.getLogger("megaflux")


class Meter:
    """The totals of one worker.

    ::

        meter = Meter(worker, executor)
        meter.watch(moe, top_k=8)  # every layer, once
        meter.publish_every(1.0, folder)

    Args:
        worker: who reports.
        executor: runs the layers.
    """

    def __init__(self, worker: Worker, executor: Executor | DeviceExecutor) -> None:
        self.worker, self.executor = worker, executor
        self._layers: list[LayerInfo] = []
        self._slots: list[Sequence[ExpertSlots]] = []
        self._host: dict[int, LayerTotals] = {}  # by index of the layer
        self._device = DeviceCopies()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def publishing(cls, worker: Worker, executor: Executor | DeviceExecutor, options: MegaFluxConfig) -> Meter | None:
        """A meter that publishes once a second; None where the options say no or no server has named a folder."""
        folder = os.environ.get(FOLDER_VARIABLE)
        if not options.metrics or folder is None:
            return None
        meter = cls(worker, executor)
        meter.publish_every(1.0, Path(folder))
        return meter

    def watch(self, moe: ReplicatedMoE, top_k: int) -> None:
        """Count what a layer does from now on.

        Args:
            moe: the layer.
            top_k: k, experts of a token.
        """
        layout, home = moe.layout, moe.slots[0].home
        expert_bytes = (home.w13.nbytes + home.w2.nbytes) // home.num_experts
        homes = tuple(layout.home_rank.tolist())
        self._layers.append(LayerInfo(moe.name, homes, layout.num_replica_slots, top_k, expert_bytes))
        self._slots.append(moe.slots)
        if moe.on_device is None:
            totals = self._host[len(self._layers) - 1] = LayerTotals(layout.num_ranks, layout.num_experts)
            moe.observers.append(lambda report: add_report(totals, report))
        elif moe.on_device.totals is not None:
            self._device.add(len(self._layers) - 1, moe.on_device.totals[0])

    def snapshot(self) -> Snapshot:
        """What was added up until now; waits for copies from the device, not for batches."""
        totals = {index: totals.words.copy() for index, totals in self._host.items()} | self._device.read()
        counted = sorted(totals)
        return Snapshot(
            self.worker,
            tuple(self._layers[index] for index in counted),
            [totals[index] for index in counted],
            self._memory(),
            self.executor.timeouts(),
            time.time(),
        )

    def publish_every(self, seconds: float, folder: Path) -> threading.Thread:
        """Write a snapshot into the folder every so many seconds, until ``stop``, a failure or the folder's end.

        Returns:
            The thread that does so.
        """
        self._thread = threading.Thread(target=self._publish, args=(seconds, folder), name="megaflux-metrics")
        self._thread.daemon = True
        atexit.register(self.stop)  # no copy may be under way when CUDA goes
        self._thread.start()
        return self._thread

    def stop(self) -> None:
        """Publish no more."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _publish(self, seconds: float, folder: Path) -> None:
        if isinstance(self.executor, DeviceExecutor):
            allow_during_capture()
        while not self._stop.wait(seconds) and folder.is_dir():  # its end is that of the server that made it
            try:
                self.snapshot().write(folder)
            except Exception:  # serving goes on without metrics
                LOGGER.exception("metrics of rank %d end here", self.worker.rank)
                return

    def _memory(self) -> dict[str, int]:
        if isinstance(self.executor, DeviceExecutor):
            use = self.executor.memory_use()
            sizes = use.weight_bytes, use.replica_bytes, use.workspace_bytes
        else:
            every = [slots for layer in self._slots for slots in layer]
            home = sum(slots.home.w13.nbytes + slots.home.w2.nbytes for slots in every)
            sizes = home, sum(replica_bytes(every).values()), 0
        return dict(zip(("home_slots", "replica_slots", "workspace"), sizes, strict=True))


def add_report(totals: LayerTotals, report: LayerReport) -> None:
    """Add what a layer reported of one batch."""
    totals.add(report.plan)
    if report.planner_ns is not None:
        totals.add_times(report.planner_ns, report.layer_ns)


__all__ = ["Meter", "add_report"]

"""PlanLog: an observer that writes what every layer did for every batch, one JSON line each.

Decides the fields and the file. Knows nothing of how a plan was found; ranks other than 0 have nothing to add, since
all ranks carry out the same plan.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from megaflux_serve.layer import LayerReport
from megaflux_serve.routing import kappa


def plan_record(report: LayerReport) -> dict[str, Any]:
    """What a report says, in JSON's types.

    Keys: ``layer`` (name), ``step`` (batches served before), ``tokens`` (rows on all ranks), ``kappa`` (routing skew),
    ``fixed_loads`` and ``loads`` (blocks a rank without and with replicas), ``replicas`` (in use), ``blocks_moved``
    (computed away from home), ``transfers`` (replicas whose weights were copied), ``gated`` (replicas were found and
    dropped because they would not pay).
    """
    plan = report.plan
    return {
        "layer": report.layer,
        "step": report.step,
        "tokens": report.tokens,
        "kappa": kappa(plan.counts.sum(axis=0)),
        "fixed_loads": plan.fixed_loads.tolist(),
        "loads": plan.loads.tolist(),
        "replicas": plan.num_replicas,
        "blocks_moved": plan.blocks_moved,
        "transfers": len(plan.transfers),
        "gated": plan.gated,
    }


class PlanLog:
    """Appends a ``plan_record`` line to ``plan.jsonl`` for every report; attach it on expert-parallel rank 0 only.

    ::

        with PlanLog(Path("out")) as log:
            moe.observers.append(log)

    Args:
        directory: where ``plan.jsonl`` lies; made if it does not exist.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "plan.jsonl"
        self._file = self.path.open(
            "a", encoding="utf-8", buffering=1
        )  # whole lines reach the file as they are written

    def __call__(self, report: LayerReport) -> None:
        self._file.write(json.dumps(plan_record(report)) + "\n")

    def close(self) -> None:
        """Close the file; the process' end does so too."""
        self._file.close()

    def __enter__(self) -> PlanLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


__all__ = ["PlanLog", "plan_record"]

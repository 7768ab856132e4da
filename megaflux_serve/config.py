"""MegaFluxConfig: every option of the library, validated once.

Decides names, ranges and defaults, and what they mean for a layer of E experts on P ranks. Knows neither engines nor
devices; whether this machine can run the chosen executor is ``executors.select_executor``'s to say.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from numpy.typing import ArrayLike
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, ValidationError, field_validator
from pydantic_core import ErrorDetails

from megaflux_serve.errors import ConfigError
from megaflux_serve.planning.calibration import load_costs
from megaflux_serve.planning.gate import GateCosts
from megaflux_serve.planning.plan import MAX_BLOCKS
from megaflux_serve.planning.planner import PlannerOptions
from megaflux_serve.slots import SlotLayout

_BLOCKS = f"an integer of at least 0 (blocks) and at most {MAX_BLOCKS}"


class MegaFluxConfig(BaseModel):
    """Options of a replica-aware MoE layer; each field's description says what is allowed.

    Attributes:
        executor: who runs the layer. ``auto`` is ``reference`` when one process holds every rank and ``staged`` when
            ranks are processes. ``megakernel`` needs Hopper GPUs.
        replica_slots: s, replica slots a rank and layer.
        block_rows: beta, rows of a token block. The GPU kernels need 128; on a CPU a smaller block wastes less padding.
        reduction_penalty: lambda of MegaFlux appendix A.2, in blocks; 0 for inference.
        transfer_cost_blocks: a replica that must be copied has to win more blocks than this.
        sticky: replicas stay in slots of their layer from batch to batch. Otherwise all layers share one set of slots
            and every batch copies what it uses: s slots a rank in all instead of s a layer.
        transfer: when the megakernel copies replica weights: ``pipelined``, while home blocks are computed, or
            ``staged``, before the layer begins (for comparison).
        max_tokens: rows of the largest batch of a rank, for which the megakernel's buffers are made; None is the limit
            that the engine's scheduler has.
        min_tokens: batches in which no data-parallel rank has as many rows go to the engine's own kernels, where its
            plugin can hand them over; 0 hands none over. None has the plugin decide; elsewhere it is 0.
        timeout_s: the longest wait for another rank, in seconds; covers what a slow peer may do between two layers.
        gate: costs by which a plan that does not pay is dropped for the fixed placement; None carries out every plan. A
            name such as "2048x768" (hidden x intermediate) stands for what ``megaflux calibrate`` measured here. "auto"
            has an engine's plugin find costs for the megakernel (``calibration.costs_here``); elsewhere it is None.
        plan_log: directory for one JSON line a layer and batch (``plan_log.PlanLog``); None writes nothing.
        metrics: whether layers add up what they do, for ``/metrics``.
        capture: folder of a replay store for the routes of every finished request (``capture``); None captures nothing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    executor: Annotated[
        Literal["auto", "reference", "staged", "megakernel"],
        Field(description="auto, reference, staged or megakernel"),
    ] = "auto"
    replica_slots: Annotated[StrictInt, Field(ge=0, description="an integer of at least 0")] = 2
    block_rows: Annotated[StrictInt, Field(ge=1, le=128, description="an integer from 1 to 128")] = 128
    reduction_penalty: Annotated[StrictInt, Field(ge=0, le=MAX_BLOCKS, description=_BLOCKS)] = 0
    transfer_cost_blocks: Annotated[StrictInt, Field(ge=0, le=MAX_BLOCKS, description=_BLOCKS)] = 0
    sticky: Annotated[StrictBool, Field(description="true or false")] = True
    transfer: Annotated[Literal["pipelined", "staged"], Field(description="pipelined or staged")] = "pipelined"
    max_tokens: Annotated[StrictInt | None, Field(ge=1, description="null or an integer of at least 1")] = None
    min_tokens: Annotated[StrictInt | None, Field(ge=0, description="null or an integer of at least 0")] = None
    timeout_s: Annotated[StrictInt, Field(ge=1, le=3600, description="an integer from 1 to 3600 (seconds)")] = 300
    gate: Annotated[
        GateCosts | Literal["auto"] | None,
        Field(
            description="auto, null, integers block_ns, replica_ns and plan_ns (0 to 10^9), hidden_permille "
            "(0 to 1000), or a calibrated layer such as '2048x768'"
        ),
    ] = "auto"
    plan_log: Annotated[Path | None, Field(description="null or the path of a directory")] = None
    metrics: Annotated[StrictBool, Field(description="true or false")] = True
    capture: Annotated[Path | None, Field(description="null or the path of a directory")] = None

    @classmethod
    def parse(cls, options: Any) -> MegaFluxConfig:
        """Options from a mapping, as they come from JSON or a command line.

        Raises:
            ConfigError: naming the first field at fault, its value and what is allowed.
        """
        if not isinstance(options, dict):
            raise ConfigError("megaflux", options, f"an object with the keys {', '.join(cls.model_fields)}")
        try:
            return cls.model_validate(options)
        except ValidationError as error:
            raise cls._config_error(error.errors()[0]) from None

    @field_validator("gate", mode="before")
    @classmethod
    def _read_costs(cls, value: Any) -> Any:
        """Costs of a calibrated layer; refuse true and 5.0, which pydantic would take for integers in a dataclass."""
        if isinstance(value, str) and value != "auto":
            return load_costs(value)
        for name, cost in value.items() if isinstance(value, dict) else ():
            if type(cost) is not int:
                raise ConfigError(name, cost, "an integer")
        return value

    @classmethod
    def _config_error(cls, detail: ErrorDetails) -> ConfigError:
        name = str(detail["loc"][0])
        if name not in cls.model_fields:
            return ConfigError(name, detail["input"], f"one of the options {', '.join(cls.model_fields)}")
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):  # from a part of the field, which knows better what it allows
            return ConfigError(f"{name}.{cause.field}", cause.value, cause.allowed)
        path = detail["loc"][:-1] if detail["type"] == "missing" else detail["loc"]
        path = tuple(part for part in path if part != GateCosts.__name__)  # an alternative of the field, not a part
        return ConfigError(".".join(map(str, path)), detail["input"], str(cls.model_fields[name].description))

    @property
    def gate_costs(self) -> GateCosts | None:
        """The gate's costs; None where every plan is carried out."""
        return None if self.gate == "auto" else self.gate

    @property
    def handover_rows(self) -> int:
        """Batches with fewer rows on every data-parallel rank go to the engine's own kernels; 0 where none do."""
        return self.min_tokens or 0

    @property
    def planner_options(self) -> PlannerOptions:
        """What the planner may do."""
        return PlannerOptions(self.block_rows, self.reduction_penalty, self.transfer_cost_blocks)

    def slot_layout(self, num_experts: int, num_ranks: int, home_rank: ArrayLike | None = None) -> SlotLayout:
        """Ranks, experts and slots of one layer; a single rank has nothing to replicate and gets no replica slots.

        Args:
            num_experts: logical experts E.
            num_ranks: expert-parallel ranks P; must divide E.
            home_rank: integers [E], the rank that owns each expert; default: rank ``e // (E/P)``.

        Raises:
            ConfigError: P does not divide E, a home map that is not E/P experts a rank, or more replica slots than a
                rank has experts to hold, E - E/P.
        """
        layout = SlotLayout(num_experts, num_ranks, self.replica_slots if num_ranks > 1 else 0, home_rank)  # type: ignore[arg-type]
        away = num_experts - layout.experts_per_rank
        if layout.num_replica_slots > away:
            raise ConfigError(
                "replica_slots",
                self.replica_slots,
                f"0 to {away}: the experts that live on other ranks (E = {num_experts}, P = {num_ranks})",
            )
        return layout


__all__ = ["MegaFluxConfig"]

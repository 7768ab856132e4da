"""Rollout capture: the routes of every request that vLLM finishes, in a replay store.

Decides what of vLLM's becomes a record and where it is taken: in the front end, when the last output of a request is
made, from the routes that vLLM itself returns for it (``--enable-return-routed-experts``, which capture turns on). vLLM
keeps those routes by the slots of the KV cache, so they survive prefix hits, chunked prefill and preemption, and every
data-parallel rank reports to the front end. When a response is given, its routes are in the store.

A request that ends by an abort or an error is not recorded, nor one whose prompt streams in. Labels come with the
request, as ``SamplingParams(extra_args={...})`` or ``vllm_xargs`` over HTTP: ``megaflux_group``, ``megaflux_task`` and
``megaflux_weights_version``. A record that is refused, or a disk that is full, costs that record and is logged as an
error with its id; serving goes on, and sealing a window by ids names what is missing.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megaflux_serve.errors import ConfigError, InputError, UnsupportedError
from megaflux_vllm.backend_name import BACKEND

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    from megaflux_serve.capture import ModelShape, StoreWriter

LOGGER = logging.getLogger("vllm.megaflux")
LABELS = ("group", "task", "weights_version")
NOT_RECORDED = ("abort", "error")


class Recorder:
    """Turns finished requests of one engine into records of one store.

    Args:
        folder: of the store; made when the first request finishes, since its routes show which layers are MoE.
        num_experts, num_layers: of the model; dense layers count.
        engine_version: the installed vLLM release.
    """

    def __init__(self, folder: Path, num_experts: int, num_layers: int, engine_version: str) -> None:
        self.folder, self.num_experts, self.num_layers = folder, num_experts, num_layers
        self.engine_version = engine_version
        self._writer: StoreWriter | None = None

    def record(self, state: Any, routes: NDArray[Any] | None, skipped: int, labels: dict[str, str]) -> None:
        """Append the record of a finished request.

        Args:
            state: vLLM's state of the request.
            routes: unsigned [n - 1 - skipped, layers, k].
            skipped: prompt rows that the request asked to leave out; they become rows without routes.
            labels: of the request.
        """
        from megaflux_serve.capture import ReplayRecord, ReplayStore

        prompt, output = state.prompt_len, len(state.detokenizer.output_token_ids)
        try:
            if routes is None:
                raise InputError(f"request {state.request_id}", "finished without routes", "routes from vLLM")
            filler = np.full((skipped, *routes.shape[1:]), -1, dtype=np.int32)
            if self._writer is None:
                self._writer = ReplayStore.create(self.folder, self._shape(routes)).writer()
            record = ReplayRecord.of(
                state.request_id,
                np.concatenate([filler, routes]) if skipped else routes,
                self._writer.store.model,
                prompt_tokens=prompt,
                output_tokens=output,
                token_ids=_token_ids(state),
                engine="vllm",
                engine_version=self.engine_version,
                **{"group": state.external_req_id} | labels,
            )
            self._writer.append(record)
        except (InputError, ConfigError, OSError) as error:
            LOGGER.error("routes of request %s are not recorded: %s", state.request_id, error)

    def _shape(self, routes: NDArray[Any]) -> ModelShape:
        """The model's shape from the first routes: vLLM leaves the entries of dense layers 0 in every row."""
        from megaflux_serve.capture import ModelShape

        moe_layers = tuple(np.flatnonzero(routes.any(axis=(0, 2))).tolist())
        if not moe_layers:
            raise InputError("routed_experts", "are 0 in every layer", "routes; vLLM captured none on this backend")
        if routes.shape[2] == 1:
            raise InputError(
                "routed_experts", "have one expert a token", "2 or more: else a dense layer looks like one"
            )
        return ModelShape(self.num_experts, routes.shape[2], self.num_layers, moe_layers)


def install() -> None:
    """Hook vLLM's front end; without the option ``capture`` nothing is recorded."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

    if is_installed():
        return
    EngineArgs.create_engine_config = _with_routes_returned(EngineArgs.create_engine_config)
    for engine in (LLMEngine, AsyncLLM):
        engine.__init__ = _with_recorder(engine.__init__)
    OutputProcessor.add_request = _with_labels(OutputProcessor.add_request)
    RequestState._new_completion_output = _recording(RequestState._new_completion_output)


def is_installed() -> bool:
    """Whether finished requests reach a recorder."""
    from vllm.v1.engine.output_processor import RequestState

    return hasattr(RequestState._new_completion_output, "recorded_by_megaflux")


def capture_folder(additional_config: Any) -> Path | None:
    """The option ``capture`` in ``--additional-config``, which goes with any backend.

    Raises:
        ConfigError: with ``capture`` given, naming an option as the user wrote it.
    """
    from megaflux_vllm.checks import megaflux_config

    options = additional_config.get(BACKEND) if isinstance(additional_config, dict) else None
    if not isinstance(options, dict) or "capture" not in options:
        return None  # the options of other backends are not checked
    return megaflux_config(additional_config).capture


def check_capture(args: EngineArgs) -> None:
    """Refuse flags under which vLLM's routes cannot be trusted or are not given.

    Raises:
        UnsupportedError: naming the flag.
    """
    refused = {
        "--speculative-config": args.speculative_config is not None,
        "--pipeline-parallel-size": args.pipeline_parallel_size > 1,
        "--kv-transfer-config": args.kv_transfer_config is not None,
    }
    for flag, is_set in refused.items():
        if is_set:
            raise UnsupportedError(
                flag, "with the option capture, routes of every token are not known", "drop the flag or the option"
            )


def _with_routes_returned(create: Any) -> Any:
    @functools.wraps(create)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        if capture_folder(self.additional_config) is not None:
            check_capture(self)
            self.enable_return_routed_experts = True
            if hasattr(self, "aux_output_config"):  # where 0.32 keeps it once the arguments have been made
                self.aux_output_config.enable_return_routed_experts = True
        return create(self, *args, **kwargs)

    return create_engine_config


def _with_recorder(init: Any) -> Any:
    @functools.wraps(init)
    def __init__(self: Any, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        init(self, vllm_config, *args, **kwargs)
        folder = capture_folder(vllm_config.additional_config)
        if folder is not None:
            from megaflux_vllm.versions import engine_version

            model = vllm_config.model_config
            num_layers = model.hf_text_config.num_hidden_layers
            self.output_processor.megaflux_recorder = Recorder(
                folder, model.get_num_experts(), num_layers, engine_version()
            )

    return __init__


def _with_labels(add: Any) -> Any:
    @functools.wraps(add)
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        add(self, request, *args, **kwargs)
        recorder = getattr(self, "megaflux_recorder", None)
        if recorder is not None and request.sampling_params is not None:
            given = request.sampling_params.extra_args or {}
            labels = {name: str(given[f"{BACKEND}_{name}"]) for name in LABELS if f"{BACKEND}_{name}" in given}
            skipped = getattr(request.sampling_params, "routed_experts_prompt_start", None) or 0
            state = self.request_states.get(request.request_id)
            if state is not None:
                state.megaflux_capture = recorder, skipped, labels

    return add_request


def _recording(create: Any) -> Any:
    @functools.wraps(create)
    def _new_completion_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = create(self, *args, **kwargs)
        capture = getattr(self, "megaflux_capture", None)
        if capture is not None and output.finish_reason not in (None, *NOT_RECORDED) and not self.streaming_input:
            recorder, skipped, labels = capture
            recorder.record(self, output.routed_experts, skipped, labels)
        return output

    _new_completion_output.recorded_by_megaflux = True  # type: ignore[attr-defined]
    return _new_completion_output


def _token_ids(state: Any) -> list[int] | None:
    """Prompt and output; None where the prompt came as embeddings."""
    if state.prompt_token_ids is None:
        return None
    return [*state.prompt_token_ids, *state.detokenizer.output_token_ids]


__all__ = ["Recorder", "capture_folder", "check_capture", "install", "is_installed"]

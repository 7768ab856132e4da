"""Rollout capture: the routes of every request that vLLM finishes, in a replay store.

Decides what of vLLM's becomes a record and where it is taken: in the front end, when the last output of a request is
made, from the routes that vLLM itself returns for it (``--enable-return-routed-experts``, which capture turns on). vLLM
keeps those routes by the slots of the KV cache, so they survive prefix hits, chunked prefill and preemption, and every
data-parallel rank reports to the front end; rows that only the store wants travel there with the last output of their
request (``engine_routes``). A thread of its own checks, compresses and appends, and the response is
handed on behind it: when a response is given, its routes are in the store. It carries routes only if the flag is set.

A request that ends by an abort or an error is not recorded, nor one whose prompt streams in. Labels come with the
request, as ``SamplingParams(extra_args={...})`` or ``vllm_xargs`` over HTTP: ``megaflux_group``, ``megaflux_task`` and
``megaflux_weights_version``. What cannot be recorded is logged as an error with its id; serving goes on.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from megaflux_serve.errors import UnsupportedError
from megaflux_vllm.backend_name import BACKEND

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    from megaflux_serve.capture.recorder import FinishedRequest, Recorder

LOGGER = logging.getLogger("vllm.megaflux")
NOT_RECORDED = ("abort", "error")
ROUTES_NOT_KNOWN = "with the option capture, routes of every token are not known"
ROUTES_NOT_ASKED_FOR = "megaflux_routes_not_asked_for"
"""Attribute of a ``VllmConfig`` whose routes go to the store only, since the user did not ask for them in responses."""


class Capture:
    """What one front end does with finished requests; a thread works them off in order.

    Args:
        recorder: where records go.
        returns_routes: keep routes in the response.
    """

    def __init__(self, recorder: Recorder, returns_routes: bool) -> None:
        from megaflux_serve.capture.background import CallThread

        self.recorder, self.returns_routes = recorder, returns_routes
        self.thread = CallThread("megaflux capture", LOGGER)

    def finish(self, output: Any, request: FinishedRequest) -> None:
        """Record a request; ``output`` is its last, still in the making."""
        self.thread.submit(self.recorder.record, request)
        if not self.returns_routes:
            output.routed_experts = None


class OutputsBehindRecords:
    """Stands for a request's output queue: what ends the request is handed on when its record is in the store.

    Args:
        queue: vLLM's ``RequestOutputCollector``.
        capture: of the front end.
    """

    def __init__(self, queue: Any, capture: Capture) -> None:
        self.queue, self.capture = queue, capture

    def put(self, output: Any) -> None:
        """Called in the event loop, as everything that the queue does."""
        if getattr(output, "finished", False):
            loop = asyncio.get_running_loop()
            self.capture.thread.submit(loop.call_soon_threadsafe, self.queue.put, output)
        else:
            self.queue.put(output)


def install(module: ModuleType) -> None:
    """Hook a module of vLLM's front end; without the option ``capture`` nothing is recorded."""
    for owner, name, wrapper in _wrapped(module):
        method = wrapper(getattr(owner, name))
        method.captured_by_megaflux = True
        setattr(owner, name, method)


def is_installed(module: ModuleType) -> bool:
    """Whether the module does its part in bringing finished requests to a recorder."""
    return all(hasattr(getattr(owner, name), "captured_by_megaflux") for owner, name, _ in _wrapped(module))


def _wrapped(module: ModuleType) -> list[tuple[Any, str, Any]]:
    """Class, method and what the method is wrapped in, for all that is hooked in a module."""
    by_module: dict[str, dict[str, Callable[[Any], Any]]] = {
        "vllm.engine.arg_utils": {"EngineArgs.create_engine_config": _with_routes_returned},
        "vllm.v1.engine.llm_engine": {"LLMEngine.__init__": _with_capture, "LLMEngine.step": _behind_records},
        "vllm.v1.engine.async_llm": {"AsyncLLM.__init__": _with_capture},
        "vllm.v1.engine.output_processor": {
            "OutputProcessor.add_request": _with_labels,
            "RequestState._new_completion_output": _recording,
        },
    }
    wrapped = []
    for path, wrapper in by_module[module.__name__].items():
        owner, name = path.split(".")
        wrapped.append((getattr(module, owner), name, wrapper))
    return wrapped


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
        UnsupportedError: naming the flag or variable.
    """
    from vllm import envs

    refused = {
        "--speculative-config": args.speculative_config is not None,
        "--spec-method": args.spec_method is not None,
        "--spec-model": args.spec_model is not None,
        "--spec-tokens": args.spec_tokens is not None,
        "--pipeline-parallel-size": args.pipeline_parallel_size > 1,
        "--kv-transfer-config": args.kv_transfer_config is not None,
        "--kv-offloading-size": args.kv_offloading_size is not None,
        "--enable-dbo": args.enable_dbo,  # up to 0.32, half batches write over each other's routes
        "--ubatch-size": args.ubatch_size > 1,
        "VLLM_USE_RUST_FRONTEND": envs.VLLM_USE_RUST_FRONTEND,  # requests end where no hook is
    }
    for flag, is_set in refused.items():
        if is_set:
            raise UnsupportedError(flag, ROUTES_NOT_KNOWN, "drop it or the option")


def _with_routes_returned(create: Any) -> Any:
    @functools.wraps(create)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        if capture_folder(self.additional_config) is None:
            return create(self, *args, **kwargs)
        check_capture(self)
        # 0.32 keeps it elsewhere once the arguments have been made.
        places = [self, *([self.aux_output_config] if hasattr(self, "aux_output_config") else [])]
        asked_for = [place.enable_return_routed_experts for place in places]
        try:
            for place in places:
                place.enable_return_routed_experts = True
            config = create(self, *args, **kwargs)
            if config.speculative_config is not None:  # a checkpoint may turn it on without a flag
                raise UnsupportedError("a checkpoint with a draft model", ROUTES_NOT_KNOWN, "serve its target")
        finally:  # the same arguments may make another configuration, and the user has asked for no more than before
            for place, value in zip(places, asked_for, strict=True):
                place.enable_return_routed_experts = value
        setattr(config, ROUTES_NOT_ASKED_FOR, not any(asked_for))
        return config

    return create_engine_config


def _with_capture(init: Any) -> Any:
    @functools.wraps(init)
    def __init__(self: Any, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        init(self, vllm_config, *args, **kwargs)
        folder = capture_folder(vllm_config.additional_config)
        if folder is not None:
            returns_routes = not getattr(vllm_config, ROUTES_NOT_ASKED_FOR, False)
            self.output_processor.megaflux_capture = Capture(_recorder(vllm_config, folder), returns_routes)

    return __init__


def _recorder(vllm_config: VllmConfig, folder: Path) -> Recorder:
    """The recorder of this front end, which counts what it does where metrics are not turned off."""
    from megaflux_serve.capture.recorder import Recorder
    from megaflux_serve.metrics.events import CaptureEvents
    from megaflux_vllm.checks import megaflux_config
    from megaflux_vllm.versions import engine_version

    model = vllm_config.model_config
    num_layers = model.hf_text_config.num_hidden_layers
    recorder = Recorder(folder, model.get_num_experts(), num_layers, "vllm", engine_version(), LOGGER)
    if megaflux_config(vllm_config.additional_config).metrics:
        recorder.observer = CaptureEvents("vllm", model.served_model_name)
    return recorder


def _behind_records(step: Any) -> Any:
    """Offline, where the caller of a step has its outputs: wait for the records of those that ended."""

    @functools.wraps(step)
    def step_behind_records(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = step(self, *args, **kwargs)
        capture = getattr(self.output_processor, "megaflux_capture", None)
        if capture is not None and any(output.finished for output in outputs):
            capture.thread.wait()
        return outputs

    return step_behind_records


def _with_labels(add: Any) -> Any:
    @functools.wraps(add)
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        add(self, request, *args, **kwargs)
        capture = getattr(self, "megaflux_capture", None)
        state = self.request_states.get(request.request_id)
        if capture is None or request.sampling_params is None or state is None:
            return
        from megaflux_serve.capture.recorder import labels_of

        skipped = getattr(request.sampling_params, "routed_experts_prompt_start", None) or 0
        state.megaflux_capture = capture, skipped, labels_of(request.sampling_params.extra_args)
        if state.queue is not None and not isinstance(state.queue, OutputsBehindRecords):  # parts of a prompt share one
            state.queue = OutputsBehindRecords(state.queue, capture)

    return add_request


def _recording(create: Any) -> Any:
    @functools.wraps(create)
    def _new_completion_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = create(self, *args, **kwargs)
        found = getattr(self, "megaflux_capture", None)
        if found is not None and output.finish_reason not in (None, *NOT_RECORDED) and not self.streaming_input:
            capture, skipped, labels = found
            capture.finish(output, finished_request(self, output.routed_experts, skipped, labels))
        return output

    return _new_completion_output


def finished_request(state: Any, routes: Any, skipped: int, labels: dict[str, str]) -> FinishedRequest:
    """A request as the recorder takes it.

    Args:
        state: vLLM's state of the request.
        routes: unsigned [n - 1 - skipped, layers, k], or None.
        skipped: prompt rows that the request asked to leave out.
        labels: of the request; the group is vLLM's id of the request where none is given.
    """
    from megaflux_serve.capture.recorder import FinishedRequest

    output_ids = state.detokenizer.output_token_ids
    return FinishedRequest(
        state.request_id,
        state.prompt_len,
        len(output_ids),
        routes,
        skipped,
        _token_ids(state),
        {"group": state.external_req_id} | labels,
    )


def _token_ids(state: Any) -> list[int] | None:
    """Prompt and output; None where the prompt came as embeddings."""
    if state.prompt_token_ids is None:
        return None
    return [*state.prompt_token_ids, *state.detokenizer.output_token_ids]


__all__ = [
    "Capture",
    "OutputsBehindRecords",
    "capture_folder",
    "check_capture",
    "finished_request",
    "install",
    "is_installed",
]

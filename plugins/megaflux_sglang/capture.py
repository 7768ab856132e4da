"""Rollout capture: the routes of every request that SGLang finishes, in a replay store.

Decides what of SGLang's becomes a record and where it is taken: in the scheduler, when a request has ended and before
its slots in the KV cache are given back, from the routes that SGLang itself keeps by those slots
(``--enable-return-routed-experts``, which capture turns on). So they survive prefix hits, chunked prefill and
retraction, nothing of them travels through SGLang's other processes, and a response, which is sent afterwards, is given
when its routes are in the store. It carries routes only where the request asks for them.

Every data-parallel rank's scheduler has a writer of its own; of tensor-parallel ranks, which all know the same, the
first writes. Not recorded: aborted requests, health checks, beam searches, whose beams share rows, and requests for no
output, which SGLang sends itself before it draws several samples of a prompt. Labels come with a request as
``sampling_params["custom_params"]``: ``megaflux_group``, ``megaflux_task`` and ``megaflux_weights_version``, without
which the server's version is taken.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from megaflux_serve.errors import UnsupportedError
from megaflux_sglang import versions
from megaflux_sglang.backend import NAME
from megaflux_sglang.options import given_options, megaflux_config

if TYPE_CHECKING:
    from pathlib import Path

    from megaflux_serve.capture.recorder import FinishedRequest, Recorder

LOGGER = logging.getLogger("sglang.megaflux")
FIRST_RELEASE = (0, 5, 14)
COPIES_BY_ITSELF = (0, 5, 18)
TELLS_VERSIONS = (0, 5, 19)
SAMPLE = re.compile(r"(.+)_[0-9a-f]{32}")
"""How SGLang 0.5.17, and ``name_sample`` elsewhere, name one of several samples of a prompt: the request's id and 32
hexadecimal digits."""

OFF = (False, None)
# ServerArgs field: (values under which routes are known, why they are not under others).
KNOWN_ROUTES: dict[str, tuple[tuple[Any, ...], str]] = {
    "speculative_algorithm": (OFF, "rows of rejected tokens would be mixed with those of accepted ones"),
    "dllm_algorithm": (OFF, "a token is computed more than once"),
    "pp_size": ((1,), "a rank sees the layers of its stage only"),
    "attn_cp_size": ((1,), "a rank sees a part of each prompt only"),
    "dcp_size": ((1,), "a rank sees a part of each prompt only"),
    "enable_two_batch_overlap": (OFF, "SGLang writes the rows of both half batches to one place"),
    "disaggregation_mode": (("null",), "the routes of a prompt stay on another server"),
    "enable_hierarchical_cache": (OFF, "a prefix that comes back from the host's memory has no routes"),
    "enable_lmcache": (OFF, "a prefix that comes back from another store has no routes"),
    "enable_flexkv": (OFF, "a prefix that comes back from another store has no routes"),
    "enable_unified_cache_external_linker": (OFF, "a prefix that comes back from another store has no routes"),
    "radix_cache_backend": (OFF, "a prefix that comes back from another store has no routes"),
    "prefill_only_disable_kv_cache": (OFF, "routes are kept by a token's place in the KV cache"),
    "enable_decoder_swa_bounded_replay": (OFF, "some layers see the end of a prompt only"),
    "enable_hisparse": (OFF, "the slots of a request are given back while it runs"),
    "moe_a2a_backend": (("none", "deepep", NAME), "SGLang takes the rows of other ranks for a request's own"),
}


class SchedulerState:
    """What this scheduler process knows.

    Attributes:
        recorder: where its requests go; None without the option and on ranks that do not write.
        weights_version: of the weights that are loaded.
    """

    recorder: Recorder | None = None
    weights_version: str = ""


STATE = SchedulerState()


def hooks() -> tuple[versions.Hook, ...]:
    """The hooks for this release; before 0.5.14 only the one that refuses the option."""
    resolve = f"sglang.srt.server_args.ServerArgs.{versions.resolving_method()}"
    turn_on: versions.Hook = (resolve, turn_routes_on, "before")
    if not is_served_release():
        return (turn_on,)
    components = "sglang.srt.managers.scheduler_components"
    mended = versions.release(versions.engine_version()) >= COPIES_BY_ITSELF
    mend: versions.Hook = ("sglang.srt.state_capturer.base.BaseTopkCapturer.on_forward_end", own_copies, "after")
    return (
        turn_on,
        ("sglang.srt.managers.io_struct.GenerateReqInput.regenerate_rid", name_sample, "around"),
        ("sglang.srt.model_executor.model_runner.ModelRunner.init_routed_experts_capturer", begin, "after"),
        *(() if mended else (mend,)),
        (
            f"{components}.batch_result_processor.SchedulerBatchResultProcessor._maybe_collect_routed_experts",
            record_finished,
            "around",
        ),
        *version_hooks(components),
    )


def version_hooks(components: str) -> tuple[versions.Hook, ...]:
    """The hooks that hear of new versions of the weights; from 0.5.19 SGLang's scheduler has one place for them.

    Args:
        components: dotted path of the scheduler's parts.
    """
    if versions.release(versions.engine_version()) >= TELLS_VERSIONS:
        return (("sglang.srt.managers.scheduler.Scheduler.record_weight_version_change", note_change, "after"),)
    updater = f"{components}.weight_updater.SchedulerWeightUpdaterManager"
    sources = ("disk", "tensor", "distributed", "ipc")
    return tuple((f"{updater}.update_weights_from_{source}", note_version, "around") for source in sources)


def is_served_release() -> bool:
    """Whether this release reads a request's routes where we expect it."""
    return versions.release(versions.engine_version()) >= FIRST_RELEASE


def capture_folder(server_args: Any) -> Path | None:
    """The option ``capture``, which goes with any backend.

    Raises:
        ConfigError: with ``capture`` given, naming an option as the user wrote it.
    """
    options = given_options(server_args)
    if not isinstance(options, dict) or "capture" not in options:
        return None  # the options of other backends are not checked
    return megaflux_config(server_args).capture


def turn_routes_on(record: Any, *args: Any, **kwargs: Any) -> None:
    """Before SGLang resolves a ``ServerArgs``, in the launcher; one that is resolved stays as it is.

    Raises:
        ConfigError: an option that is not allowed.
        UnsupportedError: a release or flag under which routes cannot be trusted or are not given.
    """
    if getattr(record, "_resolution_finished", False) or capture_folder(record) is None:
        return
    if not is_served_release():
        raise UnsupportedError(
            f"the option capture on SGLang {versions.engine_version()}",
            "it gives routes of every request, asked for or not, in another way",
            f"use {'.'.join(map(str, FIRST_RELEASE))} or later",
        )
    check_capture(record)
    record.enable_return_routed_experts = True


def check_capture(server_args: Any) -> None:
    """Refuse flags under which SGLang does not know the routes of every token.

    Raises:
        UnsupportedError: naming the flag.
    """
    for field, (known, reason) in KNOWN_ROUTES.items():
        value = getattr(server_args, field, known[0])
        if value not in known:
            flag = f"--{field.replace('_', '-')}"
            raise UnsupportedError(
                flag if value is True else f"{flag} {value}",
                f"with the option capture, {reason}",
                "drop the flag or the option",
            )
    spreads_attention = (
        getattr(server_args, "enable_dp_attention", False) or getattr(server_args, "attn_dp_size", 1) > 1
    )
    if spreads_attention and server_args.moe_a2a_backend == "none":
        # Of a prompt that runs as a captured graph it takes the rows where the last decode graph had them.
        raise UnsupportedError(
            "data-parallel attention (--enable-dp-attention, --attn-dp-size) --moe-a2a-backend none",
            "with the option capture, SGLang takes the rows of other ranks for a request's own",
            f"use --moe-a2a-backend {NAME}, or drop the flag or the option",
        )


def name_sample(original: Callable[..., str], request: Any, *args: Any, **kwargs: Any) -> str:
    """Around the place where SGLang's front end gives a sample of a prompt an id of its own.

    But for 0.5.17 that id says nothing of the request, so that the scheduler could not tell which samples are a group.
    """
    outer, made = request.rid, original(request, *args, **kwargs)
    if isinstance(outer, str) and not made.startswith(f"{outer}_") and capture_folder(versions.server_args()):
        request.rid = made = f"{outer}_{made}"
    return made


def begin(result: None, runner: Any, *args: Any, **kwargs: Any) -> None:
    """After a model's ``init_routed_experts_capturer``, in every scheduler: make the recorder of this process.

    Raises:
        UnsupportedError: SGLang does not capture although the option is given, or one of our hooks is not in place.
    """
    server_args = versions.resolved(runner.server_args)
    folder = capture_folder(server_args)
    if folder is None:
        return
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    from megaflux_serve.capture.recorder import Recorder
    from megaflux_sglang.choice import num_routed_experts

    versions.check_hooks_took()
    check_capture(server_args)  # what SGLang itself made of the flags
    if get_global_experts_capturer() is None:
        raise UnsupportedError(
            "the option capture",
            "SGLang keeps no routes; ServerArgs were made before the plugin was loaded",
            "call sglang.srt.plugins.load_plugins() first, or set enable_return_routed_experts",
        )
    STATE.weights_version = str(getattr(server_args, "weight_version", "") or "")
    if get_parallel().attn_tp_rank == 0:
        model = runner.model_config.hf_text_config
        STATE.recorder = Recorder(
            folder, num_routed_experts(model), model.num_hidden_layers, "sglang", versions.engine_version(), LOGGER
        )
        if server_args.enable_metrics and megaflux_config(server_args).metrics:
            from megaflux_serve.metrics.events import CaptureEvents

            STATE.recorder.observer = CaptureEvents("sglang", server_args.served_model_name)


def own_copies(result: Any, *args: Any, **kwargs: Any) -> None:
    """After a forward: keep its routes apart from the buffer that the next one writes.

    With overlapped scheduling SGLang copies them to the host while the next batch already runs. Before 0.5.18 it copies
    from the buffer that this batch writes again, so that requests could get routes of others.
    """
    if result is not None:
        result.out_cache_loc, result.topk = result.out_cache_loc.clone(), result.topk.clone()


def record_finished(original: Callable[..., None], processor: Any, request: Any) -> None:
    """Around the place where SGLang reads the routes of a request that has ended, if it asked for them."""
    recorder = STATE.recorder
    if recorder is None or not is_rollout(request):
        original(processor, request)
        return
    asked_for, start = request.return_routed_experts, request.routed_experts_start_len
    request.return_routed_experts, request.routed_experts_start_len = True, 0
    try:
        original(processor, request)
    finally:
        request.return_routed_experts, request.routed_experts_start_len = asked_for, start
    routes = request.routed_experts
    request.routed_experts = routes[start:] if asked_for and routes is not None else None
    recorder.record(finished_request(request, routes))


def is_rollout(request: Any) -> bool:
    """Whether a finished request is one that gets a record."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT
    from sglang.srt.managers.utils import is_health_check_generate_req

    return not (
        isinstance(request.finished_reason, FINISH_ABORT)
        or getattr(request, "beam_group", None) is not None  # from 0.5.19
        or request.sampling_params.max_new_tokens == 0
        or is_health_check_generate_req(request)
    )


def finished_request(request: Any, routes: torch.Tensor | None) -> FinishedRequest:
    """A request as the recorder takes it.

    Args:
        request: SGLang's.
        routes: int32 [n - 1, layers, k] on the CPU, or None.
    """
    from megaflux_serve.capture.recorder import FinishedRequest, labels_of

    prompt, output = list(request.origin_input_ids), list(request.output_ids_through_stop)
    has_tokens = request.input_embeds is None and request.multimodal_inputs is None
    sample = SAMPLE.fullmatch(request.rid)
    defaults = {"group": sample[1] if sample else request.rid, "weights_version": STATE.weights_version}
    return FinishedRequest(
        request.rid,
        len(prompt),
        len(output),
        None if routes is None else routes.numpy(),
        token_ids=prompt + output if has_tokens else None,
        labels=defaults | labels_of(request.sampling_params.custom_params),
    )


def note_version(original: Callable[..., Any], updater: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Around an update of a scheduler's weights: later requests finish with the version that it names."""
    result = original(updater, request, *args, **kwargs)
    if result.success and request.weight_version is not None:
        STATE.weights_version = request.weight_version
    return result


def note_change(result: None, scheduler: Any, new_version: str | None = None) -> None:
    """After SGLang's scheduler heard of a version of its weights: later requests finish with it."""
    if new_version is not None:
        STATE.weights_version = new_version


__all__ = ["capture_folder", "check_capture", "hooks"]

"""One vLLM engine in a process of its own, with vLLM's asynchronous interface and no HTTP in between.

Decides how requests are submitted and timed. A batch is submitted while the engine is paused and timed from the moment
it resumes, so that all ranks have all their requests when the first step is scheduled.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.serving.backends import BUDGET, EngineSpec

SUBMIT_TIMEOUT_S, DELIVERY_S = 30.0, 0.05


@dataclass(frozen=True)
class Completion:
    """A greedy continuation.

    Attributes:
        token_ids: generated.
        logprobs: of the generated tokens, where asked for.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()


class Engine:
    """The methods that ``fleet.Member`` can call, each with plain values.

    Args:
        spec: the engine.
    """

    def __init__(self, spec: EngineSpec) -> None:
        from vllm import AsyncEngineArgs
        from vllm.utils.gc_utils import freeze_gc_heap
        from vllm.v1.engine.async_llm import AsyncLLM

        self.spec, self.num_requests, self.steps = spec, 0, 0
        arguments = AsyncEngineArgs(**spec.arguments)
        self.llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[self._step_counter()])
        freeze_gc_heap()  # as vllm serve does: else some rounds pay for a look at every object that imports left

    async def batch_seconds(self, prompts: Sequence[list[int]], max_tokens: int, chunk: int) -> float:
        """Seconds from the first step until every request has ``max_tokens`` tokens.

        Args:
            prompts: token ids; request i goes to data-parallel rank i modulo the ranks.
            max_tokens: of every request.
            chunk: tokens that a rank may schedule in a step.
        """
        seconds, _ = await self._batch(prompts, [max_tokens] * len(prompts), chunk, logprobs=None)
        return seconds

    async def complete(
        self, prompts: Sequence[list[int]], max_tokens: int, chunk: int, logprobs: bool = False
    ) -> list[Completion]:
        """Greedy continuations, submitted as a batch."""
        lengths = [max_tokens] * len(prompts)
        _, completions = await self._batch(prompts, lengths, chunk, 0 if logprobs else None)
        return completions

    async def rollout_seconds(self, prompts: Sequence[list[int]], lengths: Sequence[int], chunk: int) -> float:
        """Seconds from the first step until every response is handed on, outputs of different lengths.

        Args:
            prompts: token ids; dealt to ranks as in ``batch_seconds``.
            lengths: output tokens of each.
            chunk: tokens that a rank may schedule in a step.
        """
        seconds, _ = await self._batch(prompts, lengths, chunk, logprobs=None)
        return seconds

    async def call_workers(self, method: str, *arguments: Any) -> Any:
        """The answer of the first worker to a method of ``worker.BenchmarkWorker``, while no rank steps.

        Data-parallel ranks go on with dummy steps for a while after their last request. A method that gathers from all
        ranks would wait in one rank for another that is in a step, which waits for the first.
        """
        await self.llm.pause_generation(mode="keep", clear_cache=False)
        answers = await self.llm.collective_rpc(method, args=arguments)
        await self.llm.resume_generation()
        return answers[0]

    async def count_steps(self) -> int:
        """Scheduler steps of all ranks so far."""
        return self.steps

    async def soak(
        self, seconds: float, num_clients: int, lengths: tuple[int, int], max_tokens: int, chunk: int, seed: int
    ) -> dict[str, int]:
        """Serve clients that each ask one request after the other; a tenth of the requests is aborted half-way.

        Args:
            seconds: how long new requests are asked.
            num_clients: requests at a time.
            lengths: least and most prompt tokens, drawn evenly on a logarithmic scale.
            max_tokens: most output tokens.
            chunk: as in ``batch_seconds``.
            seed: of lengths and aborts.

        Returns:
            Requests ``finished`` and ``aborted``, tokens in ``prompts`` and ``outputs`` of finished ones.
        """
        totals = dict.fromkeys(("finished", "aborted", "prompts", "outputs"), 0)
        end = time.perf_counter() + seconds
        vocabulary = self.llm.model_config.hf_text_config.vocab_size

        async def client(number: int) -> None:
            draw = random.Random(1_000_003 * seed + number)
            while time.perf_counter() < end:
                length = round(lengths[0] * (lengths[1] / lengths[0]) ** draw.random())
                prompt = [draw.randrange(vocabulary) for _ in range(length)]
                outputs = draw.randint(1, max_tokens)
                request = asyncio.ensure_future(self._complete(prompt, number, outputs, chunk, None))
                if draw.random() < 0.1:
                    await asyncio.wait([request], timeout=draw.random())
                    if request.cancel():  # vLLM aborts a request whose consumer goes away
                        await asyncio.wait([request])
                        totals["aborted"] += 1
                        continue
                await request
                totals["finished"] += 1
                totals["prompts"] += length
                totals["outputs"] += outputs

        await asyncio.gather(*(client(number) for number in range(num_clients)))
        return totals

    async def _batch(
        self, prompts: Sequence[list[int]], lengths: Sequence[int], chunk: int, logprobs: int | None
    ) -> tuple[float, list[Completion]]:
        # Data-parallel ranks that are idle take 32 steps to agree on a pause. Meanwhile those end that another engine's
        # ranks still take after their last request, which are fewer.
        await self.llm.pause_generation(mode="keep", clear_cache=False)
        tasks = [
            asyncio.ensure_future(self._complete(prompt, i, length, chunk, logprobs))
            for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
        await self._all_submitted(len(tasks))
        start = time.perf_counter()
        await self.llm.resume_generation()
        completions = await asyncio.gather(*tasks)
        return time.perf_counter() - start, completions

    async def _all_submitted(self, num_requests: int) -> None:
        """Wait until the front end has sent all requests, and a little longer for their delivery."""
        end = time.monotonic() + SUBMIT_TIMEOUT_S
        while self.llm.output_processor.get_num_unfinished_requests() < num_requests:
            if time.monotonic() > end:
                raise TimeoutError(f"{num_requests} requests were not submitted within {SUBMIT_TIMEOUT_S:.0f} s")
            await asyncio.sleep(0.002)
        await asyncio.sleep(DELIVERY_S)

    async def _complete(
        self, prompt: list[int], number: int, max_tokens: int, chunk: int, logprobs: int | None
    ) -> Completion:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=logprobs,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={BUDGET: chunk},
        )
        self.num_requests += 1
        rank = number % self.spec.ranks if self.spec.ranks > 1 else None
        answers = self.llm.generate(
            {"prompt_token_ids": prompt}, params, f"request-{self.num_requests}", data_parallel_rank=rank
        )
        (final,) = [answer async for answer in answers]  # FINAL_ONLY: one
        output = final.outputs[0]
        tokens = tuple(output.token_ids)
        chosen = () if logprobs is None else tuple(at[t].logprob for at, t in zip(output.logprobs, tokens, strict=True))
        return Completion(tokens, chosen)

    def _step_counter(self) -> Any:
        """A logger by which vLLM tells of every step."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        engine = self

        class StepCounter(StatLoggerBase):
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                pass

            def record(self, scheduler_stats: Any, *arguments: Any, **named: Any) -> None:
                engine.steps += scheduler_stats is not None

            def log_engine_initialized(self) -> None:
                pass

        return StepCounter


def serve(spec: EngineSpec, connection: Connection) -> None:
    """Run the engine and answer calls until the connection closes; the main function of the engine's process.

    Sends ("ready", seconds), then for every received (method, arguments) ("done", value) or ("failed", message).
    """
    os.setsid()  # so that the fleet can end this process with all that vLLM starts
    spec.log.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(spec.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(spec.environment)
    try:
        asyncio.run(_answer(spec, connection))
    except BaseException:
        traceback.print_exc()
    finally:  # also when the fleet is gone: none of vLLM's processes may stay
        sys.stderr.flush()
        os.killpg(os.getpgrp(), signal.SIGKILL)


async def _answer(spec: EngineSpec, connection: Connection) -> None:
    start = time.perf_counter()
    engine = Engine(spec)
    connection.send(("ready", time.perf_counter() - start))
    while (call := await asyncio.to_thread(connection.recv)) is not None:
        method, arguments = call
        try:
            connection.send(("done", await getattr(engine, method)(*arguments)))
        except Exception as error:  # the caller decides; the engine's log has the trace
            connection.send(("failed", f"{type(error).__name__}: {error}"))
    engine.llm.shutdown()

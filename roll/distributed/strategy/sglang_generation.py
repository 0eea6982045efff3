"""Requests to an SGLang engine and what comes back: token ids in; token ids, log-probs and weight versions out."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, Literal

from roll.distributed.strategy.sglang_engine import Engine, EngineError
from roll.rollout.types import GenerateRequest, GenerateResult, SamplingParams

ABORT_GRACE_S = 5.0
"""An aborted request answers within one step of the engine; after this it is given up without its partial tokens."""

CONTROL_TIMEOUT_S = 60.0
"""Pausing, resuming and flushing take one step of the engine; longer means that it hangs."""

IDLE_TIMEOUT_S = 2.0
"""A scheduler that has answered its last request is idle one or two steps later."""

ALL_TOKENS = -1
"""SGLang's `top_k` for no truncation."""


class Generation:
    """Draws responses from one engine.

    With `deterministic`, the requests of one call are handed over while the scheduler is paused and with an empty
    prefix cache, and calls take turns. The scheduler then forms the same batches in every run, whatever the timing.
    """

    def __init__(self, engine: Engine, timeout_s: float, deterministic: bool) -> None:
        """Requests of `engine` are aborted after `timeout_s` seconds each."""
        self._engine = engine
        self._timeout_s = timeout_s
        self._deterministic = deterministic
        self._turn = asyncio.Lock()
        self._names = itertools.count()

    async def generate(self, requests: list[GenerateRequest]) -> list[GenerateResult]:
        """One result per request, in order; a request that failed or expired comes back with `error` set.

        Raises:
            EngineError: the engine itself died.
        """
        if not requests:
            return []
        if not self._deterministic:
            return list(await asyncio.gather(*(self._answer(request, self._name()) for request in requests)))
        async with self._turn:
            return await self._generate_together(requests)

    async def flush_cache(self) -> None:
        """Empties the prefix cache; an engine about to become idle is waited for.

        Raises:
            EngineError: requests are running, so it cannot be emptied.
        """
        for idle_s in (None, IDLE_TIMEOUT_S):  # SGLang ignores retracted requests in the first form only
            answer = self._engine.manager.flush_cache(idle_s)
            if (await self._engine.guard(answer, "flush_cache", CONTROL_TIMEOUT_S)).success:
                return
        raise EngineError(f"{self._engine.name}: the prefix cache cannot be emptied while requests run")

    async def _generate_together(self, requests: list[GenerateRequest]) -> list[GenerateResult]:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

        manager = self._engine.manager
        await self._engine.guard(self._unpaused(), "waiting for the end of a pause", self._timeout_s)
        await self.flush_cache()
        await manager._async_dispatch_to_scheduler(PauseGenerationReqInput(mode="in_place"))
        names = [self._name() for _ in requests]
        tasks = [
            asyncio.ensure_future(self._answer(request, name)) for request, name in zip(requests, names, strict=True)
        ]
        try:
            arrived = self._handed_over(dict(zip(names, tasks, strict=True)))
            await self._engine.guard(arrived, "enqueueing requests", CONTROL_TIMEOUT_S)
        finally:
            await manager._async_dispatch_to_scheduler(ContinueGenerationReqInput(torch_empty_cache=False))
        return list(await asyncio.gather(*tasks))

    async def _unpaused(self) -> None:
        manager = self._engine.manager
        async with manager.is_pause_cond:
            await manager.is_pause_cond.wait_for(lambda: not manager.is_pause)

    async def _handed_over(self, tasks: dict[str, asyncio.Future[GenerateResult]]) -> None:
        states = self._engine.manager.rid_to_state
        for name, task in tasks.items():
            while not task.done() and not (name in states and states[name].dispatched):
                await asyncio.sleep(0)

    def _name(self) -> str:
        """A name of fixed width: SGLang aborts every request whose name begins with the one given."""
        return f"{next(self._names):016d}"

    async def _answer(self, request: GenerateRequest, name: str) -> GenerateResult:
        reply = asyncio.ensure_future(self._ask(request, name))
        try:
            await asyncio.wait({reply}, timeout=self._timeout_s)
            if reply.done():
                return to_result(request, reply.result(), None)
            self._engine.manager.abort_request(name)
            await asyncio.wait({reply}, timeout=ABORT_GRACE_S)
            error = f"aborted after {self._timeout_s:g} s (generation_timeout_s)"
            return to_result(request, reply.result() if reply.done() else None, error)
        except ValueError as error:  # SGLang's refusal of one request, such as a prompt longer than its context
            return to_result(request, None, str(error))
        finally:
            reply.cancel()

    async def _ask(self, request: GenerateRequest, name: str) -> dict[str, Any]:
        from sglang.srt.managers.io_struct import GenerateReqInput

        ask = GenerateReqInput(
            input_ids=request.prompt_ids,
            sampling_params=sampling_parameters(request.sampling, request.seed),
            return_logprob=True,
            rid=name,
        )
        answers = self._engine.manager.generate_request(ask, None)
        # The engine's death ends the wait; the deadline of the request is the caller's.
        return await self._engine.guard(anext(answers), "generate", self._timeout_s + 2 * ABORT_GRACE_S)


def sampling_parameters(sampling: SamplingParams, seed: int | None) -> dict[str, Any]:
    """SGLang's sampling parameters."""
    return {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or ALL_TOKENS,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(sampling.stop_token_ids),
        "sampling_seed": seed,
    }


def to_result(request: GenerateRequest, reply: dict[str, Any] | None, error: str | None) -> GenerateResult:
    """SGLang's `reply` to `request`; without a reply, or when it was aborted, `error` says why.

    Raises:
        EngineError: ids, log-probs and version spans of the reply do not cover the same tokens.
    """
    if reply is None:
        return GenerateResult(request.request_id, [], [], [], "abort", error=error)
    meta = reply["meta_info"]
    ids = list(reply["output_ids"])
    rows = meta.get("output_token_logprobs") or []
    versions = token_versions(meta.get("weight_versions") or [], len(ids))
    if [row[1] for row in rows] != ids or len(versions) != len(ids):
        raise EngineError(
            f"request {request.request_id}: {len(ids)} tokens came with {len(rows)} log-probs and "
            f"{len(versions)} versions"
        )
    reason: Literal["stop", "length", "abort"] = meta["finish_reason"]["type"]
    if reason == "abort" and error is None:
        error = meta["finish_reason"].get("message") or "aborted by the engine"
    return GenerateResult(
        request_id=request.request_id,
        response_ids=ids,
        log_probs=[row[0] for row in rows],
        versions=versions,
        finish_reason="abort" if error else reason,
        cached_prompt_tokens=meta.get("cached_tokens", 0),
        error=error,
    )


def token_versions(spans: list[dict[str, Any]], tokens: int) -> list[int]:
    """The weight version of each of the first `tokens` tokens, from spans {version, start, end} in order."""
    versions = [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
    return versions[:tokens]

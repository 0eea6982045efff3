"""Requests to an SGLang engine and what comes back: token ids in; token ids, log-probs and weight versions out."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any, Literal

from roll.configs.asynchronous import InFlightPolicy
from roll.distributed.strategy.sglang_engine import Engine, EngineError
from roll.rollout.types import GenerateRequest, GenerateResult, SamplingParams

ABORT_GRACE_S = 5.0
"""An aborted request answers within one step of the engine; after this it is given up without its partial tokens."""

LOOK_S = 0.1
"""Between two looks: of a pause, at which requests SGLang can abort by now; of a request that is due, at the pause."""

AT_HAND = 1.25
"""Requests in the engine, in multiples of those it runs at a time: some are at hand when others end."""

CONTROL_TIMEOUT_S = 60.0
"""Pausing, resuming and flushing take one step of the engine; longer means that it hangs."""

IDLE_TIMEOUT_S = 15.0
"""A scheduler that has answered its last request is idle one or two steps later, on a busy machine not at once."""


class Generation:
    """Draws responses from one engine, and holds them while it is paused.

    With `deterministic`, the requests of one call are handed over while the scheduler is paused and with an empty
    prefix cache, and calls take turns. The scheduler then forms the same batches in every run, whatever the timing.

    Attributes:
        version: of the weights; requests share cached prefixes only with requests sent under the same one.
    """

    def __init__(self, engine: Engine, timeout_s: float, deterministic: bool, running: int) -> None:
        """Starts with nothing running.

        Args:
            engine: to draw from.
            timeout_s: a request is aborted after so many seconds in the engine; waiting for a place there and pauses
                are not counted, but with `deterministic`, where the engine forms its own queue.
            deterministic: see above.
            running: requests the engine runs at a time.
        """
        self.version = 0
        self._engine = engine
        self._timeout_s = timeout_s
        self._deterministic = deterministic
        self._places = asyncio.Semaphore(math.ceil(running * AT_HAND))
        self._turn = asyncio.Lock()
        self._handing_over = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()
        self._stood_s = 0.0
        self._stands_since: float | None = None
        self._running: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._cut: set[str] = set()
        self._names = itertools.count()

    async def generate(self, requests: list[GenerateRequest]) -> list[GenerateResult]:
        """One result per request, in order; a request that failed or expired comes back with `error` set.

        Raises:
            EngineError: the engine itself died.
        """
        if not requests:
            return []
        if not self._deterministic:
            return list(await asyncio.gather(*map(self._answer_in_place, requests)))
        async with self._turn:
            return await self._generate_together(requests)

    async def pause(self, mode: InFlightPolicy) -> None:
        """Stops generation until `resume`; requests that come meanwhile wait. See `SGLangStrategy.pause`."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        async with self._handing_over:
            self._open.clear()
            while mode in ("abort_resume", "drain") and self._running:
                if mode == "abort_resume":
                    self._cut_running()
                await asyncio.wait(self._running.values(), timeout=LOOK_S)
                await asyncio.sleep(0)  # those who waited for these answers take them off the list
            if mode in ("abort_resume", "drain"):
                await self.flush_cache()  # an engine that pauses before its last steps are over never becomes idle
            message = PauseGenerationReqInput(mode="retract" if mode == "retract" else "in_place")
            await self._engine.guard(self._engine.manager.pause_generation(message), f"pause {mode}", CONTROL_TIMEOUT_S)
            self._stands_since = self._stands_since or time.monotonic()

    async def resume(self) -> None:
        """Ends a pause."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        message = ContinueGenerationReqInput(torch_empty_cache=False)
        await self._engine.guard(self._engine.manager.continue_generation(message), "resume", CONTROL_TIMEOUT_S)
        if self._stands_since is not None:
            self._stood_s += time.monotonic() - self._stands_since
            self._stands_since = None
        self._open.set()

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

    def _cut_running(self) -> None:
        """Aborts what the scheduler has; SGLang would not find what is on its way there, and never abort it again."""
        states = self._engine.manager.rid_to_state
        self._cut.update(self._running)
        for name in self._running:
            if name in states and states[name].dispatched:
                self._engine.manager.abort_request(name)

    def _seconds(self) -> float:
        """A clock that stands still while generation does."""
        now = time.monotonic() if self._stands_since is None else self._stands_since
        return now - self._stood_s

    async def _generate_together(self, requests: list[GenerateRequest]) -> list[GenerateResult]:
        while True:
            await self._open.wait()
            async with self._handing_over:
                if self._open.is_set():
                    tasks = await self._hand_over(requests)
                    break
        return list(await asyncio.gather(*tasks))

    async def _hand_over(self, requests: list[GenerateRequest]) -> list[asyncio.Task[GenerateResult]]:
        """Enqueues the requests while the scheduler stands still."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

        manager = self._engine.manager
        await self.flush_cache()
        await manager._async_dispatch_to_scheduler(PauseGenerationReqInput(mode="in_place"))
        names = [self._name() for _ in requests]
        tasks = [
            asyncio.create_task(self._answer(request, name)) for request, name in zip(requests, names, strict=True)
        ]
        try:
            arrived = self._arrival(dict(zip(names, tasks, strict=True)))
            await self._engine.guard(arrived, "enqueueing requests", CONTROL_TIMEOUT_S)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        finally:
            await manager._async_dispatch_to_scheduler(ContinueGenerationReqInput(torch_empty_cache=False))
        return tasks

    async def _arrival(self, tasks: dict[str, asyncio.Task[GenerateResult]]) -> None:
        states = self._engine.manager.rid_to_state
        for name, task in tasks.items():
            while not task.done() and not (name in states and states[name].dispatched):
                await asyncio.sleep(0)

    def _name(self) -> str:
        """A name of fixed width: SGLang aborts every request whose name begins with the one given."""
        return f"{next(self._names):016d}"

    async def _answer_in_place(self, request: GenerateRequest) -> GenerateResult:
        async with self._places:
            return await self._answer(request, self._name())

    async def _answer(self, request: GenerateRequest, name: str) -> GenerateResult:
        """The whole response, in as many parts as pauses cut it into."""
        drawn: GenerateResult | None = None
        left_s = self._timeout_s
        while True:
            while not self._open.is_set():
                await self._open.wait()
            start = self._seconds()
            rest = request if drawn is None else _rest(request, drawn)
            part, was_cut = await self._part(rest, name, left_s)
            drawn = part if drawn is None else joined(drawn, part)
            if not was_cut:
                return drawn
            name, left_s = self._name(), left_s - (self._seconds() - start)

    async def _part(self, request: GenerateRequest, name: str, timeout_s: float) -> tuple[GenerateResult, bool]:
        """What one stay in the engine yields, and whether a pause ended it."""
        reply = self._running[name] = asyncio.ensure_future(self._ask(request, name))
        until = self._seconds() + timeout_s
        try:
            while not reply.done() and (left_s := until - self._seconds()) > 0:
                await asyncio.wait({reply}, timeout=max(left_s, LOOK_S))
            if reply.done():
                result = to_result(request, reply.result(), None)
                if name in self._cut:
                    result = completed(request, result, self._stop_ids(request))
                return result, name in self._cut and result.finish_reason == "abort"
            self._engine.manager.abort_request(name)
            await asyncio.wait({reply}, timeout=ABORT_GRACE_S)
            error = f"aborted after {self._timeout_s:g} s (generation_timeout_s)"
            return to_result(request, reply.result() if reply.done() else None, error), False
        except ValueError as error:  # SGLang's refusal of one request, such as a prompt longer than its context
            return to_result(request, None, str(error)), False
        finally:
            reply.cancel()
            del self._running[name]
            self._cut.discard(name)

    def _stop_ids(self, request: GenerateRequest) -> set[int]:
        """Tokens that end a response: those asked for, and the model's own."""
        return {*request.sampling.stop_token_ids, *(self._engine.manager.model_config.hf_eos_token_id or ())}

    async def _ask(self, request: GenerateRequest, name: str) -> dict[str, Any]:
        from sglang.srt.managers.io_struct import GenerateReqInput

        ask = GenerateReqInput(
            input_ids=request.prompt_ids,
            sampling_params=sampling_parameters(request.sampling, request.seed),
            return_logprob=True,
            rid=name,
            extra_key=f"version {self.version}",
        )
        answer = asyncio.ensure_future(anext(self._engine.manager.generate_request(ask, None)))
        try:  # the engine's death ends the wait; the deadline of the request is the caller's
            return await self._engine.guard(answer, "generate", None)
        finally:
            answer.cancel()  # SGLang aborts what nobody waits for


def _rest(request: GenerateRequest, drawn: GenerateResult) -> GenerateRequest:
    """What is still to be drawn: the tokens there are become part of the prompt, as they are."""
    left = request.sampling.max_new_tokens - len(drawn.response_ids)
    return replace(
        request,
        prompt_ids=[*request.prompt_ids, *drawn.response_ids],
        sampling=replace(request.sampling, max_new_tokens=left),
    )


ALL_TOKENS = -1
"""SGLang's `top_k` for no truncation."""


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


def completed(request: GenerateRequest, cut: GenerateResult, stop_token_ids: Collection[int]) -> GenerateResult:
    """A part that a pause cut off; where its last token was to be the last anyway, the end that it is.

    SGLang reports an abort before it looks whether the token drawn meanwhile ends the response.
    """
    if cut.finish_reason != "abort" or not cut.response_ids:
        return cut
    if cut.response_ids[-1] in stop_token_ids:
        return replace(cut, finish_reason="stop", error=None)
    if len(cut.response_ids) >= request.sampling.max_new_tokens:
        return replace(cut, finish_reason="length", error=None)
    return cut


def joined(first: GenerateResult, then: GenerateResult) -> GenerateResult:
    """One response that was drawn in two parts; it ended as the second did."""
    return GenerateResult(
        request_id=first.request_id,
        response_ids=[*first.response_ids, *then.response_ids],
        log_probs=[*first.log_probs, *then.log_probs],
        versions=[*first.versions, *then.versions],
        finish_reason=then.finish_reason,
        cached_prompt_tokens=first.cached_prompt_tokens,
        error=then.error,
    )

"""Requests to an SGLang engine: token ids in; token ids, log-probs and the weight version of each token out."""

from __future__ import annotations

import asyncio
import base64
import itertools
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Literal

import numpy as np

from roll.configs.asynchronous import InFlightPolicy
from roll.datasets.stop_strings import tokens_until_stop
from roll.distributed.infer.sglang_engine import Engine, EngineError
from roll.distributed.infer.sglang_requests import RequestSender
from roll.distributed.infer.sglang_stops import stop_decoder
from roll.distributed.weights.engine_adapters import EngineAdapters, LoadedAdapter
from roll.rollout.request_order import RequestOrder
from roll.rollout.types import GenerateRequest, GenerateResult, Routing

ABORT_GRACE_S = 5.0
"""An aborted request answers within one step of the engine; after this time its partial tokens are lost."""

POLL_S = 0.1
"""Interval at which a pause checks which requests SGLang can abort, and an overdue request checks for a pause."""

QUEUE_FACTOR = 1.25
"""Requests in the engine, as a multiple of those it runs at a time: enough that one is ready when another ends."""

CONTROL_TIMEOUT_S = 60.0
"""Pausing, resuming and flushing take one step of the engine; longer means that the engine hangs."""

BEFORE_ALL = -(1 << 62)
"""Version of a request without one, such as those of validation: older than any, and always due."""

IDLE_TIMEOUT_S = 15.0
"""A scheduler becomes idle one or two steps after its last answer, which can take seconds on a busy machine."""


class Generation:
    """Generates responses with one engine, and pauses and continues them.

    With `deterministic`, the requests of one call are submitted while the scheduler is paused and the prefix cache is
    empty, and calls run one after the other. The scheduler then forms the same batches in every run, whatever the
    timing.
    """

    def __init__(
        self,
        engine: Engine,
        timeout_s: float,
        deterministic: bool,
        running: int,
        newer: int | None,
        ahead: int,
        version: Callable[[], int],
    ) -> None:
        """Submits nothing yet.

        Args:
            engine: that generates.
            timeout_s: a request is aborted after so many seconds in the engine. Pauses and the wait for a free place
                are not counted, except with `deterministic`, where requests queue inside the engine.
            deterministic: see above.
            running: requests the engine runs at a time.
            newer: most requests of newer prompts that start beside those of older ones that are due; None: no limit.
                With `deterministic` there is none.
            ahead: versions after its submission at which a prompt is due.
            version: gives the version of the weights; requests share cached prefixes only within one version.
        """
        self._version, self._ahead = version, ahead
        self._engine = engine
        self._sender = RequestSender(engine)
        self._timeout_s = timeout_s
        self._deterministic = deterministic
        self._order: RequestOrder[asyncio.Future[None]] = RequestOrder(math.ceil(running * QUEUE_FACTOR), newer)
        self._one_call = asyncio.Lock()
        self._submitting = asyncio.Lock()
        self._not_paused = asyncio.Event()
        self._not_paused.set()
        self._paused_s = 0.0
        self._paused_since: float | None = None
        self._running: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._interrupted: set[str] = set()
        self._names = itertools.count()
        self._decode: Callable[[Sequence[int]], str] | None = None
        self.adapters: EngineAdapters | None = None
        """Each request gets the newest of its policy when it starts, and keeps it; None: requests get none."""

    async def generate(self, requests: list[GenerateRequest]) -> list[GenerateResult]:
        """One result per request, in order; a request that failed or expired is returned with `error` set.

        Raises:
            EngineError: the engine itself died.
        """
        if not requests:
            return []
        if self._decode is None and any(request.sampling.stop_strings for request in requests):
            self._decode = (await asyncio.to_thread(stop_decoder, self._engine.arguments["model_path"])).decode
        if not self._deterministic:
            return list(await asyncio.gather(*map(self._answer_when_free, requests)))
        async with self._one_call:
            return await self._generate_deterministic(requests)

    async def try_adapter(self, request: GenerateRequest, adapter: LoadedAdapter) -> GenerateResult:
        """The response to one request with an adapter that other requests do not get yet."""
        result, _ = await self._attempt(request, self._name(), self._timeout_s, adapter)
        return result

    async def pause(self, mode: InFlightPolicy) -> None:
        """Stops generation until `resume`; requests that arrive meanwhile wait.

        Args:
            mode: running requests keep their key-value cache (`in_place`), recompute it when resumed (`retract`), are
                finished first (`drain`), or leave the engine and are continued from their exact tokens
                (`abort_resume`).
        """
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        if mode == "retract" and self._engine.arguments.get("enable_return_routed_experts"):
            mode = "abort_resume"  # the cache is recomputed too, and what is sampled keeps its experts
        async with self._submitting:
            self._not_paused.clear()
            while mode in ("abort_resume", "drain") and self._running:
                if mode == "abort_resume":
                    self._abort_running()
                await asyncio.wait(self._running.values(), timeout=POLL_S)
                await asyncio.sleep(0)  # lets `_attempt` remove the finished requests from `_running`
            if mode in ("abort_resume", "drain"):
                await self.flush_cache()  # an engine that pauses before its last steps have ended never becomes idle
            message = PauseGenerationReqInput(mode="retract" if mode == "retract" else "in_place")
            await self._engine.wait_for(
                self._engine.manager.pause_generation(message), f"pause {mode}", CONTROL_TIMEOUT_S
            )
            self._paused_since = self._paused_since or time.monotonic()

    async def resume(self) -> None:
        """Ends a pause."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        message = ContinueGenerationReqInput(torch_empty_cache=False)
        await self._engine.wait_for(self._engine.manager.continue_generation(message), "resume", CONTROL_TIMEOUT_S)
        if self._paused_since is not None:
            self._paused_s += time.monotonic() - self._paused_since
            self._paused_since = None
        self._not_paused.set()

    async def flush_cache(self) -> None:
        """Empties the prefix cache; waits for an engine that is about to become idle.

        Raises:
            EngineError: requests are running, so the cache is in use.
        """
        for idle_s in (None, IDLE_TIMEOUT_S):  # SGLang ignores retracted requests in the first form only
            answer = self._engine.manager.flush_cache(idle_s)
            if (await self._engine.wait_for(answer, "flush_cache", CONTROL_TIMEOUT_S)).success:
                return
        raise EngineError(f"{self._engine.name}: the prefix cache cannot be emptied while requests run")

    def _abort_running(self) -> None:
        """Aborts the requests that have reached the scheduler; for any other, SGLang would ignore the abort."""
        states = self._engine.manager.rid_to_state
        self._interrupted.update(self._running)
        for name in self._running:
            if name in states and states[name].dispatched:
                self._engine.manager.abort_request(name)

    def _seconds(self) -> float:
        """A clock that stops during pauses."""
        now = time.monotonic() if self._paused_since is None else self._paused_since
        return now - self._paused_s

    async def _generate_deterministic(self, requests: list[GenerateRequest]) -> list[GenerateResult]:
        while True:
            await self._not_paused.wait()
            async with self._submitting:
                if self._not_paused.is_set():
                    tasks = await self._submit_paused(requests)
                    break
        return list(await asyncio.gather(*tasks))

    async def _submit_paused(self, requests: list[GenerateRequest]) -> list[asyncio.Task[GenerateResult]]:
        """Enqueues the requests while the scheduler is paused."""
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
            await self._engine.wait_for(arrived, "enqueueing requests", CONTROL_TIMEOUT_S)
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
        """A request name of fixed width: SGLang aborts every request whose name starts with the given one."""
        return f"{next(self._names):016d}"

    async def _answer_when_free(self, request: GenerateRequest) -> GenerateResult:
        version = BEFORE_ALL if request.version is None else request.version
        place = asyncio.get_running_loop().create_future()
        self._order.add(version, place)
        self._start_next()
        try:
            await place
            return await self._answer(request, self._name())
        finally:
            if place.done() and not place.cancelled():  # a cancelled one waits on, and ends when it would start
                self._order.end(version)
                self._start_next()

    def _start_next(self) -> None:
        while started := self._order.start(due=self._version() - self._ahead):
            for version, place in started:
                if place.cancelled():
                    self._order.end(version)
                else:
                    place.set_result(None)

    async def _answer(self, request: GenerateRequest, name: str) -> GenerateResult:
        """The whole response, joined from the parts that pauses interrupted."""
        sampled: GenerateResult | None = None
        left_s = self._timeout_s
        adapter = None
        while True:
            while not self._not_paused.is_set():
                await self._not_paused.wait()
            if adapter is None and self.adapters is not None:
                adapter = self.adapters.newest.get(request.policy)
            start = self._seconds()
            rest = request if sampled is None else _rest(request, sampled)
            part, interrupted = await self._attempt(rest, name, left_s, adapter)
            sampled = part if sampled is None else joined(sampled, part)
            end = self._end(request, sampled) if interrupted or sampled.finish_reason != "abort" else None
            if end is not None:  # SGLang sees no stop string that began before a pause, or that ends right at it
                return shortened(sampled, end)
            if not interrupted:
                return sampled
            name, left_s = self._name(), left_s - (self._seconds() - start)

    async def _attempt(
        self, request: GenerateRequest, name: str, timeout_s: float, adapter: LoadedAdapter | None = None
    ) -> tuple[GenerateResult, bool]:
        """The result of one submission to the engine, and whether a pause interrupted it."""
        result, interrupted = await self._sampled(request, name, timeout_s, adapter)
        if adapter is not None:  # SGLang has the version of the weights below
            result = replace(result, versions=[adapter.version] * len(result.response_ids))
        return result, interrupted

    async def _sampled(
        self, request: GenerateRequest, name: str, timeout_s: float, adapter: LoadedAdapter | None
    ) -> tuple[GenerateResult, bool]:
        try:
            reply = self._running[name] = self._send(request, name, adapter)
        except ValueError as refusal:  # one request is refused, such as a prompt longer than the engine's context
            return to_result(request, None, str(refusal)), False
        until = self._seconds() + timeout_s
        try:
            while not reply.done() and (left_s := until - self._seconds()) > 0:
                await asyncio.wait({reply}, timeout=max(left_s, POLL_S))
            if reply.done() and (refusal_text := refused(reply.result())) is not None:
                return to_result(request, None, refusal_text), False
            if reply.done():
                result = self._with_routing(request, to_result(request, reply.result(), None), reply.result())
                if name in self._interrupted:
                    result = completed(request, result, self._stop_ids(request))
                return result, name in self._interrupted and result.finish_reason == "abort"
            self._engine.manager.abort_request(name)
            await asyncio.wait({reply}, timeout=ABORT_GRACE_S)
            error = f"aborted after {self._timeout_s:g} s (generation_timeout_s)"
            return to_result(request, reply.result() if reply.done() else None, error), False
        finally:
            reply.cancel()
            del self._running[name]
            self._interrupted.discard(name)

    def _send(
        self, request: GenerateRequest, name: str, adapter: LoadedAdapter | None
    ) -> asyncio.Future[dict[str, Any]]:
        """Starts a request; a ValueError says why it is not possible."""
        if self.adapters is None:
            return self._sender.send(request, name, f"version {self._version()}")
        if adapter is None:
            of = f" of policy {request.policy}" if request.policy else ""
            raise ValueError(f"no adapter{of} is loaded, and the weights without one are not the policy")
        return self._sender.send(request, name, adapter.name, self.adapters.use(adapter, name))

    def _end(self, request: GenerateRequest, sampled: GenerateResult) -> int | None:
        """Tokens of a response up to the end of its first stop string."""
        stops = request.sampling.stop_strings
        return tokens_until_stop(sampled.response_ids, stops, self._decode) if stops and self._decode else None

    def _with_routing(self, request: GenerateRequest, result: GenerateResult, reply: dict[str, Any]) -> GenerateResult:
        """The result with the experts that SGLang recorded; without, if it has computed sampled tokens once more."""
        meta = reply["meta_info"]
        text = meta.get("routed_experts")
        if text is None or meta.get("num_retractions") or not (request.sampling.routing and result.response_ids):
            return result
        numbers = self._engine.manager.model_config.hf_text_config
        return replace(result, routing=read_routing(text, numbers.num_hidden_layers, numbers.num_experts_per_tok))

    def _stop_ids(self, request: GenerateRequest) -> set[int]:
        return {*request.sampling.stop_token_ids, *(self._engine.manager.model_config.hf_eos_token_id or ())}


def _rest(request: GenerateRequest, sampled: GenerateResult) -> GenerateRequest:
    """The request for the rest of a response: the tokens sampled so far become part of the prompt."""
    left = request.sampling.max_new_tokens - len(sampled.response_ids)
    read = len(request.prompt_ids) + len(sampled.response_ids) - 1  # a row that is missing stays missing
    return replace(
        request,
        routed=read if sampled.response_ids else request.routed,
        prompt_ids=[*request.prompt_ids, *sampled.response_ids],
        sampling=replace(request.sampling, max_new_tokens=left),
    )


def to_result(request: GenerateRequest, reply: dict[str, Any] | None, error: str | None) -> GenerateResult:
    """SGLang's `reply` to `request` as a result; `error` is the reason of an abort or a missing reply.

    Raises:
        EngineError: ids, log-probs, version spans and masks of the reply do not cover the same tokens.
    """
    if reply is None:
        return GenerateResult(request.request_id, [], [], [], "abort", error=error)
    meta = reply["meta_info"]
    ids = list(reply["output_ids"])
    rows = meta.get("output_token_logprobs") or []
    versions = token_versions(meta.get("weight_versions") or [], len(ids))
    masks: list[list[int]] = meta.get("output_token_sampling_mask") or []
    masked = len(ids) if request.sampling.sampling_mask else 0
    if [row[1] for row in rows] != ids or len(versions) != len(ids) or len(masks) != masked:
        raise EngineError(
            f"request {request.request_id}: {len(ids)} tokens came with {len(rows)} log-probs, {len(versions)} "
            f"versions and {len(masks)} sampling masks"
        )
    log_probs: list[float] = meta["output_token_sampling_logprobs"] if masks else [row[0] for row in rows]
    reason: Literal["stop", "length", "abort"] = meta["finish_reason"]["type"]
    if reason == "abort" and error is None:
        error = meta["finish_reason"].get("message") or "aborted by the engine"
    return GenerateResult(
        request_id=request.request_id,
        response_ids=ids,
        log_probs=list(log_probs),
        versions=versions,
        finish_reason="abort" if error else reason,
        cached_prompt_tokens=meta.get("cached_tokens", 0),
        error=error,
        sampling_mask=list(masks),
    )


def read_routing(text: str, layers: int, per_token: int) -> Routing:
    """SGLang's int32 ids in base64 as [rows, layers, k] uint8, or int16 for more than 256 experts."""
    ids = np.frombuffer(base64.b64decode(text), np.int32).reshape(-1, layers, per_token)
    small = not ids.size or (ids.min() >= 0 and ids.max() < 256)
    return ids.astype(np.uint8 if small else np.int16)


def refused(reply: dict[str, Any]) -> str | None:
    """Why the scheduler refused the request as impossible, such as a prompt too long; None for any other reply."""
    reason = reply["meta_info"]["finish_reason"]
    if reason["type"] == "abort" and reason.get("status_code") == HTTPStatus.BAD_REQUEST:
        return str(reason.get("message") or "refused by the engine")
    return None


def token_versions(spans: list[dict[str, Any]], tokens: int) -> list[int]:
    """The weight version of each of the first `tokens` tokens, from ordered spans {version, start, end}."""
    versions = [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
    return versions[:tokens]


def completed(request: GenerateRequest, part: GenerateResult, stop_token_ids: Collection[int]) -> GenerateResult:
    """A part that a pause interrupted, with its true finish reason where its last token ends the response.

    SGLang reports an abort before it checks whether the token sampled meanwhile ends the response.
    """
    if part.finish_reason != "abort" or not part.response_ids:
        return part
    if part.response_ids[-1] in stop_token_ids:
        return replace(part, finish_reason="stop", error=None)
    if len(part.response_ids) >= request.sampling.max_new_tokens:
        return replace(part, finish_reason="length", error=None)
    return part


def shortened(result: GenerateResult, end: int) -> GenerateResult:
    """The first `end` tokens of a response, whose last one ends it."""
    routing, cut = result.routing, len(result.response_ids) - end
    return replace(
        result,
        response_ids=result.response_ids[:end],
        log_probs=result.log_probs[:end],
        versions=result.versions[:end],
        sampling_mask=result.sampling_mask[:end],
        routing=None if routing is None else routing[: len(routing) - cut],
        finish_reason="stop",
        error=None,
    )


def joined(first: GenerateResult, second: GenerateResult) -> GenerateResult:
    """One response from two parts; it finished as the second did."""
    return GenerateResult(
        request_id=first.request_id,
        response_ids=[*first.response_ids, *second.response_ids],
        log_probs=[*first.log_probs, *second.log_probs],
        versions=[*first.versions, *second.versions],
        finish_reason=second.finish_reason,
        cached_prompt_tokens=first.cached_prompt_tokens,
        error=second.error,
        sampling_mask=[*first.sampling_mask, *second.sampling_mask],
        routing=second.routing if first.routing is None else _together(first.routing, second.routing),
    )


def _together(first: Routing, second: Routing | None) -> Routing:
    return first if second is None else np.concatenate([first, second])

"""Sends requests to SGLang's scheduler in batches, and resolves a future for each answer.

SGLang's own `generate_request` costs several tasks, copies and one message for each request, which is most of the time
of a short response. Here all requests of one iteration of the event loop are one message, and the parameters that they
share are checked once. Answers and aborts use SGLang's own code.
"""

from __future__ import annotations

import asyncio
import copy
import functools
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roll.distributed.infer.sglang_engine import EngineError, EngineNotRunningError
from roll.distributed.infer.sglang_stops import add_stop_strings
from roll.rollout.types import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from roll.distributed.infer.sglang_engine import Engine

KEPT_PARAMETERS = 256
"""Checked sampling parameters that are kept; requests that continue a response have their own."""

ALL_TOKENS = -1
"""SGLang's `top_k` for no truncation."""


def sampling_parameters(sampling: SamplingParams) -> dict[str, Any]:
    """SGLang's sampling parameters, without a seed."""
    return {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or ALL_TOKENS,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(sampling.stop_token_ids),
    }


@dataclass(frozen=True)
class _Reply:
    """In place of the event of SGLang's request state: an answer resolves the future."""

    future: asyncio.Future[dict[str, Any]]
    answers: list[dict[str, Any]]

    def set(self) -> None:
        if not self.future.done():
            self.future.set_result(self.answers[-1])


class RequestSender:
    """Sends requests of one started engine; all methods run on its event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._unsent: dict[str, Any] = {}
        self._open: set[asyncio.Future[dict[str, Any]]] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._parameters: dict[SamplingParams, Any] = {}

    def send(
        self, request: GenerateRequest, name: str, cache_key: str, lora_id: str | None = None
    ) -> asyncio.Future[dict[str, Any]]:
        """SGLang's answer to `request`; cancelling the future aborts the request.

        Args:
            request: a prompt and how to sample its response.
            name: of the request; no other one in the engine has it.
            cache_key: requests share cached prefixes only with those of the same key.
            lora_id: of a loaded adapter; None: the weights alone.

        Raises:
            ValueError: the prompt does not fit into the context of the engine, or a sampling parameter is not possible.
            EngineNotRunningError: the engine does not run.
        """
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.managers.tokenizer_manager import ReqState

        manager = self._engine.manager
        length, longest = len(request.prompt_ids), manager.max_req_input_len
        if length >= longest:
            raise ValueError(
                f"the prompt ({length} tokens) is longer than the engine takes: its context is {manager.context_len} "
                f"tokens, and its cache has room for prompts of at most {longest - 1}"
            )
        parameters = copy.copy(self._checked_parameters(request.sampling))
        parameters.sampling_seed = request.seed
        masked = request.sampling.sampling_mask
        template, times = _template(masked)
        future = asyncio.get_running_loop().create_future()
        answers: list[dict[str, Any]] = []
        manager.rid_to_state[name] = ReqState(answers, False, _Reply(future, answers), template, times)
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send_all)
        self._unsent[name] = TokenizedGenerateReqInput(
            rid=name,
            input_text="",
            input_ids=array("q", request.prompt_ids),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=parameters,
            return_logprob=True,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            return_sampling_mask=masked,
            return_routed_experts=request.sampling.routing,
            routed_experts_start_len=request.routed,
            stream=False,
            extra_key=cache_key,
            lora_id=lora_id,
            time_stats=times,
        )
        self._open.add(future)
        future.add_done_callback(functools.partial(self._close, name))
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._fail_when_the_engine_dies())
        return future

    def _send_all(self) -> None:
        """Sends what was enqueued in this iteration of the event loop as one message."""
        from sglang.srt.managers.io_struct import BatchTokenizedGenerateReqInput

        batch, self._unsent = self._unsent, {}
        if not batch:
            return
        try:
            manager = self._engine.manager
        except EngineError:  # stopped in this iteration; `_fail_when_the_engine_dies` says so
            return
        states = {name: manager.rid_to_state[name] for name in batch}
        try:
            manager.auto_create_handle_loop()
            for message in batch.values():
                message.wrap_pickle_fields()
            manager._dispatch_to_scheduler(BatchTokenizedGenerateReqInput(batch=list(batch.values())))
        except Exception as error:  # nothing of the batch reached the engine
            for name, state in states.items():
                manager.rid_to_state.pop(name, None)
                if not state.event.future.done():
                    state.event.future.set_exception(
                        EngineError(f"{self._engine.name}: generate: {type(error).__name__}: {error}")
                    )
            return
        for state in states.values():
            state.dispatched = True

    def _checked_parameters(self, sampling: SamplingParams) -> Any:
        """SGLang's object for `sampling`, normalized and verified once; it is copied for each request.

        Raises:
            ValueError: a value is not possible.
        """
        from sglang.srt.sampling.sampling_params import SamplingParams as SGLangParameters

        if sampling not in self._parameters:
            manager = self._engine.manager
            preferred = manager.preferred_sampling_params or {}
            parameters = SGLangParameters(**preferred | sampling_parameters(sampling))
            parameters.normalize(None)
            parameters.verify(manager.model_config.vocab_size)
            add_stop_strings(parameters, sampling.stop_strings)
            if len(self._parameters) >= KEPT_PARAMETERS:
                self._parameters.clear()
            self._parameters[sampling] = parameters
        return self._parameters[sampling]

    def _close(self, name: str, future: asyncio.Future[dict[str, Any]]) -> None:
        """Removes an answered request, and aborts a cancelled one; its state ends with the answer to the abort."""
        self._open.discard(future)
        if not future.cancelled():
            return
        try:
            manager = self._engine.manager
        except EngineError:
            return
        if self._unsent.pop(name, None) is not None:
            manager.rid_to_state.pop(name, None)
        else:
            manager.abort_request(name)

    async def _fail_when_the_engine_dies(self) -> None:
        cause = await self._engine.death()
        for future in list(self._open):
            if not future.done():
                future.set_exception(EngineNotRunningError(f"{self._engine.name}: generate: {cause}"))


@functools.cache
def _template(masked: bool) -> tuple[Any, Any]:
    """What SGLang reads of a request when its answer comes: log-probs, no stream, masks if asked for; and no times."""
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.observability.req_time_stats import APIServerReqTimeStats

    template = GenerateReqInput(input_ids=[], return_logprob=True, top_logprobs_num=0, return_text_in_logprobs=False)
    template.return_sampling_mask = masked
    times = APIServerReqTimeStats()
    times.set_created_time()
    return template, times

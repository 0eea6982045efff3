"""One SGLang engine that scores sequences with a reward model instead of generating responses."""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import TYPE_CHECKING, Any

from roll.distributed.infer.infer_worker import PROBE_TOKEN, InferWorker
from roll.distributed.infer.sglang_engine import Engine, EngineError, EngineNotRunningError
from roll.distributed.infer.sglang_generation import QUEUE_FACTOR
from roll.distributed.worker import WorkerRank, register
from roll.rollout.types import GenerateRequest, GenerateResult, SamplingParams

if TYPE_CHECKING:
    from roll.configs.roles import EngineRoleConfig
    from roll.configs.run_options import EngineOptions

NOTHING_SAMPLED = SamplingParams(max_new_tokens=1)
"""Of requests for a score: balancing counts the tokens of the sequence and one more."""


class ScoreWorker(InferWorker):
    """An engine of role `reward`. It starts, dies and is restarted as any other; its weights never change."""

    def __init__(self, rank: WorkerRank, config: EngineRoleConfig, pipeline_config: EngineOptions) -> None:
        super().__init__(rank, config, pipeline_config)
        running = 1 if pipeline_config.deterministic else math.ceil(config.max_running_requests * QUEUE_FACTOR)
        self._free_slots = asyncio.Semaphore(running)
        self._names = itertools.count()

    async def probe(self, engine: Engine) -> None:
        """Scores one token.

        Raises:
            EngineError: the score is no finite number.
        """
        [answer] = await self._answers(engine, [GenerateRequest("probe", [PROBE_TOKEN], NOTHING_SAMPLED)])
        if answer.error is not None or answer.value is None or not math.isfinite(answer.value):
            self.close()
            raise EngineError(
                f"{self.rank.name}: the engine started but scores one token with {answer.value}: "
                f"{answer.error or 'the model may lack its value head, score.weight'}"
            )

    @register()
    async def generate(self, requests: list[GenerateRequest]) -> list[GenerateResult]:
        """The `value` after the last token of each prompt, in order; nothing is generated.

        A request that takes longer than `generation_timeout_s`, or that the engine refuses, has `error` set. With
        `deterministic` sequences are computed one by one, so that a score does not depend on its batch.

        Raises:
            EngineNotRunningError: the engine died.
        """
        return await self._answers(self.engine, requests)

    async def _answers(self, engine: Engine, requests: list[GenerateRequest]) -> list[GenerateResult]:
        calls = [asyncio.ensure_future(self._answer(engine, request)) for request in requests]
        try:
            return list(await asyncio.gather(*calls))
        finally:
            for call in calls:
                call.cancel()  # where the engine died, or the call was cancelled

    async def _answer(self, engine: Engine, request: GenerateRequest) -> GenerateResult:
        async with self._free_slots:
            name = f"{next(self._names):016d}"
            answer = asyncio.ensure_future(_score(engine, name, request.prompt_ids))
            timeout_s, what = self.config.generation_timeout_s, f"score {len(request.prompt_ids)} tokens"
            error: str | None = None
            values: list[float] = []
            try:
                values = await engine.wait_for(answer, what, timeout_s)
            except EngineNotRunningError:
                raise
            except (EngineError, ValueError) as problem:  # not in time; or refused, such as for its length
                error = str(problem)
            finally:
                if not answer.done() or answer.cancelled():
                    _abort(engine, name)
            if error is None and len(values) != 1:
                error = f"the model gives {len(values)} values for a sequence"
            if error is not None:
                return GenerateResult(request.request_id, [], [], [], "abort", error=error)
            return GenerateResult(request.request_id, [], [], [], "stop", value=values[0])


async def _score(engine: Engine, name: str, ids: list[int]) -> list[float]:
    """What the model gives for the last token.

    Raises:
        ValueError: the engine refuses the sequence.
    """
    from sglang.srt.managers.io_struct import EmbeddingReqInput

    replies = engine.manager.generate_request(EmbeddingReqInput(rid=name, input_ids=ids), None)
    reply: dict[str, Any] = await anext(replies)
    reason = reply["meta_info"]["finish_reason"] or {}
    if reason.get("type") == "abort":
        raise ValueError(reason.get("message") or "aborted by the engine")
    return list(reply["embedding"])


def _abort(engine: Engine, name: str) -> None:
    if engine.is_running:
        engine.manager.abort_request(name)

"""From prompts to scored groups: what fails is dropped whole, and the cause that is told is that of the last."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any

from roll.configs.pipeline import RLVRConfig
from roll.datasets.templates import EncodedPrompt
from roll.pipeline.rlvr.groups import Group
from roll.pipeline.rlvr.producer import RLVRProducer
from roll.rollout.policy import Ticket
from roll.rollout.types import GenerateRequest, GenerateResult, SamplingParams


class Engines:
    """Answers every request with one token, or with an error while `broken`."""

    broken = False

    async def generate(self, groups: list[list[GenerateRequest]]) -> list[list[GenerateResult]]:
        return [[self.answer(request) for request in group] for group in groups]

    def answer(self, request: GenerateRequest) -> GenerateResult:
        if self.broken:
            return GenerateResult(request.request_id, [], [], [], "abort", error="out of memory")
        return GenerateResult(request.request_id, [7], [-0.5], [0], "stop")


class Scores:
    """Scores every group with 1, or with a failure while `broken`."""

    broken = False
    last_failure: str | None = None

    async def score(self, groups: list[Group]) -> None:
        for group in groups:
            if self.broken:
                group.drop_reason, self.last_failure = "reward_timeout", "reward math: timeout"
            else:
                group.scores = [1.0] * len(group.results)


class Untimed:
    def measure(self, name: str) -> Any:
        return nullcontext()


def test_the_last_cause_is_told_whether_generation_or_a_reward_failed():
    engines, scores = Engines(), Scores()
    prompts = [EncodedPrompt("p", "math", [1, 2], "3")]
    sampling = SamplingParams(1)
    producer: Any = RLVRProducer(RLVRConfig(), prompts, [], engines, scores, sampling, sampling)  # type: ignore[arg-type]

    def dropped(number: int) -> tuple[str | None, str | None]:
        [group] = producer.draw([Ticket(number, 0, 0)])
        asyncio.run(producer.produce([group], Untimed()))
        return group.drop_reason, producer.last_failure

    assert dropped(0) == (None, None)
    scores.broken = True
    assert dropped(1) == ("reward_timeout", "reward math: timeout")
    engines.broken = True
    assert dropped(2) == ("generation_failed", "generation: out of memory")
    engines.broken = False
    assert dropped(3) == ("reward_timeout", "reward math: timeout")

"""The reward llm_judge on engines of the run: responses are graded by the model of role `judge`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from roll.configs.scoring.rewards import RewardConfig
from roll.datasets.prompts import Question
from roll.datasets.templates import PromptEncoder
from roll.rewards.calling import RewardOutcome, RewardRequest
from roll.rewards.llm_judge import JudgeError, filled, grade_in

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class JudgeQuestion:
    """What one response is graded by.

    Attributes:
        prompt_ids: the question in the chat template of the judge.
        temperature: of the answer.
        max_new_tokens: of the answer.
        attempt: number of the request for the same question; another one has another seed.
    """

    prompt_ids: tuple[int, ...]
    temperature: float
    max_new_tokens: int
    attempt: int = 0


@dataclass(frozen=True)
class JudgeAnswer:
    """Token ids of an answer, or the `error` by which an engine gave none."""

    token_ids: tuple[int, ...]
    error: str | None = None


AskJudge = Callable[[Sequence[JudgeQuestion]], Awaitable[Sequence[JudgeAnswer]]]
"""The answer to each question."""


class JudgeModelScorer:
    """Grades responses as the reward llm_judge does, with engines of the run in place of an endpoint.

    An answer without a grade is asked for again `max_retries` times, with other seeds; not at a temperature of 0, where
    it would be the same. Use a scorer from one asyncio loop.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        reward: RewardConfig,
        max_tokens: int | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """Grades nothing before `connect` gives it the engines; a question longer than `max_tokens` has no grade.

        Raises:
            DatasetError: the tokenizer lacks the template.
        """
        assert reward.template is not None, "loading fills it in"
        self._tokenizer, self._reward, self._max_tokens = tokenizer, reward, max_tokens
        self._encoder = PromptEncoder(tokenizer, reward.template, variables)
        self._ask: AskJudge | None = None
        self._running: set[asyncio.Future[Sequence[JudgeAnswer]]] = set()

    def connect(self, ask: AskJudge) -> None:
        self._ask = ask

    def launch(self) -> None:
        """Does nothing: the engines run already."""

    def close(self) -> None:
        for call in self._running:
            call.cancel()

    def check(self, questions: Sequence[Question]) -> None:
        """Does nothing: a question to a judge is a text, which every template takes."""

    async def score(self, requests: Sequence[RewardRequest]) -> list[list[RewardOutcome]]:
        """Grades every response of every request; the outcomes of each request, in order.

        Raises:
            ClusterError: the engines failed or did not answer in time.
        """
        questions = await asyncio.to_thread(self._questions, requests)
        outcomes: list[RewardOutcome | None] = [self._too_long(question) for question in questions]
        for attempt in range(self._reward.max_retries + 1):
            open_ones = [index for index, outcome in enumerate(outcomes) if outcome is None]
            if not open_ones:
                break
            last = attempt == self._reward.max_retries or self._reward.judge_temperature == 0
            asked = [replace(questions[index], attempt=attempt) for index in open_ones]
            for index, answer in zip(open_ones, await self._answers(asked), strict=True):
                outcomes[index] = self._outcome(answer, attempt, last)
        graded = iter([outcome for outcome in outcomes if outcome is not None])
        return [[next(graded) for _ in request.responses] for request in requests]

    def _questions(self, requests: Sequence[RewardRequest]) -> list[JudgeQuestion]:
        texts = [
            filled(
                self._reward.prompt_template,
                {"prompt": request.prompt, "response": response, "ground_truth": request.ground_truth},
            )
            for request in requests
            for response in request.responses
        ]
        encoded = self._encoder.encode([Question(text=text) for text in texts])
        reward = self._reward
        return [JudgeQuestion(tuple(ids), reward.judge_temperature, reward.judge_max_tokens) for ids in encoded]

    def _too_long(self, question: JudgeQuestion) -> RewardOutcome | None:
        length = len(question.prompt_ids) + question.max_new_tokens
        if self._max_tokens is None or length <= self._max_tokens:
            return None
        text = (
            f"{len(question.prompt_ids)} tokens of the question and judge_max_tokens {question.max_new_tokens}; the "
            f"judge has {self._max_tokens}"
        )
        return RewardOutcome(None, "too_long", text)

    async def _answers(self, questions: Sequence[JudgeQuestion]) -> Sequence[JudgeAnswer]:
        assert self._ask is not None, "connect comes first"
        call = asyncio.ensure_future(self._ask(questions))
        self._running.add(call)
        try:
            return await call
        finally:
            self._running.discard(call)

    def _outcome(self, answer: JudgeAnswer, attempt: int, last: bool) -> RewardOutcome | None:
        """The score of an answer; None where it is to be asked for again."""
        if answer.error is not None:  # the engines have repeated the request already
            return RewardOutcome(None, "raised", f"the judge gave no answer: {answer.error}")
        text = self._tokenizer.decode(list(answer.token_ids), skip_special_tokens=True)
        try:
            share = grade_in(str(text), self._reward)
        except JudgeError as error:
            repeated = f" (after {attempt} repeated requests)" if attempt else ""
            return RewardOutcome(None, "raised", f"{error}{repeated}") if last else None
        metrics = {"grade": share * self._reward.max_grade, "retries": float(attempt)}
        return RewardOutcome(self._reward.share_score(share), metrics=metrics)

"""Grades of a judge on engines of the run: what it is asked, repeated questions, and failures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from roll.configs.scoring.built_in_rewards import BUILT_IN
from roll.configs.scoring.rewards import RewardConfig
from roll.datasets.prompts import Question
from roll.rewards.calling import RewardOutcome, RewardRequest
from roll.rewards.judge_model import JudgeAnswer, JudgeModelScorer, JudgeQuestion
from tests.processes import PATIENCE_S

Ask = Callable[[Sequence[JudgeQuestion]], Awaitable[list[JudgeAnswer]]]


class Tokenizer:
    """One token for each character."""

    chat_template = None

    def get_vocab(self) -> dict[str, int]:
        return {}

    def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(character) for character in text] for text in texts]}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(map(chr, ids))


def text_of(question: JudgeQuestion) -> str:
    return "".join(map(chr, question.prompt_ids))


def answering(reply: Callable[[JudgeQuestion], str]) -> Ask:
    async def ask(questions: Sequence[JudgeQuestion]) -> list[JudgeAnswer]:
        return [JudgeAnswer(tuple(map(ord, reply(question)))) for question in questions]

    return ask


def scored(ask: Ask, *requests: RewardRequest, max_tokens: int | None = None, **options: Any) -> list[Any]:
    defaults = {"prompt_template": "{prompt}|{ground_truth}|{response}", "template": "none", "judge_max_tokens": 10}
    reward = RewardConfig(function=BUILT_IN["llm_judge"].function, **defaults | options)

    async def run() -> list[Any]:
        scorer = JudgeModelScorer(Tokenizer(), reward, max_tokens)  # type: ignore[arg-type]
        scorer.connect(ask)
        return await scorer.score(requests)

    return asyncio.run(run())


def request(prompt: str, truth: str, *responses: str) -> RewardRequest:
    return RewardRequest(responses, truth, Question(text=prompt))


def test_every_response_is_a_question_and_its_grade_a_score() -> None:
    asked: list[str] = []

    def reply(question: JudgeQuestion) -> str:
        asked.append(text_of(question))
        return "Grade: 10" if text_of(question).endswith("good") else "Grade: 5"

    outcomes = scored(answering(reply), request("p", "t", "good", "bad"), request("q", "u", "good"), wrong_score=-1.0)
    assert asked == ["p|t|good", "p|t|bad", "q|u|good"]
    assert [[outcome.score for outcome in of_group] for of_group in outcomes] == [[1.0, 0.0], [1.0]]
    assert outcomes[0][1] == RewardOutcome(0.0, metrics={"grade": 5.0, "retries": 0.0})


def test_answers_without_a_grade_are_asked_for_again_with_another_number_until_the_last() -> None:
    attempts: list[tuple[str, int]] = []

    def reply(question: JudgeQuestion) -> str:
        response = text_of(question)[-1]
        attempts.append((response, question.attempt))
        return "Grade: yes" if question.attempt == {"a": 0, "b": 2}.get(response) else "I cannot say"

    [[a, b, c]] = scored(answering(reply), request("p", "t", "a", "b", "c"), judge_temperature=0.7, max_retries=2)
    assert (a.score, a.metrics["retries"], b.score, b.metrics["retries"]) == (1.0, 0.0, 1.0, 2.0)
    assert (c.score, c.reason) == (None, "raised")
    assert c.detail.endswith("has no match of grade_pattern: 'I cannot say' (after 2 repeated requests)")
    assert attempts == [("a", 0), ("b", 0), ("c", 0), ("b", 1), ("c", 1), ("b", 2), ("c", 2)]


def test_without_temperature_the_same_answer_is_not_asked_for_again() -> None:
    asked: list[int] = []
    [[outcome]] = scored(answering(lambda question: asked.append(question.attempt) or "no"), request("p", "t", "a"))
    assert (outcome.score, outcome.reason, asked) == (None, "raised", [0])


def test_an_answer_that_an_engine_failed_to_give_is_a_failure_of_its_sample_alone() -> None:
    async def ask(questions: Sequence[JudgeQuestion]) -> list[JudgeAnswer]:
        good = JudgeAnswer(tuple(map(ord, "Grade: 10")))
        return [JudgeAnswer((), "too slow") if text_of(each).endswith("b") else good for each in questions]

    [[a, b]] = scored(ask, request("p", "t", "a", "b"), judge_temperature=1.0)
    assert (a.score, b.score, b.reason) == (1.0, None, "raised")
    assert b.detail == "the judge gave no answer: too slow"


def test_a_question_that_leaves_no_room_for_the_answer_is_a_failure_and_is_not_asked() -> None:
    def reply(question: JudgeQuestion) -> str:
        assert len(question.prompt_ids) + question.max_new_tokens <= 16
        return "Grade: 10"

    [[short, long]] = scored(answering(reply), request("p", "t", "ab", "abc"), max_tokens=16)
    assert (short.score, long.score, long.reason) == (1.0, None, "too_long")
    assert long.detail == "7 tokens of the question and judge_max_tokens 10; the judge has 16"


def test_closing_cancels_calls_that_run() -> None:
    async def ask(questions: Sequence[JudgeQuestion]) -> list[JudgeAnswer]:
        await asyncio.sleep(60)
        return []

    async def scenario() -> None:
        reward = RewardConfig(function=BUILT_IN["llm_judge"].function, template="none")
        scorer = JudgeModelScorer(Tokenizer(), reward)  # type: ignore[arg-type]
        scorer.connect(ask)
        running = asyncio.ensure_future(scorer.score([request("p", "t", "a")]))
        while not scorer._running:
            await asyncio.sleep(0.001)
        scorer.close()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(running, PATIENCE_S)

    asyncio.run(scenario())

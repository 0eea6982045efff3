"""Scores of a reward model: what it is given, calls of many responses, and failures."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence

import pytest

from roll.datasets.prompts import Question
from roll.datasets.records import DatasetError
from roll.rewards.calling import RewardOutcome, RewardRequest
from roll.rewards.reward_model import RewardModelScorer
from tests.processes import PATIENCE_S


class Tokenizer:
    """One token for each character; 0 ends a response; adds no token at the start of a text."""

    chat_template = None
    eos_token_id = 0

    def get_vocab(self) -> dict[str, int]:
        return {}

    def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(character) for character in text] for text in texts]}


def scorer(
    score: Callable[[Sequence[Sequence[int]]], Awaitable[Sequence[float | str]]], max_tokens: int | None = None
) -> RewardModelScorer:
    made = RewardModelScorer(Tokenizer(), "none", max_tokens)  # type: ignore[arg-type]
    made.connect(score)
    return made


def request(prompt: str, *responses: str) -> RewardRequest:
    return RewardRequest(responses, "", Question(text=prompt))


async def lengths(sequences: Sequence[Sequence[int]]) -> list[float]:
    return [float(len(sequence)) for sequence in sequences]


def test_the_model_reads_prompt_response_and_end_token() -> None:
    seen: list[list[int]] = []

    async def score(sequences: Sequence[Sequence[int]]) -> list[float]:
        seen.extend(map(list, sequences))
        return await lengths(sequences)

    outcomes = asyncio.run(scorer(score).score([request("ab", "c", ""), request("d", "efg")]))
    assert seen == [[97, 98, 99, 0], [97, 98, 0], [100, 101, 102, 103, 0]]
    assert outcomes == [[RewardOutcome(4.0), RewardOutcome(3.0)], [RewardOutcome(5.0)]]


def test_a_response_that_no_engine_scored_fails_with_the_error_and_the_others_have_scores() -> None:
    async def score(sequences: Sequence[Sequence[int]]) -> list[float | str]:
        return ["no answer within 1 s" if len(each) == 3 else 2.0 for each in sequences]

    ((first, second),) = asyncio.run(scorer(score).score([request("a", "bc", "d")]))
    assert first == RewardOutcome(2.0)
    assert second == RewardOutcome(None, "raised", "the reward model gave no score: no answer within 1 s")


def test_responses_that_arrive_meanwhile_are_scored_together_in_the_next_call() -> None:
    calls: list[int] = []

    async def scenario() -> list[list[list[RewardOutcome]]]:
        first_runs, may_end = asyncio.Event(), asyncio.Event()

        async def score(sequences: Sequence[Sequence[int]]) -> list[float]:
            calls.append(len(sequences))
            first_runs.set()
            await may_end.wait()
            return await lengths(sequences)

        made = scorer(score)
        running = [asyncio.ensure_future(made.score([request("a", "b")]))]
        await first_runs.wait()
        running += [asyncio.ensure_future(made.score([request("a", "b" * count)])) for count in range(2, 9)]
        while len(made._waiting) < 7:
            await asyncio.sleep(0.001)
        may_end.set()
        return await asyncio.gather(*running)

    outcomes = asyncio.run(scenario())
    assert calls == [1, 7]
    assert outcomes == [[[RewardOutcome(2.0 + count)]] for count in range(1, 9)]


def test_a_model_that_takes_several_calls_lets_none_wait_for_a_slow_one() -> None:
    async def scenario() -> None:
        slow_runs, may_end = asyncio.Event(), asyncio.Event()

        async def score(sequences: Sequence[Sequence[int]]) -> list[float]:
            if 120 in sequences[0]:
                slow_runs.set()
                await may_end.wait()
            return await lengths(sequences)

        made = scorer(score)
        made.connect(score, concurrent=True)
        slow = asyncio.ensure_future(made.score([request("a", "x")]))
        await slow_runs.wait()
        assert await asyncio.wait_for(made.score([request("a", "bc")]), PATIENCE_S) == [[RewardOutcome(4.0)]]
        assert not slow.done()
        may_end.set()
        assert await slow == [[RewardOutcome(3.0)]]
        again = asyncio.ensure_future(made.score([request("a", "x")]))
        slow_runs.clear()
        may_end.clear()
        await slow_runs.wait()
        made.close()
        with pytest.raises(asyncio.CancelledError):
            await again
        assert not made._waiting

    asyncio.run(scenario())


@pytest.mark.parametrize("bad", [math.nan, -1e20])
def test_a_score_that_is_no_number_and_a_text_too_long_are_failures_of_their_sample_alone(bad: float) -> None:
    async def score(sequences: Sequence[Sequence[int]]) -> list[float]:
        assert all(len(sequence) <= 5 for sequence in sequences)
        return [bad if 110 in sequence else 1.0 for sequence in sequences]

    [[good, nan], [long, other]] = asyncio.run(
        scorer(score, max_tokens=5).score([request("a", "b", "n"), request("a", "bcde", "bcd")])
    )
    assert (good.score, nan.reason, long.reason, other.score) == (1.0, "not_finite", "too_long", 1.0)
    assert long.detail == "6 tokens of prompt and response; the reward model reads 5"


def test_a_call_that_fails_raises_in_all_that_waited_for_it_and_the_next_is_tried() -> None:
    fails = [True, False]

    async def score(sequences: Sequence[Sequence[int]]) -> list[float]:
        await asyncio.sleep(0)
        if fails.pop(0):
            raise RuntimeError("rank 1 died")
        return await lengths(sequences)

    async def scenario() -> None:
        made = scorer(score)
        with pytest.raises(RuntimeError, match="rank 1 died"):
            await made.score([request("a", "b")])
        assert await made.score([request("a", "b")]) == [[RewardOutcome(3.0)]]

    asyncio.run(scenario())


def test_too_few_scores_are_an_error_and_no_endless_wait() -> None:
    async def score(sequences: Sequence[Sequence[int]]) -> list[float]:
        return [1.0]

    async def scenario() -> None:
        with pytest.raises(ValueError, match="fewer scores"):
            await asyncio.wait_for(scorer(score).score([request("a", "b", "c")]), PATIENCE_S)

    asyncio.run(scenario())


def test_a_template_that_cannot_read_the_prompts_is_found_before_a_score() -> None:
    made = RewardModelScorer(Tokenizer(), "none")  # type: ignore[arg-type]
    made.check([Question(text="a")])
    with pytest.raises(DatasetError, match="'none' needs a text"):
        made.check([Question(text="a"), Question(messages=({"role": "user", "content": "a"},))])


def test_closing_cancels_calls_that_run() -> None:
    async def score(sequences: Sequence[Sequence[int]]) -> list[float]:
        await asyncio.sleep(60)
        return []

    async def scenario() -> None:
        made = scorer(score)
        running = asyncio.ensure_future(made.score([request("a", "b")]))
        while not made._running:
            await asyncio.sleep(0.001)
        made.close()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(running, PATIENCE_S)

    asyncio.run(scenario())

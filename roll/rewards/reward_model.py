"""The reward reward_model: responses are scored by the model of role `reward`, in calls of many at a time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from roll.configs.scoring.rewards import is_trainable
from roll.datasets.prompts import Question
from roll.datasets.templates import PromptEncoder
from roll.rewards.calling import RewardOutcome, RewardRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ScoreSequences = Callable[[Sequence[Sequence[int]]], Awaitable[Sequence[float | str]]]
"""The score of each sequence of token ids under the reward model, or the error by which an engine gave none."""


class RewardModelScorer:
    """Scores responses as a `RewardPool` does, with a model instead of a function.

    A prompt and a response are encoded as pipeline reward_model encodes them in training: by the tokenizer and the chat
    template of the reward model, with its end token, also where a response was cut at its longest. Responses that
    arrive while the model computes are scored together in its next call, or at once by a model that takes several calls
    at a time. Use a scorer from one asyncio loop.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str,
        max_tokens: int | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """Scores nothing before `connect` gives it the model; a sequence longer than `max_tokens` has no score.

        Raises:
            DatasetError: the tokenizer lacks the template.
        """
        self._encoder, self._end = PromptEncoder(tokenizer, template, variables), tokenizer.eos_token_id
        self._max_tokens = max_tokens
        self._model: ScoreSequences | None = None
        self._waiting: list[tuple[list[list[int]], asyncio.Future[list[float | str]]]] = []
        self._concurrent = False
        self._running: set[asyncio.Task[None]] = set()

    def connect(self, score: ScoreSequences, concurrent: bool = False) -> None:
        self._model, self._concurrent = score, concurrent

    def launch(self) -> None:
        """Does nothing: the model runs already."""

    def close(self) -> None:
        """Cancels running `score` calls."""
        for call in self._running:
            call.cancel()
        for _, future in self._waiting:
            future.cancel()

    async def score(self, requests: Sequence[RewardRequest]) -> list[list[RewardOutcome]]:
        """Scores every response of every request; the outcomes of each request, in order.

        Raises:
            ClusterError: the model failed or did not answer in time.
        """
        sequences = await asyncio.to_thread(self._encode, requests)
        fitting = [each for each in sequences if self._max_tokens is None or len(each) <= self._max_tokens]
        scores = iter(await self._scores(fitting) if fitting else [])
        outcomes = iter([self._outcome(each, scores) for each in sequences])
        return [[next(outcomes) for _ in request.responses] for request in requests]

    def check(self, questions: Sequence[Question]) -> None:
        """Encodes prompts as for a score.

        Raises:
            DatasetError: the template cannot be applied to one of them.
        """
        self._encoder.encode(questions)

    def _encode(self, requests: Sequence[RewardRequest]) -> list[list[int]]:
        prompts = self._encoder.encode([request.question for request in requests])
        responses = iter(self._encoder.encode_text([text for request in requests for text in request.responses]))
        return [
            [*prompt, *next(responses), self._end]
            for prompt, request in zip(prompts, requests, strict=True)
            for _ in request.responses
        ]

    def _outcome(self, sequence: Sequence[int], scores: Iterator[float | str]) -> RewardOutcome:
        if self._max_tokens is not None and len(sequence) > self._max_tokens:
            text = f"{len(sequence)} tokens of prompt and response; the reward model reads {self._max_tokens}"
            return RewardOutcome(None, "too_long", text)
        score = next(scores)
        if isinstance(score, str):  # the engines have repeated the request already
            return RewardOutcome(None, "raised", f"the reward model gave no score: {score}")
        if not is_trainable(score):
            return RewardOutcome(None, "not_finite", f"the reward model gave {score}")
        return RewardOutcome(score)

    async def _scores(self, sequences: list[list[int]]) -> list[float | str]:
        future: asyncio.Future[list[float | str]] = asyncio.get_running_loop().create_future()
        self._waiting.append((sequences, future))
        if self._concurrent or all(call.done() for call in self._running):
            call = asyncio.create_task(self._score_waiting())
            self._running.add(call)
            call.add_done_callback(self._running.discard)
        return await future

    async def _score_waiting(self) -> None:
        """One call of the model for all that wait, until none does."""
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            try:
                assert self._model is not None, "connect comes first"
                scores = iter(await self._model([each for sequences, _ in waiting for each in sequences]))
                shares = [list(itertools.islice(scores, len(sequences))) for sequences, _ in waiting]
                if sum(map(len, shares)) < sum(len(sequences) for sequences, _ in waiting):
                    raise ValueError("the reward model gave fewer scores than it was given sequences")
            except asyncio.CancelledError:
                for _, future in waiting:
                    future.cancel()
                raise
            except Exception as error:
                for _, future in waiting:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), own in zip(waiting, shares, strict=True):
                if not future.done():
                    future.set_result(own)

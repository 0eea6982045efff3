"""The experts of a trajectory are those of the passes that sampled it, whatever the engine computes once more."""

from __future__ import annotations

import base64
import random
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.distributed.infer.sglang_generation import _rest, joined, read_routing
from roll.rollout.types import GenerateRequest, GenerateResult, SamplingParams, Trajectory, missing_routing


class RecordingEngine:
    """Computes rows by number: each forward pass of a token gets the next one, and a cached token keeps its own."""

    def __init__(self, choice: random.Random) -> None:
        self.choice, self.passes = choice, 0
        self.cache: dict[tuple[int, ...], int] = {}
        self.sampled: dict[tuple[int, ...], int] = {}
        """Beginning of a sequence -> the pass that the next token was sampled in, or that a response read first."""

    def compute(self, ids: tuple[int, ...], samples: bool = True) -> None:
        if ids not in self.cache:
            self.cache[ids], self.passes = self.passes, self.passes + 1
        if samples:
            self.sampled.setdefault(ids, self.cache[ids])

    def answer(self, request: GenerateRequest, tokens: int, abort: bool) -> GenerateResult:
        """`tokens` more; the cache of the prompt may have been lost before."""
        if self.choice.random() < 0.5:
            self.cache.clear()
        ids, response = tuple(request.prompt_ids), []
        for end in range(1, len(ids) + 1):
            self.compute(ids[:end], samples=tokens > 0)
        for number in range(tokens):
            response.append(self.choice.randrange(1000))
            ids = (*ids, response[-1])
            if number < tokens - 1:
                self.compute(ids)
        rows = [self.cache[ids[: end + 1]] for end in range(request.routed, len(ids) - 1)]
        routing = np.array(rows, np.int32).reshape(-1, 1, 1) if response else None
        reason = "abort" if abort else "length"
        return GenerateResult(
            request.request_id, response, [-1.0] * tokens, [0] * tokens, reason, routing=routing
        )  # fmt: skip


TURNS = st.lists(st.tuples(st.integers(1, 4), st.lists(st.integers(0, 3), max_size=4)), min_size=1, max_size=4)
"""Tokens of the context before each response, and of each part of it that is interrupted."""


@settings(max_examples=300, deadline=None)
@given(TURNS, st.integers())
def test_interleavings_of_pauses_continuations_prefixes_and_turns(
    turns: list[tuple[int, list[int]]], seed: int
) -> None:
    """Each turn has new context and a response in parts; all but the last are interrupted, some before any token."""
    choice = random.Random(seed)
    engine, trajectory = RecordingEngine(choice), Trajectory()
    for context, parts in turns:
        trajectory.add_context([choice.randrange(1000) for _ in range(context)])
        routed = 0 if trajectory.routing is None or choice.random() < 0.3 else len(trajectory.routing)
        request = GenerateRequest("r", list(trajectory.ids), SamplingParams(100, routing=True), routed=routed)
        whole: GenerateResult | None = None
        for number, tokens in enumerate([*parts, 2]):
            rest = request if whole is None else _rest(request, whole)
            part = engine.answer(rest, tokens, abort=number < len(parts))
            whole = part if whole is None else joined(whole, part)
        assert whole is not None and missing_routing(request, whole) is None
        trajectory.add_response(request.prompt_ids, whole, "", "")
    ids = tuple(trajectory.ids)
    expected = [engine.sampled[ids[: end + 1]] for end in range(len(ids) - 1)]
    assert trajectory.routing is not None and trajectory.routing[:, 0, 0].tolist() == expected
    assert (Trajectory.from_state(trajectory.state_dict()).routing == trajectory.routing).all()


def test_a_part_without_its_rows_is_not_covered_by_a_later_one() -> None:
    engine = RecordingEngine(random.Random(0))
    request = GenerateRequest("r", [1, 2, 3], SamplingParams(100, routing=True))
    first = replace(engine.answer(request, 3, abort=True), routing=None)
    second = engine.answer(_rest(request, first), 2, abort=False)
    assert missing_routing(request, joined(first, second)) == "r: the engine returned the experts of 2 tokens, not of 7"
    assert missing_routing(replace(request, sampling=SamplingParams(1)), first) is None


def test_ids_are_as_small_as_they_can_be() -> None:
    for largest, kind in ((255, np.uint8), (256, np.int16), (-1, np.int16)):
        ids = np.array([[0, 1], [2, largest]], np.int32)
        found = read_routing(base64.b64encode(ids.tobytes()).decode(), 1, 2)
        assert found.dtype == kind and found.tolist() == [[[0, 1]], [[2, largest]]]

"""Requests in SGLang's terms, and results from its replies."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, cast

import pytest

from roll.distributed.infer.sglang_engine import EngineError
from roll.distributed.infer.sglang_generation import (
    Generation,
    completed,
    joined,
    refused,
    to_result,
    token_versions,
)
from roll.distributed.infer.sglang_requests import sampling_parameters
from roll.rollout.types import GenerateRequest, GenerateResult, SamplingParams

REQUEST = GenerateRequest("r", [1, 2], SamplingParams(4))


def reply(reason: dict, rows: int = 3) -> dict:
    return {
        "output_ids": [5, 6, 7],
        "meta_info": {
            "finish_reason": reason,
            "output_token_logprobs": [(-1.0, token, None) for token in [5, 6, 7][:rows]],
            "weight_versions": [{"version": "1", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}],
            "cached_tokens": 1,
        },
    }


def test_versions_follow_the_spans():
    spans = [{"version": "0", "start": 0, "end": 2}, {"version": "3", "start": 2, "end": 5}]
    assert token_versions(spans, 5) == [0, 0, 3, 3, 3]


def test_a_sample():
    result = to_result(REQUEST, reply({"type": "stop", "matched": 7}), None)
    assert (result.response_ids, result.log_probs, result.versions) == ([5, 6, 7], [-1.0, -1.0, -1.0], [1, 1, 4])
    assert (result.finish_reason, result.cached_prompt_tokens, result.error) == ("stop", 1, None)


MASKED = GenerateRequest("r", [1, 2], SamplingParams(4, top_k=2, sampling_mask=True))


def test_a_truncated_sample_has_the_log_probs_and_ids_of_the_kept_tokens():
    answer = reply({"type": "stop", "matched": 7})
    masks = [[5, 1], [6], [7, 2]]
    answer["meta_info"] |= {"output_token_sampling_mask": masks, "output_token_sampling_logprobs": [-0.5, 0.0, -0.2]}
    result = to_result(MASKED, answer, None)
    assert (result.sampling_mask, result.log_probs) == (masks, [-0.5, 0.0, -0.2])
    both = joined(result, result)
    assert (both.sampling_mask, both.log_probs) == (2 * masks, 2 * [-0.5, 0.0, -0.2])
    with pytest.raises(EngineError, match="3 versions and 0 sampling masks"):
        to_result(MASKED, reply({"type": "stop", "matched": 7}), None)


def test_an_aborted_request_keeps_its_tokens_and_its_reason():
    result = to_result(REQUEST, reply({"type": "abort", "message": "too long"}), None)
    assert (result.finish_reason, result.error, result.response_ids) == ("abort", "too long", [5, 6, 7])


def test_an_expired_request_is_an_abort_even_if_it_finished_meanwhile():
    assert to_result(REQUEST, reply({"type": "length"}), "aborted after 1 s").finish_reason == "abort"
    assert to_result(REQUEST, None, "aborted after 1 s").response_ids == []


def cut_after_three(max_new_tokens: int, stop_token_ids: set[int]) -> tuple[str, str | None]:
    result = to_result(REQUEST, reply({"type": "abort", "message": "cut"}), None)
    end = completed(GenerateRequest("r", [1, 2], SamplingParams(max_new_tokens)), result, stop_token_ids)
    assert end.response_ids == result.response_ids
    return end.finish_reason, end.error


def test_a_response_interrupted_at_its_last_token_is_finished():
    assert cut_after_three(4, {7}) == cut_after_three(3, {7}) == ("stop", None)
    assert cut_after_three(3, {9}) == ("length", None)
    assert cut_after_three(4, {5, 9}) == ("abort", "cut")


def test_tokens_without_log_probs_are_an_error():
    with pytest.raises(EngineError, match="request r: 3 tokens came with 2 log-probs, 3 versions"):
        to_result(REQUEST, reply({"type": "length"}, rows=2), None)


def test_no_top_k_is_minus_one_in_sglang():
    parameters = sampling_parameters(SamplingParams(4, temperature=0.7, stop_token_ids=(2,)))
    assert (parameters["top_k"], parameters["stop_token_ids"]) == (-1, [2])
    assert sampling_parameters(SamplingParams(4, top_k=5))["top_k"] == 5


def test_a_request_that_the_scheduler_refuses_has_its_reason():
    refusal = reply({"type": "abort", "message": "Input length (9) exceeds 5", "status_code": 400})
    assert refused(refusal) == "Input length (9) exceeds 5"
    assert refused(reply({"type": "abort", "message": "aborted"})) is None
    assert refused(reply({"type": "length"})) is None


class WithoutEngine(Generation):
    """Answers a request when the test says so."""

    def __init__(self, newer: int | None) -> None:
        super().__init__(cast(Any, SimpleNamespace()), 60, False, running=4, newer=newer, ahead=1, version=lambda: 9)
        self.started: list[str] = []
        self.ended: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def _answer(self, request: GenerateRequest, name: str) -> GenerateResult:
        self.started.append(request.request_id)
        await self.ended[request.request_id].wait()
        return GenerateResult(request.request_id, [7], [-1.0], [0], "stop")

    async def ask(self, name: str, version: int | None) -> asyncio.Task[list[GenerateResult]]:
        request = GenerateRequest(name, [1], SamplingParams(4), version=version)
        task = asyncio.create_task(self.generate([request]))
        await settled()
        return task


async def settled() -> None:
    """Lets every task go as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_newer_request_starts_when_the_older_ones_have_ended():
    async def run() -> None:
        generation = WithoutEngine(newer=0)
        tasks = [await generation.ask(*each) for each in (("old", 1), ("new", 2), ("older", 0), ("validation", None))]
        assert generation.started == ["old", "older", "validation"]
        for name in ("old", "older"):
            generation.ended[name].set()
        await settled()
        assert "new" not in generation.started, "a request of validation still runs"
        for name in ("validation", "new"):
            generation.ended[name].set()
        assert [result.request_id for [result] in await asyncio.gather(*tasks)] == ["old", "new", "older", "validation"]

    asyncio.run(run())


@pytest.mark.parametrize("name", ["runs", "waits"])
def test_a_cancelled_request_leaves_its_place_to_the_next(name):
    async def run() -> None:
        generation = WithoutEngine(newer=0)
        tasks = {each: await generation.ask(each, version) for version, each in enumerate(("runs", "waits", "next"))}
        tasks[name].cancel()
        generation.ended["runs"].set()
        await settled()
        if name == "runs":
            assert generation.started == ["runs", "waits"]
            generation.ended["waits"].set()
            await settled()
        assert generation.started[-1] == "next"
        assert ("waits" in generation.started) == (name == "runs")
        generation.ended["next"].set()
        answers = await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert [isinstance(answer, asyncio.CancelledError) for answer in answers].count(True) == 1
        assert isinstance(answers[list(tasks).index(name)], asyncio.CancelledError)

    asyncio.run(run())


def test_a_request_that_is_cancelled_as_it_gets_its_place_returns_it():
    async def run() -> None:
        generation = WithoutEngine(newer=0)
        tasks = {name: await generation.ask(name, at) for at, name in enumerate(("first", "second", "third"))}
        generation._order._newer = None
        generation._start_next()
        tasks["second"].cancel()
        await settled()
        assert generation.started == ["first", "third"]
        assert generation._order._running == {0: 1, 2: 1}
        for name in ("first", "third"):
            generation.ended[name].set()
        await asyncio.gather(tasks["first"], tasks["third"])
        assert not generation._order._running

    asyncio.run(run())


class InParts(Generation):
    """Its responses come in parts, between which a pause interrupts them; the text of a token is its character."""

    def __init__(self, *parts: str) -> None:
        super().__init__(cast(Any, SimpleNamespace()), 60, False, running=4, newer=None, ahead=1, version=lambda: 9)
        self._decode = lambda ids: "".join(map(chr, ids))
        self.parts, self.rests = list(parts), list[GenerateRequest]()

    async def _attempt(
        self, request: GenerateRequest, name: str, timeout_s: float, adapter: Any = None
    ) -> tuple[GenerateResult, bool]:
        self.rests.append(request)
        ids, number = [*map(ord, self.parts.pop(0))], len(self.rests)
        log_probs = [-float(number)] * len(ids)
        interrupted = bool(self.parts)
        reason, error = ("abort", "cut") if interrupted else ("length", None)
        return GenerateResult("r", ids, log_probs, [number] * len(ids), cast(Any, reason), error=error), interrupted


@pytest.mark.parametrize(
    ("parts", "stops", "kept"),
    [
        (["say </ans", "wer> and more"], ["</answer>"], ["say </ans", "wer>"]),
        (["say </answer>", "more"], ["</answer>"], ["say </answer>"]),
        (["ab", "cd", "ef"], ["bcde"], ["ab", "cd", "e"]),
        (["ab", "cd"], ["x"], ["ab", "cd"]),
    ],
)
def test_a_stop_string_is_found_across_the_parts_of_a_response(parts, stops, kept):
    generation = InParts(*parts)
    request = GenerateRequest("r", [1], SamplingParams(99, stop_strings=tuple(stops)))
    [result] = asyncio.run(generation.generate([request]))
    assert result.response_ids == [*map(ord, "".join(kept))]
    assert result.versions == [number for number, part in enumerate(kept, 1) for _ in part]
    assert result.log_probs == [-float(number) for number in result.versions]
    assert (result.finish_reason, result.error) == ("length" if stops == ["x"] else "stop", None)
    assert len(generation.rests) == len(kept), "nothing is asked for after the end"

"""Load balancing over engines: even load, groups on one engine, and retries of failed requests on another."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.rollout import engine_pool
from roll.rollout.engine_pool import Balancer, EngineDownError, EnginePool
from roll.rollout.types import GenerateRequest, GenerateResult, SamplingParams
from tests.processes import PATIENCE_S


class FaultyEngines:
    """Answers with the request's own ids; every (engine, request) pair in `broken` aborts."""

    def __init__(self, engines: int, broken: set[tuple[int, str]]) -> None:
        self.world_size = engines
        self.broken = broken
        self.attempts: Counter[str] = Counter()
        self.running: Counter[int] = Counter()
        self.most: Counter[int] = Counter()
        self.seconds = 0.0

    async def generate(self, rank: int, requests: list[GenerateRequest]) -> list[GenerateResult]:
        assert requests
        self.running[rank] += len(requests)
        self.most[rank] = max(self.most[rank], self.running[rank])
        await asyncio.sleep(self.seconds)
        self.running[rank] -= len(requests)
        return [self.answer(rank, request) for request in requests]

    async def is_serving(self, rank: int) -> bool:
        return True

    def answer(self, engine: int, request: GenerateRequest) -> GenerateResult:
        self.attempts[request.request_id] += 1
        if (engine, request.request_id) in self.broken:
            return GenerateResult(request.request_id, [], [], [], "abort", error="out of memory")
        return GenerateResult(request.request_id, request.prompt_ids, [0.0], [0], "stop")


def groups_of(sizes: list[int]) -> list[list[GenerateRequest]]:
    sampling = SamplingParams(max_new_tokens=1)
    return [[GenerateRequest(f"{g}-{i}", [g, i], sampling) for i in range(n)] for g, n in enumerate(sizes)]


def generate(engines: FaultyEngines, retries: int, sizes: list[int]) -> list[list[GenerateResult]]:
    return asyncio.run(EnginePool(engines, retries, max_running=4).generate(groups_of(sizes)))


@given(st.lists(st.integers(0, 8), max_size=30), st.integers(1, 5))
def test_results_are_in_the_order_of_the_requests(sizes, engines):
    answers = generate(FaultyEngines(engines, set()), 0, sizes)
    assert [[a.response_ids for a in group] for group in answers] == [
        [[g, i] for i in range(n)] for g, n in enumerate(sizes)
    ]


@given(st.lists(st.integers(1, 8), min_size=1, max_size=50), st.integers(1, 5))
def test_no_engine_holds_more_than_one_group_above_another(sizes, engines):
    faultless = FaultyEngines(engines, set())
    generate(faultless, 0, sizes)
    loads = [faultless.most[engine] for engine in range(engines)]
    assert max(loads) - min(loads) <= max(sizes)


def test_groups_sent_one_by_one_go_to_the_least_loaded_engine_and_wait_for_room():
    engines = FaultyEngines(2, set())
    engines.seconds = 0.001

    async def one_by_one() -> None:
        pool = EnginePool(engines, 0, max_running=4)
        await asyncio.gather(*(pool.generate([group]) for group in groups_of([2] * 40)))

    asyncio.run(one_by_one())
    assert sum(engines.attempts.values()) == 80
    assert engines.most == {0: 8, 1: 8}


def test_a_failed_request_is_retried_on_the_next_engine():
    engines = FaultyEngines(2, {(0, "0-0")})
    (group,) = generate(engines, 1, [2])
    assert [answer.finish_reason for answer in group] == ["stop", "stop"]
    assert [answer.request_id for answer in group] == ["0-0", "0-1"]
    assert engines.attempts == {"0-0": 2, "0-1": 1}


def test_the_load_of_a_retry_counts_on_its_engine_and_is_removed_after_it():
    engines = FaultyEngines(3, {(0, "0-0"), (1, "0-0")})
    engines.seconds = 0.01
    pool = EnginePool(engines, 2, max_running=4)
    seen = []

    async def watched(rank, requests, generate=engines.generate):
        seen.append((rank, [pool._balancer.outstanding(engine) for engine in range(3)]))
        return await generate(rank, requests)

    engines.generate = watched
    asyncio.run(pool.generate(groups_of([2])))
    assert seen == [(0, [6, 0, 0]), (1, [0, 3, 0]), (2, [0, 0, 3])]
    assert [pool._balancer.outstanding(engine) for engine in range(3)] == [0, 0, 0]


def test_a_request_that_always_fails_is_returned_with_its_error_after_the_retries():
    engines = FaultyEngines(1, {(0, "0-1")})
    (group,) = generate(engines, 2, [2])
    assert [answer.finish_reason for answer in group] == ["stop", "abort"]
    assert group[1].error == "out of memory"
    assert sum(count for name, count in engines.attempts.items() if name.startswith("0-1")) == 3


def test_the_engine_with_the_fewest_tokens_comes_first_and_the_lowest_number_among_equals() -> None:
    balancer = Balancer(3)
    chosen = []
    for tokens in (10, 4, 4, 5, 1):
        chosen.append(balancer.choose())
        balancer.add(chosen[-1], tokens)
    assert chosen == [0, 1, 2, 1, 2]
    balancer.remove(0, 10)
    assert balancer.choose() == 0


def test_more_tokens_than_outstanding_cannot_be_removed() -> None:
    balancer = Balancer(1)
    balancer.add(0, 3)
    with pytest.raises(ValueError, match="engine 0 has 3 tokens outstanding; 4 cannot end"):
        balancer.remove(0, 4)


@pytest.mark.parametrize("engines", [1, 2, 5, 13])
def test_the_tree_chooses_as_a_search_over_all_engines(engines: int) -> None:
    draw, balancer, loads = random.Random(engines), Balancer(engines), [0] * engines
    for _ in range(3000):
        engine, tokens = draw.randrange(engines), draw.randrange(9)
        event = draw.choice(("add", "add", "remove"))
        if event == "add":
            balancer.add(engine, tokens)
            loads[engine] += tokens
        else:
            balancer.remove(engine, min(tokens, loads[engine]))
            loads[engine] -= min(tokens, loads[engine])
        assert balancer.choose() == min((load, i) for i, load in enumerate(loads))[1]


class DyingEngines(FaultyEngines):
    """Engine r dies in its call number n for each (r, n) of `deaths`, and serves after it was asked twice."""

    def __init__(self, engines: int, deaths: set[tuple[int, int]]) -> None:
        super().__init__(engines, set())
        self.deaths, self.calls, self.asked = deaths, Counter(), Counter()
        self.down: set[int] = set()
        self.lost = 0

    async def generate(self, rank: int, requests: list[GenerateRequest]) -> list[GenerateResult]:
        self.calls[rank] += 1
        await asyncio.sleep(0)
        if (rank, self.calls[rank]) in self.deaths:
            self.down.add(rank)
        if rank in self.down:
            self.lost += len(requests)
            raise EngineDownError(f"engine {rank} died")
        return await super().generate(rank, requests)

    async def is_serving(self, rank: int) -> bool:
        self.asked[rank] += 1
        if self.asked[rank] % 3 == 0:
            self.down.discard(rank)
        return rank not in self.down


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=20),
    st.integers(1, 4),
    st.sets(st.tuples(st.integers(0, 3), st.integers(1, 5))),
)
def test_every_request_is_answered_once_whatever_engines_die(sizes, engines, deaths):
    dying = DyingEngines(engines, deaths)

    async def run() -> list[list[GenerateResult]]:
        pool = EnginePool(dying, 0, max_running=2, restarted=True)
        calls = [pool.generate([group]) for group in groups_of(sizes)]
        answers = [answer for call in await asyncio.gather(*calls) for answer in call]
        again = await pool.generate(groups_of(sizes))
        assert [pool._balancer.outstanding(engine) for engine in range(engines)] == [0] * engines
        assert pool.reissued == dying.lost
        return [*answers, *again]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_pool, "POLL_S", 0)
        answers = asyncio.run(run())
    expected = [[[g, i] for i in range(n)] for g, n in enumerate(sizes)]
    assert [[answer.response_ids for answer in group] for group in answers] == expected * 2
    assert {*dying.attempts.values()} == {2}


def test_the_death_of_an_engine_that_is_not_restarted_is_an_error():
    with pytest.raises(EngineDownError, match="engine 0 died"):
        asyncio.run(EnginePool(DyingEngines(2, {(0, 1)}), 3, max_running=4).generate(groups_of([2, 2])))


def test_an_engine_that_could_not_be_asked_is_asked_again(monkeypatch, caplog):
    monkeypatch.setattr(engine_pool, "POLL_S", 0)
    engines = DyingEngines(1, {(0, 1)})

    async def asked(rank: int, answer=engines.is_serving) -> bool:
        serving = await answer(rank)
        if engines.asked[rank] < 3:
            raise RuntimeError("half of an answer")
        return serving

    monkeypatch.setattr(engines, "is_serving", asked)

    async def run() -> list[list[GenerateResult]]:
        pool = EnginePool(engines, 0, max_running=4, restarted=True)
        return await asyncio.wait_for(pool.generate(groups_of([2])), PATIENCE_S)

    (group,) = asyncio.run(run())
    assert [answer.finish_reason for answer in group] == ["stop", "stop"]
    assert caplog.text.count("RuntimeError: half of an answer") == 1, "it is logged once"


def test_conversations_are_counted_while_they_run():
    pool = EnginePool(FaultyEngines(2, set()), 0, max_running=4)
    with pool.assign_engine() as first:
        with pool.assign_engine(first), pool.assign_engine() as other:
            assert (first, other) == (0, 1)
            with pool.assign_engine() as third:
                assert third == 1, "engine 0 has two conversations"
        with pool.assign_engine() as fourth:
            assert fourth == 1
    with pool.assign_engine() as fifth:
        assert fifth == 0


def test_a_conversation_whose_engine_died_goes_on_with_another(monkeypatch):
    engines = DyingEngines(2, {(0, 1)})

    async def never(rank: int) -> bool:
        return False

    monkeypatch.setattr(engines, "is_serving", never)

    async def run() -> None:
        pool = EnginePool(engines, 0, max_running=4, restarted=True)
        with pool.assign_engine() as engine:
            await pool.generate(groups_of([1]), engine)
            await pool.generate(groups_of([1]), engine)
            assert engine == 0 and engines.calls == {0: 1, 1: 2}
        with pool.assign_engine() as engine:
            assert engine == 1
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "an idle pool polls"

    asyncio.run(run())

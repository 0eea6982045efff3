from __future__ import annotations

import random

import pytest

from roll.rollout.balance import Balancer, NoEngine


def test_the_engine_with_the_fewest_tokens_comes_first_and_the_lowest_number_among_equals() -> None:
    balancer = Balancer(3)
    chosen = []
    for tokens in (10, 4, 4, 5, 1):
        chosen.append(balancer.choose())
        balancer.add(chosen[-1], tokens)
    assert chosen == [0, 1, 2, 1, 2]
    balancer.remove(0, 10)
    assert balancer.choose() == 0


def test_an_excluded_engine_gets_nothing_and_keeps_its_account() -> None:
    balancer = Balancer(2)
    balancer.add(0, 3)
    balancer.exclude(1)
    assert balancer.choose() == 0
    balancer.exclude(0)
    with pytest.raises(NoEngine, match="none of 2 engines"):
        balancer.choose()
    balancer.include(0)
    assert balancer.choose() == 0 and balancer.outstanding(0) == 3


def test_tokens_that_are_not_outstanding_cannot_end() -> None:
    balancer = Balancer(1)
    balancer.add(0, 3)
    with pytest.raises(ValueError, match="engine 0 has 3 tokens outstanding; 4 cannot end"):
        balancer.remove(0, 4)


@pytest.mark.parametrize("engines", [1, 2, 5, 13])
def test_it_chooses_as_a_search_over_all_engines_would(engines: int) -> None:
    draw, balancer, loads, out = random.Random(engines), Balancer(engines), [0] * engines, set()
    for _ in range(3000):
        engine, tokens = draw.randrange(engines), draw.randrange(9)
        event = draw.choice(("add", "add", "remove", "exclude", "include"))
        if event == "add":
            balancer.add(engine, tokens)
            loads[engine] += tokens
        elif event == "remove":
            balancer.remove(engine, min(tokens, loads[engine]))
            loads[engine] -= min(tokens, loads[engine])
        elif event == "exclude" and len(out | {engine}) < engines:
            balancer.exclude(engine)
            out.add(engine)
        elif event == "include":
            balancer.include(engine)
            out.discard(engine)
        assert balancer.choose() == min((load, i) for i, load in enumerate(loads) if i not in out)[1]

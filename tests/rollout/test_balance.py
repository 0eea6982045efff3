from __future__ import annotations

import random

import pytest

from roll.rollout.engine_pool import Balancer


def test_the_engine_with_the_fewest_tokens_comes_first_and_the_lowest_number_among_equals() -> None:
    balancer = Balancer(3)
    chosen = []
    for tokens in (10, 4, 4, 5, 1):
        chosen.append(balancer.choose())
        balancer.add(chosen[-1], tokens)
    assert chosen == [0, 1, 2, 1, 2]
    balancer.remove(0, 10)
    assert balancer.choose() == 0


def test_tokens_that_are_not_outstanding_cannot_end() -> None:
    balancer = Balancer(1)
    balancer.add(0, 3)
    with pytest.raises(ValueError, match="engine 0 has 3 tokens outstanding; 4 cannot end"):
        balancer.remove(0, 4)


@pytest.mark.parametrize("engines", [1, 2, 5, 13])
def test_it_chooses_as_a_search_over_all_engines_would(engines: int) -> None:
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

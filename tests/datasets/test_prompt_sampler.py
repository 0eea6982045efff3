from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.datasets.prompts import PromptSampler


@given(
    size=st.integers(1, 30),
    seed=st.integers(0, 5),
    counts=st.lists(st.integers(0, 70), max_size=6),
    shuffle=st.booleans(),
)
def test_every_epoch_contains_every_index_once(size, seed, counts, shuffle):
    sampler = PromptSampler(size, seed, shuffle)
    drawn = [index for count in counts for index in sampler.take(count)]
    assert len(drawn) == sum(counts)
    for first in range(0, len(drawn), size):
        part = drawn[first : first + size]
        assert len(set(part)) == len(part)
    assert sampler.epoch == len(drawn) // size


@given(size=st.integers(1, 20), before=st.integers(0, 60), after=st.integers(0, 60), shuffle=st.booleans())
def test_a_resumed_sampler_continues_exactly(size, before, after, shuffle):
    original = PromptSampler(size, 3, shuffle)
    original.take(before)
    resumed = PromptSampler(size, 3, shuffle)
    resumed.load_state_dict(json.loads(json.dumps(original.state_dict())))
    assert resumed.take(after) == original.take(after)


def test_orders_depend_on_seed_and_epoch():
    sampler = PromptSampler(20, 1)
    first, second = sampler.take(20), sampler.take(20)
    assert first != second and PromptSampler(20, 1).take(20) == first != PromptSampler(20, 2).take(20)
    assert PromptSampler(3, 1, shuffle=False).take(5) == [0, 1, 2, 0, 1]


def test_a_state_of_other_data_is_an_error():
    state = PromptSampler(5, 1).state_dict()
    with pytest.raises(ValueError, match="size was 5 and is 6"):
        PromptSampler(6, 1).load_state_dict(state)
    with pytest.raises(ValueError, match="at least one prompt"):
        PromptSampler(0, 1)

"""What the RLVR producer remembers, and what it refuses to go on from."""

from __future__ import annotations

from typing import Any

import pytest

from roll.configs.pipeline import RLVRConfig
from roll.datasets.templates import EncodedPrompt
from roll.pipeline.rlvr.producer import RLVRProducer
from roll.rollout.policy import Ticket
from roll.rollout.types import SamplingParams


def producer(samples: int) -> RLVRProducer:
    config = RLVRConfig(num_return_sequences_in_group=samples)
    prompts = [EncodedPrompt(id=str(i), tag="math", ids=[i], ground_truth="1") for i in range(5)]
    nothing: Any = None
    sampling = SamplingParams(max_new_tokens=1)
    return RLVRProducer(config, prompts, [], nothing, nothing, sampling, sampling)


def drawn(made: RLVRProducer, first: int, count: int) -> list[int]:
    return [group.index for group in made.draw(Ticket(first + i, 0, 0) for i in range(count))]


def test_the_cursor_goes_on_where_it_stood_also_in_the_middle_of_a_pass():
    whole, first, second = producer(4), producer(4), producer(4)
    order = drawn(whole, 0, 12)
    assert drawn(first, 0, 7) == order[:7]
    second.load_state_dict(first.state_dict())
    assert drawn(second, 7, 5) == order[7:]


def test_groups_of_another_size_are_refused_with_the_size_that_fits():
    with pytest.raises(ValueError, match="num_return_sequences_in_group: 8 cannot go on .* groups of 4; use 4"):
        producer(8).load_state_dict(producer(4).state_dict())

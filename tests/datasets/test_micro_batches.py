from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.datasets.micro_batches import OptimizerStepPlan, plan_forward, plan_optimizer_steps


@st.composite
def batches(draw):
    """(lengths, data-parallel size, samples of a step) that divide."""
    ranks, per_rank, steps = draw(st.integers(1, 4)), draw(st.integers(1, 8)), draw(st.integers(1, 3))
    count = ranks * per_rank * steps
    return draw(st.lists(st.integers(1, 50), min_size=count, max_size=count)), ranks, ranks * per_rank


def groups(plan: OptimizerStepPlan) -> list[list[list[int]]]:
    """For each rank its micro-batches, as positions in the batch."""
    return [
        [[shard[position] for position in micro] for micro in micros]
        for shard, micros in zip(plan.indices, plan.micro_batches, strict=True)
    ]


def padded_tokens(lengths, micro_batch, round_to=1) -> int:
    return -(-max(lengths[index] for index in micro_batch) // round_to) * round_to * len(micro_batch)


def packed_tokens(lengths, micro_batch, round_to=1) -> int:
    return -(-sum(lengths[index] for index in micro_batch) // round_to) * round_to


@given(batches(), st.integers(1, 9))
def test_with_micro_batch_size_every_sample_is_in_one_micro_batch_and_ranks_have_equally_many(batch, micro_batch_size):
    lengths, ranks, samples_per_step = batch
    plans = plan_optimizer_steps(lengths, ranks, samples_per_step=samples_per_step, micro_batch_size=micro_batch_size)
    check_cover(plans, lengths, ranks, samples_per_step)
    for plan in plans:
        for micros in groups(plan):
            assert len(micros) == -(-(samples_per_step // ranks) // micro_batch_size)
            assert all(len(micro) <= micro_batch_size for micro in micros)


@given(batches(), st.integers(56, 200), st.sampled_from([1, 4, 8]), st.booleans())
def test_with_max_tokens_no_micro_batch_exceeds_the_limit(batch, max_tokens, round_to, packed):
    lengths, ranks, samples_per_step = batch
    plans = plan_optimizer_steps(
        lengths, ranks, samples_per_step=samples_per_step, max_tokens=max_tokens, round_to=round_to, packed=packed
    )
    check_cover(plans, lengths, ranks, samples_per_step)
    tokens = packed_tokens if packed else padded_tokens
    for plan in plans:
        for micros in groups(plan):
            assert all(tokens(lengths, micro, round_to) <= max_tokens for micro in micros)


def check_cover(plans, lengths, ranks, samples_per_step):
    for number, plan in enumerate(plans):
        assert sorted(plan.permutation) == list(range(number * samples_per_step, (number + 1) * samples_per_step))
        assert {len(shard) for shard in plan.indices} == {samples_per_step // ranks}
        assert len({len(micros) for micros in plan.micro_batches}) == 1
        for shard, micros in zip(plan.indices, plan.micro_batches, strict=True):
            assert sorted(position for micro in micros for position in micro) == list(range(len(shard)))
    assert len(plans) * samples_per_step == len(lengths)


@given(st.integers(1, 4), st.lists(st.integers(1, 50), min_size=4, max_size=30), st.integers(1, 8))
def test_a_forward_plan_covers_the_batch_and_its_inverse_restores_the_order(ranks, lengths, micro_batch_size):
    plan = plan_forward(lengths, ranks, micro_batch_size=micro_batch_size)
    assert sorted(plan.permutation) == list(range(len(lengths)))
    sizes = [len(shard) for shard in plan.indices]
    assert max(sizes) - min(sizes) <= 1
    concatenated = [lengths[index] for index in plan.permutation]
    assert [concatenated[position] for position in plan.inverse] == lengths


def test_samples_of_similar_length_share_a_micro_batch():
    lengths = [1, 100] * 8
    (plan,) = plan_optimizer_steps(lengths, 2, samples_per_step=16, micro_batch_size=4)
    assert all(len({lengths[index] for index in micro}) == 1 for micros in groups(plan) for micro in micros)
    assert [lengths[micros[0][0]] for micros in groups(plan)] == [100, 100]


def test_plans_are_reproducible_and_balance_the_ranks():
    lengths = [(7 * n) % 31 + 1 for n in range(64)]
    first, again = (plan_forward(lengths, 4, max_tokens=64) for _ in range(2))
    assert first == again
    work = [sum(lengths[index] for index in shard) for shard in first.indices]
    assert max(work) - min(work) <= max(lengths)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples_per_step": 5, "micro_batch_size": 1}, "12 samples do not divide .* steps of 5; use 4 or 6"),
        ({"samples_per_step": 3, "micro_batch_size": 1}, "3 samples of an optimizer step do not divide over 2 ranks"),
        ({"samples_per_step": 4}, "give either micro_batch_size"),
        ({"samples_per_step": 4, "micro_batch_size": 1, "max_tokens": 9}, "give either micro_batch_size"),
        ({"samples_per_step": 4, "micro_batch_size": 0}, "micro_batch_size: 0 must be at least 1"),
        ({"samples_per_step": 4, "max_tokens": 11}, r"sample 7 has 12 tokens \(12 padded\), more than max_tokens 11"),
    ],
)
def test_invalid_batches_and_limits_are_errors(arguments, message):
    lengths = [3, 3, 3, 3, 3, 3, 3, 12, 3, 3, 3, 3]
    with pytest.raises(ValueError, match=message):
        plan_optimizer_steps(lengths, 2, **arguments)


def test_fewer_samples_than_ranks_are_an_error():
    with pytest.raises(ValueError, match="1 samples are fewer than 2 data-parallel ranks"):
        plan_forward([3], 2, micro_batch_size=1)

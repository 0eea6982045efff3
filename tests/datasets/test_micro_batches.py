from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.datasets.micro_batches import OptimizerStepPlan, plan_forward, plan_optimizer_steps, sample_cost


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


@st.composite
def prefixes_of(draw, lengths):
    """Groups of samples anywhere in the batch, and samples without one; a prefix is at most the shortest's length."""
    numbers = draw(st.lists(st.integers(-1, 5), min_size=len(lengths), max_size=len(lengths)))
    shortest = {n: min(length for own, length in zip(numbers, lengths, strict=True) if own == n) for n in {*numbers}}
    tokens = {n: draw(st.integers(1, length)) for n, length in shortest.items()}
    return [None if n < 0 else (n, tokens[n]) for n in numbers]


def distinct_tokens(lengths, micro_batch, prefixes) -> int:
    """Tokens of a micro-batch if those of each prefix count once."""
    shared = [prefixes[index] for index in micro_batch if prefixes[index]]
    own = sum(lengths[index] - (prefixes[index][1] if prefixes[index] else 0) for index in micro_batch)
    return own + sum(tokens for _, tokens in set(shared))


def tokens_of_ranks(plan: OptimizerStepPlan, lengths, prefixes) -> list[int]:
    return [sum(distinct_tokens(lengths, micro, prefixes) for micro in micros) for micros in groups(plan)]


def rank_costs(plan: OptimizerStepPlan, costs, packed: bool) -> list[float]:
    """Cost of each rank; with padding, every sample of a micro-batch costs what its most expensive one does."""
    return [
        sum(sum(costs[i] for i in micro) if packed else max(costs[i] for i in micro) * len(micro) for micro in micros)
        for micros in groups(plan)
    ]


@given(batches(), st.integers(1, 9), st.booleans())
def test_with_micro_batch_size_every_sample_is_in_one_micro_batch_and_ranks_have_equally_many(
    batch, micro_batch_size, packed
):
    lengths, ranks, samples_per_step = batch
    plans = plan_optimizer_steps(
        lengths, ranks, samples_per_step=samples_per_step, micro_batch_size=micro_batch_size, packed=packed
    )
    check_cover(plans, lengths, ranks, samples_per_step)
    for plan in plans:
        assert {len(shard) for shard in plan.indices} == {samples_per_step // ranks}
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
            sizes = [sum(lengths[i] for i in micro) if packed else max(lengths[i] for i in micro) for micro in micros]
            assert sizes == sorted(sizes, reverse=True), "a step that does not fit in memory fails at once"


def check_cover(plans, lengths, ranks, samples_per_step):
    for number, plan in enumerate(plans):
        assert sorted(plan.permutation) == list(range(number * samples_per_step, (number + 1) * samples_per_step))
        assert len({len(micros) for micros in plan.micro_batches}) == 1
        for shard, micros in zip(plan.indices, plan.micro_batches, strict=True):
            assert [position for micro in micros for position in micro] == list(range(len(shard)))
            assert all(micros)
    assert len(plans) * samples_per_step == len(lengths)


@given(batches(), st.integers(56, 200), st.booleans(), st.booleans(), st.sampled_from([5.0, 50.0, math.inf]))
def test_no_step_costs_more_than_samples_in_the_order_they_came(batch, max_tokens, packed, limited, crossover):
    lengths, ranks, samples_per_step = batch
    costs = [sample_cost(length, crossover) for length in lengths]
    size = {"max_tokens": max_tokens} if limited else {"micro_batch_size": 4}
    share = samples_per_step // ranks
    plans = plan_optimizer_steps(lengths, ranks, samples_per_step=samples_per_step, costs=costs, packed=packed, **size)
    for number, plan in enumerate(plans):
        in_order = []
        for rank in range(ranks):
            own = slice(number * samples_per_step + rank * share, number * samples_per_step + (rank + 1) * share)
            alone = plan_forward(lengths[own], 1, costs=costs[own], packed=packed, **size)
            in_order += rank_costs(alone, costs[own], packed)
        assert max(rank_costs(plan, costs, packed)) <= max(in_order) * (1 + 1e-9)


@given(st.integers(1, 4), st.lists(st.integers(1, 50), min_size=4, max_size=30), st.integers(1, 8))
def test_a_forward_plan_covers_the_batch_and_its_inverse_restores_the_order(ranks, lengths, micro_batch_size):
    plan = plan_forward(lengths, ranks, micro_batch_size=micro_batch_size)
    assert sorted(plan.permutation) == list(range(len(lengths)))
    sizes = [len(shard) for shard in plan.indices]
    assert max(sizes) - min(sizes) <= 1
    concatenated = [lengths[index] for index in plan.permutation]
    assert [concatenated[position] for position in plan.inverse] == lengths


@pytest.mark.parametrize("size", [{"micro_batch_size": 8}, {"max_tokens": 2048}])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("forward", [False, True])
def test_samples_with_the_same_prompt_stay_together(size, shuffled, forward):
    """16 prompts of 200 tokens, each with 8 responses of 20."""
    lengths, prefixes = [220] * 128, [(index // 8, 200) for index in range(128)]
    if shuffled:
        random.Random(0).shuffle(prefixes)
    arguments = {"packed": True, "prefixes": prefixes, **size}
    if forward:
        plan = plan_forward(lengths, 2, **arguments)
    else:
        (plan,) = plan_optimizer_steps(lengths, 2, samples_per_step=128, **arguments)
    assert tokens_of_ranks(plan, lengths, prefixes) == [8 * (200 + 8 * 20)] * 2


@pytest.mark.parametrize("size", [{"micro_batch_size": 8}, {"max_tokens": 4096}])
def test_ranks_with_whole_groups_of_long_tailed_responses_finish_together(size):
    draw = random.Random(0)
    prompts = [draw.randint(50, 300) for _ in range(32)]
    lengths = [prompts[index // 8] + min(1500, int(48 * draw.paretovariate(1.2))) for index in range(256)]
    prefixes = [(index // 8, prompts[index // 8]) for index in range(256)]
    arguments = {"samples_per_step": 256, "packed": True, **size}
    (plan,) = plan_optimizer_steps(lengths, 2, prefixes=prefixes, **arguments)
    (alone,) = plan_optimizer_steps(lengths, 2, **arguments)
    ranks = tokens_of_ranks(plan, lengths, prefixes)
    assert max(ranks) <= 1.03 * sum(ranks) / len(ranks)
    assert sum(ranks) < 0.75 * sum(tokens_of_ranks(alone, lengths, prefixes))


def test_one_group_is_divided_over_ranks_where_they_would_wait_otherwise():
    arguments = {"samples_per_step": 8, "max_tokens": 400, "packed": True, "prefixes": [("only", 10)] * 8}
    (plan,) = plan_optimizer_steps([40] * 8, 2, **arguments)
    assert [len(shard) for shard in plan.indices] == [4, 4]


def test_groups_that_do_not_divide_by_the_ranks_are_split_once():
    lengths, prefixes = [30] * 24, [(index // 8, 20) for index in range(24)]
    arguments = {"samples_per_step": 24, "max_tokens": 360, "packed": True, "prefixes": prefixes}
    (plan,) = plan_optimizer_steps(lengths, 2, **arguments)
    assert [len({prefixes[index] for index in shard}) for shard in plan.indices] == [2, 2]


def test_no_rank_is_without_samples_where_one_group_is_all():
    arguments = {"max_tokens": 400, "packed": True, "prefixes": [("only", 10)] * 4}
    assert all(plan_forward([100, 10, 10, 10], 2, **arguments).indices)


def test_a_group_that_fits_one_micro_batch_is_split_where_another_rank_needs_two():
    lengths, costs = [60, 50] + [10] * 10, [100, 20] + [20] * 10
    prefixes = [None, None] + [("group", 9)] * 10
    arguments = {"samples_per_step": 12, "max_tokens": 100, "packed": True, "prefixes": prefixes}
    (plan,) = plan_optimizer_steps(lengths, 2, costs=costs, **arguments)
    assert sorted(len(shard) for shard in plan.indices) == [2, 10]
    assert [len(micros) for micros in plan.micro_batches] == [2, 2]


def test_of_plans_whose_slowest_ranks_cost_the_same_the_one_with_fewer_distinct_tokens_is_taken():
    lengths, prefixes = [20, 20, 30, 30, 10, 20], [(group, 5) for group in (2, 1, 0, 2, 2, 2)]
    plan = plan_forward(lengths, 2, max_tokens=60, packed=True, prefixes=prefixes)
    assert tokens_of_ranks(plan, lengths, prefixes) == [65, 55], "whole groups give 65 and 60"


def test_groups_larger_than_a_micro_batch_fill_whole_micro_batches():
    lengths, prefixes = [30] * 48, [(index // 24, 20) for index in range(48)]
    plan = plan_forward(lengths, 1, micro_batch_size=8, packed=True, prefixes=prefixes)
    assert tokens_of_ranks(plan, lengths, prefixes) == [6 * (20 + 8 * 10)]


@given(batches().flatmap(lambda batch: st.tuples(st.just(batch), prefixes_of(batch[0]))), st.integers(50, 200))
def test_with_prefixes_limits_count_all_tokens_and_ranks_have_equally_many_micro_batches(batch_prefixes, max_tokens):
    (lengths, ranks, samples_per_step), prefixes = batch_prefixes
    arguments = {"samples_per_step": samples_per_step, "packed": True, "prefixes": prefixes}
    plans = plan_optimizer_steps(lengths, ranks, max_tokens=max_tokens, **arguments)
    check_cover(plans, lengths, ranks, samples_per_step)
    assert all(packed_tokens(lengths, micro) <= max_tokens for plan in plans for rank in groups(plan) for micro in rank)
    assert plans == plan_optimizer_steps(lengths, ranks, max_tokens=max_tokens, **arguments)


@given(batches().flatmap(lambda batch: st.tuples(st.just(batch), prefixes_of(batch[0]))), st.integers(1, 9))
def test_with_prefixes_and_micro_batch_size_no_rank_costs_more_than_consecutive_samples(batch_prefixes, size):
    (lengths, ranks, samples_per_step), prefixes = batch_prefixes
    share = samples_per_step // ranks
    arguments = {"micro_batch_size": size, "packed": True}
    plans = plan_optimizer_steps(lengths, ranks, samples_per_step=samples_per_step, prefixes=prefixes, **arguments)
    check_cover(plans, lengths, ranks, samples_per_step)
    for number, plan in enumerate(plans):
        assert {len(shard) for shard in plan.indices} == {share}
        assert all(len(micro) <= size for micros in groups(plan) for micro in micros)
        in_order = []
        for start in range(number * samples_per_step, (number + 1) * samples_per_step, share):
            own = slice(start, start + share)
            alone = plan_forward(lengths[own], 1, prefixes=prefixes[own], **arguments)
            in_order += tokens_of_ranks(alone, lengths[own], prefixes[own])
        assert max(tokens_of_ranks(plan, lengths, prefixes)) <= max(in_order)


@given(batches(), st.integers(50, 200))
def test_prefixes_that_nobody_else_has_change_nothing(batch, max_tokens):
    lengths, ranks, samples_per_step = batch
    arguments = {"samples_per_step": samples_per_step, "max_tokens": max_tokens, "packed": True}
    alone = [(index, 1) for index in range(len(lengths))]
    assert plan_optimizer_steps(lengths, ranks, prefixes=alone, **arguments) == plan_optimizer_steps(
        lengths, ranks, **arguments
    )


def test_in_a_forward_pass_cost_decides_and_not_equal_numbers_of_micro_batches():
    """The rank of the long sample has one micro-batch and the other two: a training step gives it others."""
    lengths = [100] + [10] * 15
    arguments = {"max_tokens": 100, "packed": True, "costs": [1000] + [10] * 15}
    assert [len(micros) for micros in plan_forward(lengths, 2, **arguments).micro_batches] == [1, 2]
    (trained,) = plan_optimizer_steps(lengths, 2, samples_per_step=16, **arguments)
    assert [len(micros) for micros in trained.micro_batches] == [2, 2]


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


def test_no_rank_has_more_tokens_than_an_equal_number_of_the_longest_samples():
    """Memory of activations is planned for that many."""
    lengths = [100, 70, 70, 70]
    squares = [length**2 for length in lengths]
    (plan,) = plan_optimizer_steps(lengths, 2, samples_per_step=4, costs=squares, max_tokens=400, packed=True)
    assert [sum(lengths[index] for index in shard) for shard in plan.indices] == [170, 140]  # not 100 and 210


def test_by_tokens_one_long_sample_is_alone_on_its_rank():
    lengths = [10, 10, 90, 10, 10, 10, 10, 10, 10, 10]
    (plan,) = plan_optimizer_steps(lengths, 2, samples_per_step=10, max_tokens=100, packed=True)
    assert plan.indices == [[2], [0, 1, 3, 4, 5, 6, 7, 8, 9]]
    assert plan.micro_batches == [[[0]], [[0, 1, 2, 3, 4, 5, 6, 7, 8]]]


def test_a_rank_with_too_few_samples_for_the_micro_batches_gets_others():
    lengths = [100] + [10] * 15
    (plan,) = plan_optimizer_steps(lengths, 2, samples_per_step=16, max_tokens=100, packed=True)
    assert sorted(sum(lengths[index] for index in shard) for shard in plan.indices) == [120, 130]
    assert [len(micros) for micros in plan.micro_batches] == [2, 2]


def test_costs_decide_which_samples_go_together():
    lengths = [80, 40, 40, 30, 30, 30]
    arguments = {"samples_per_step": 6, "max_tokens": 300, "packed": True}
    (by_tokens,) = plan_optimizer_steps(lengths, 2, **arguments)
    assert [sum(lengths[index] for index in shard) for shard in by_tokens.indices] == [140, 110]
    squares = [length**2 for length in lengths]
    (by_square,) = plan_optimizer_steps(lengths, 2, costs=squares, **arguments)
    assert by_square.indices == [[0], [1, 2, 3, 4, 5]]
    assert rank_costs(by_square, squares, True) == [6400, 5900]


def test_a_sample_as_long_as_the_crossover_costs_twice_its_tokens():
    assert sample_cost(1000, 1000.0) == 2000
    assert sample_cost(3000, 1000.0) == 12000
    assert sample_cost(1000, math.inf) == 1000


@pytest.mark.parametrize("size", [{"micro_batch_size": 4}, {"max_tokens": 4096}])
def test_ranks_finish_within_two_percent_where_lengths_have_a_long_tail(size):
    draw = random.Random(0)
    lengths = [min(2048, int(64 * draw.paretovariate(1.3))) for _ in range(256)]
    costs = [sample_cost(length, 4000.0) for length in lengths]
    (plan,) = plan_optimizer_steps(lengths, 4, samples_per_step=256, costs=costs, packed=True, **size)
    ranks = rank_costs(plan, costs, True)
    assert max(ranks) <= 1.02 * sum(ranks) / len(ranks)


def test_packed_micro_batches_of_a_rank_cost_about_the_same():
    lengths = [400, 200, 200, *[100] * 4, *[50] * 8]
    (plan,) = plan_optimizer_steps(lengths, 1, samples_per_step=15, max_tokens=640, packed=True)
    assert [sum(lengths[index] for index in micro) for micro in groups(plan)[0]] == [550, 550, 500]


def test_packed_samples_need_few_micro_batches():
    lengths = [60, 60, 40, 40]
    (plan,) = plan_optimizer_steps(lengths, 1, samples_per_step=4, max_tokens=100, packed=True)
    assert groups(plan) == [[[0, 2], [1, 3]]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples_per_step": 5, "micro_batch_size": 1}, "12 samples do not divide .* steps of 5; use 4 or 6"),
        ({"samples_per_step": 3, "micro_batch_size": 1}, "3 samples of an optimizer step do not divide over 2 ranks"),
        ({"samples_per_step": 4}, "give either micro_batch_size"),
        ({"samples_per_step": 4, "micro_batch_size": 1, "max_tokens": 9}, "give either micro_batch_size"),
        ({"samples_per_step": 4, "micro_batch_size": 0}, "micro_batch_size: 0 must be at least 1"),
        ({"samples_per_step": 4, "micro_batch_size": 1, "costs": [1.0]}, "costs: 1 of 12 samples; give one above 0"),
        ({"samples_per_step": 4, "micro_batch_size": 1, "costs": [0.0] * 12}, "costs: 12 of 12 samples; give one abo"),
        ({"samples_per_step": 4, "micro_batch_size": 1, "prefixes": [None]}, "prefixes: 1 of 12 samples"),
        ({"samples_per_step": 4, "micro_batch_size": 1, "prefixes": [(0, 1)] * 12}, "prefixes: only samples of packed"),
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

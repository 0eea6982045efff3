from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from roll.tools.rehearse.batches import Batch, Structure, shrink_batch, shrink_partition


def test_one_optimizer_step_of_many_micro_batches() -> None:
    assert shrink_batch(Structure(64, 8, optimizer_steps=1, accumulates=True), 2) == Batch(4, 4, 4, 2)


def test_several_optimizer_steps_are_kept() -> None:
    made = shrink_batch(Structure(64, 8, optimizer_steps=4, accumulates=True), 2)
    assert made == Batch(4, 4, 1, 2)


def test_more_optimizer_steps_than_four_become_four() -> None:
    made = shrink_batch(Structure(1024, 1, optimizer_steps=512), 1)
    assert made == Batch(4, 1, 1, 1)


def test_a_small_batch_stays_as_it_is() -> None:
    assert shrink_batch(Structure(2, 2), 1) == Batch(2, 2, 4, 1)


def test_every_tag_of_agents_gets_a_group() -> None:
    made = shrink_batch(Structure(64, 8, tags=6), 2)
    assert made.groups == 6 and made.group_size == 2


@given(
    st.builds(
        Structure,
        groups=st.integers(1, 2000),
        group_size=st.integers(1, 64),
        optimizer_steps=st.integers(1, 100),
        accumulates=st.booleans(),
    ),
    st.sampled_from([1, 2, 4, 8]),
)
def test_a_batch_fills_whole_optimizer_steps(structure: Structure, data_parallel: int) -> None:
    made = shrink_batch(structure, data_parallel)
    samples, step = made.groups * made.group_size, made.micro_batch * made.accumulation * data_parallel
    assert samples % step == 0
    assert made.groups <= 8 and made.group_size == min(structure.group_size, 4)
    assert (made.accumulation > 1) == structure.accumulates or data_parallel == 8
    if samples >= 2 * 4 * data_parallel:
        assert samples // step == min(structure.optimizer_steps, 4) or structure.optimizer_steps > 2


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6), st.integers(0, 10))
def test_shares_add_up_and_leave_no_tag_out(parts: list[int], more: int) -> None:
    groups = len(parts) + more
    shares = shrink_partition(parts, groups)
    assert sum(shares) == groups and min(shares) >= 1


def test_shares_are_in_proportion() -> None:
    assert shrink_partition([6, 2], 4) == [3, 1]
    assert shrink_partition([128], 4) == [4]

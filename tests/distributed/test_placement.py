"""Placement arithmetic: who sits where, on which cores, with how many threads."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.distributed.resources import cores_of, nodes_needed, resource_table, seats_of, threads_of


def test_devices_are_dealt_in_the_order_of_the_mapping() -> None:
    seats = seats_of("actor_infer", [5, 4, 9, 8], workers=2, devices_per_node=8)
    assert [(seat.node, seat.devices, seat.slots) for seat in seats] == [(0, (5, 4), (5, 4)), (1, (9, 8), (1, 0))]


def test_a_worker_stays_on_one_node() -> None:
    with pytest.raises(ValueError, match=r"worker 0 would own devices \[7, 8\] on nodes \[0, 1\]"):
        seats_of("actor_infer", [7, 8], workers=1, devices_per_node=8)


def test_devices_must_divide_among_workers() -> None:
    with pytest.raises(ValueError, match="3 devices cannot be dealt to 2 workers"):
        seats_of("actor_train", [0, 1, 2], workers=2, devices_per_node=8)


@settings(deadline=None)
@given(st.integers(1, 16), st.integers(0, 48))
def test_slots_with_a_core_each_share_none(slots: int, extra: int) -> None:
    cores = tuple(range(100, 100 + slots + extra))
    owned = [cores_of([slot], slots, cores) for slot in range(slots)]
    assert all(owned)
    assert sorted(core for group in owned for core in group) == list(cores)
    assert [threads_of([slot], slots, len(cores)) for slot in range(slots)] == [len(group) for group in owned]


def test_more_slots_than_cores_share_all_cores_with_a_fair_share_of_threads() -> None:
    assert cores_of([3], 4, (0, 1)) == (0, 1)
    assert threads_of([3], 4, 2) == 1
    assert threads_of([0, 1, 2, 3], 4, 2) == 2


def test_nodes_up_to_the_highest_device_are_needed() -> None:
    assert nodes_needed({"a": [0, 1], "b": [17], "c": []}, 8) == 3


def test_the_table_shows_the_node_that_is_missing() -> None:
    table = resource_table({"actor_train": [0, 1], "actor_infer": [2]}, 2, [("10.0.0.1", 2.0)], "CPU slots")
    assert "no such node" in table and "10.0.0.1" in table and "actor_train       0-1" in table

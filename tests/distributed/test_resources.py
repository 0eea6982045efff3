"""Which nodes and devices each worker gets."""

from __future__ import annotations

import pytest

from roll.distributed.resources import DeviceSlot, device_slots, nodes_needed, resource_table, visible_devices


def test_devices_are_assigned_in_the_order_of_the_mapping() -> None:
    slots = device_slots("actor_infer", [5, 4, 9, 8], workers=2, devices_per_node=8)
    assert slots == [(DeviceSlot(0, (5, 4), (5, 4)),), (DeviceSlot(1, (9, 8), (1, 0)),)]


def test_an_engine_over_two_nodes_has_a_slot_on_each() -> None:
    (slots,) = device_slots("actor_infer", [7, 6, 8, 9], workers=1, devices_per_node=8)
    assert slots == (DeviceSlot(0, (7, 6), (7, 6)), DeviceSlot(1, (8, 9), (0, 1)))


@pytest.mark.parametrize(
    ("devices", "placement"),
    [([6, 7, 8], "6-7 on node 0, then 8 on node 1"), ([7, 8, 6, 9], "7 on node 0, then 8 on node 1, then 6 on node 0")],
)
def test_an_engine_has_as_many_devices_on_each_of_its_nodes(devices: list[int], placement: str) -> None:
    with pytest.raises(ValueError, match=f"actor_infer.device_mapping: worker 0: devices {placement}.*the same number"):
        device_slots("actor_infer", devices, workers=1, devices_per_node=8)


def test_devices_must_divide_among_workers() -> None:
    with pytest.raises(ValueError, match="3 devices cannot be divided among 2 workers"):
        device_slots("actor_train", [0, 1, 2], workers=2, devices_per_node=8)


def test_a_worker_sees_its_own_gpus_first_under_the_names_of_its_node() -> None:
    assert visible_devices((1,), ("4", "5", "6")) == "5,4,6"
    assert visible_devices((2, 0), ("GPU-a", "GPU-b", "GPU-c")) == "GPU-c,GPU-a,GPU-b"


def test_nodes_up_to_the_highest_device_are_needed() -> None:
    assert nodes_needed({"a": [0, 1], "b": [17], "c": []}, 8) == 3


def test_the_table_shows_a_missing_node() -> None:
    table = resource_table({"actor_train": [0, 1], "actor_infer": [2]}, 2, [("10.0.0.1", 2.0)], "CPU slots")
    assert "no such node" in table and "10.0.0.1" in table and "actor_train       0-1" in table

"""Shared buckets: who opens them writes to the same memory, in turn; too little memory is said in time."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from roll.distributed.strategy.base import WeightSpec
from roll.distributed.weight_sync.plan import Bucket
from roll.distributed.weight_sync.shared_memory import SLOTS, SharedSlots, views_of
from roll.distributed.weight_sync.stage_tensors import SendError
from roll.platforms.shared_memory import SharedMemory, open_handle

BUCKET = Bucket((WeightSpec("a", (2, 3), "float32"), WeightSpec("b", (4,), "float32")))


def write(handle: list[str]) -> None:
    opened = SharedSlots.open(handle)
    for index in range(SLOTS):
        for number, (_, tensor) in enumerate(views_of(opened.bucket(index, BUCKET), BUCKET.specs)):
            tensor.fill_(10 * index + number)


def test_what_another_process_writes_is_seen_where_the_memory_was_made() -> None:
    slots = SharedSlots.create(64)
    process = multiprocessing.get_context("spawn").Process(target=write, args=(slots.handle(),))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    for index in range(2 * SLOTS):
        views = views_of(slots.bucket(index, BUCKET), BUCKET.specs)
        assert [(name, tuple(tensor.shape)) for name, tensor in views] == [("a", (2, 3)), ("b", (4,))]
        assert [tensor.unique().item() for _, tensor in views] == [10 * (index % SLOTS), 10 * (index % SLOTS) + 1]
        accepted = open_handle(slots.offer(index, BUCKET))
        for (name, tensor), (accepted_name, seen) in zip(views, accepted, strict=True):
            assert name == accepted_name and torch.equal(tensor, seen)


def test_memory_is_opened_once_and_memory_that_is_gone_is_said_so() -> None:
    slots = SharedSlots.create(64)
    again = [open_handle(slots.offer(0, BUCKET))[0][1].data_ptr() for _ in range(3)]
    assert len(set(again)) == 1
    address = slots.handle()[0].replace("roll-", "other-")
    with pytest.raises(FileNotFoundError, match="its owner closed it"):
        SharedMemory.open(address)


def test_more_than_the_shared_memory_of_the_machine_is_refused_with_what_to_do() -> None:
    with pytest.raises(SendError, match="lower model_update_buffer_size_mb"):
        SharedSlots.create(1 << 50)

"""Shared buckets: who opens them writes to the same memory, in turn; too little memory is said in time."""

from __future__ import annotations

import pytest
import torch
import torch.multiprocessing

from roll.distributed.strategy.base import WeightSpec
from roll.distributed.weight_sync.plan import Bucket
from roll.distributed.weight_sync.shared_memory import SLOTS, SharedSlots, views_of
from roll.distributed.weight_sync.stage_tensors import SendError

BUCKET = Bucket((WeightSpec("a", (2, 3), "float32"), WeightSpec("b", (4,), "float32")))


def write_and_read() -> None:
    slots = SharedSlots.create(64)
    opened = SharedSlots.open(slots.handle())
    for index in range(SLOTS):
        for number, (_, tensor) in enumerate(views_of(opened.bucket(index, BUCKET), BUCKET.specs)):
            tensor.fill_(10 * index + number)
    for index in range(2 * SLOTS):
        views = views_of(slots.bucket(index, BUCKET), BUCKET.specs)
        assert [(name, tuple(tensor.shape)) for name, tensor in views] == [("a", (2, 3)), ("b", (4,))]
        assert [tensor.unique().item() for _, tensor in views] == [10 * (index % SLOTS), 10 * (index % SLOTS) + 1]


def test_what_is_written_to_opened_memory_is_seen_where_it_was_made() -> None:
    """In a process of its own: torch's keeper of shared memory lives as long as the process that made some."""
    process = torch.multiprocessing.get_context("spawn").Process(target=write_and_read)
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_more_than_the_shared_memory_of_the_machine_is_refused_with_what_to_do() -> None:
    with pytest.raises(SendError, match="lower model_update_buffer_size_mb"):
        SharedSlots.create(1 << 50)

"""Shared buckets: every process writes to the same memory; too little memory is reported early."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from roll.distributed.weight_sync.plan import Bucket, WeightSpec
from roll.distributed.weight_sync.shm_buckets import BUFFERS, SharedMemoryError, ShmBuckets, views_of
from roll.platforms.shared_memory import SharedMemory, open_handle

BUCKET = Bucket((WeightSpec("a", (2, 3), "float32"), WeightSpec("b", (4,), "float32")))


def write(addresses: list[str]) -> None:
    opened = ShmBuckets.open(addresses)
    for index in range(BUFFERS):
        for number, (_, tensor) in enumerate(views_of(opened.bucket(index, BUCKET), BUCKET.specs)):
            tensor.fill_(10 * index + number)


def test_writes_of_another_process_are_visible_to_the_owner() -> None:
    buckets = ShmBuckets.create(64)
    process = multiprocessing.get_context("spawn").Process(target=write, args=(buckets.addresses(),))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    for index in range(2 * BUFFERS):
        views = views_of(buckets.bucket(index, BUCKET), BUCKET.specs)
        assert [(name, tuple(tensor.shape)) for name, tensor in views] == [("a", (2, 3)), ("b", (4,))]
        assert [tensor.unique().item() for _, tensor in views] == [10 * (index % BUFFERS), 10 * (index % BUFFERS) + 1]
        accepted = open_handle(buckets.handle(index, BUCKET))
        for (name, tensor), (accepted_name, seen) in zip(views, accepted, strict=True):
            assert name == accepted_name and torch.equal(tensor, seen)


def test_memory_is_opened_once_and_freed_memory_is_reported() -> None:
    buckets = ShmBuckets.create(64)
    again = [open_handle(buckets.handle(0, BUCKET))[0][1].data_ptr() for _ in range(3)]
    assert len(set(again)) == 1
    address = buckets.addresses()[0].replace("roll-", "other-")
    with pytest.raises(FileNotFoundError, match="its owner closed it"):
        SharedMemory.open(address)


def test_more_memory_than_the_machine_has_is_refused_with_a_remedy() -> None:
    with pytest.raises(SharedMemoryError, match="lower model_update_buffer_size_mb"):
        ShmBuckets.create(1 << 50)

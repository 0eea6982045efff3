"""Shared buckets: every process writes to the same memory; too little memory is reported early."""

from __future__ import annotations

import multiprocessing
import pickle
from importlib.util import find_spec
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing import reductions

from roll.distributed.weights import shm_buckets
from roll.distributed.weights.plan import Bucket, WeightSpec
from roll.distributed.weights.shm_buckets import BUFFERS, SharedMemoryError, ShmBuckets, views_of
from roll.platforms.cpu.shared_memory import SharedMemory, open_handle

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


def test_a_gpu_is_named_by_its_uuid_where_sglang_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake of what torch says about a CUDA tensor."""
    package = find_spec("sglang").submodule_search_locations  # type: ignore[union-attr]
    source = Path(package[0], "srt", "utils", "patch_torch.py").read_text()  # type: ignore[index]
    assert f"_REDUCE_TENSOR_ARG_DEVICE_INDEX = {shm_buckets.DEVICE_ARGUMENT}" in source
    of_gpu = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    arguments = ("type", "size", "stride", "offset", "storage", "dtype", 1, "handle")
    monkeypatch.setattr(reductions, "reduce_tensor", lambda tensor: ("rebuild", arguments))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=f"GPU-{number}"))
    rebuild, named = shm_buckets._reduce_with_uuid(of_gpu)  # type: ignore[arg-type]
    assert rebuild == "rebuild" and named == (*arguments[:6], "GPU-1", "handle")
    on_cpu = SimpleNamespace(device=SimpleNamespace(type="cpu"))
    assert shm_buckets._reduce_with_uuid(on_cpu)[1] == arguments  # type: ignore[arg-type]


def test_a_handle_names_the_tensors_and_changes_no_other_pickles() -> None:
    tensor = torch.arange(6.0)
    before = dict(ForkingPickler._extra_reducers)  # type: ignore[attr-defined]
    ((name, seen),) = pickle.loads(shm_buckets.cuda_ipc_handle([("a", tensor[2:5])]))
    assert name == "a" and torch.equal(seen, tensor[2:5])
    assert ForkingPickler._extra_reducers == before  # type: ignore[attr-defined]


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

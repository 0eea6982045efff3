"""What a rank does while its checkpoint is written: it computes, and waits before the written tensors change."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from roll.distributed.train.checkpoint import background_save
from roll.distributed.train.checkpoint.background_save import BackgroundSave


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def saving(one_rank: None) -> BackgroundSave:
    return BackgroundSave(torch.device("cpu"), 10.0)


def test_the_rank_goes_on_until_it_waits(saving, tmp_path: Path, monkeypatch):
    assert saving.seconds_waited() == 0.0, "nothing was saved yet"
    go, file = threading.Event(), tmp_path / "weights"

    def write(group: dist.ProcessGroup) -> None:
        go.wait()
        dist.barrier(group)
        file.write_text("all")

    def wait(*arguments: Any) -> Any:
        go.set()
        return concurrent.futures.wait(*arguments)

    monkeypatch.setattr(background_save, "wait", wait)
    saving.start(write)
    assert saving.seconds_waited() is None and not file.exists()
    saving.wait()
    waited = saving.seconds_waited()
    assert file.exists() and waited is not None and waited > 0
    saving.wait()
    assert saving.seconds_waited() == waited, "there was nothing to wait for"


def test_the_next_checkpoint_begins_after_the_one_before_and_counts_anew(saving):
    order: list[str] = []

    def slow(group: dist.ProcessGroup) -> None:
        time.sleep(0.2)
        order.append("first")

    saving.start(slow)
    saving.start(lambda group: order.append("second"))
    assert order[0] == "first"
    while saving.seconds_waited() is None:
        time.sleep(0.01)
    assert order == ["first", "second"] and saving.seconds_waited() == 0.0


def test_a_disk_that_hangs_is_not_waited_for_longer_than_the_deadline(one_rank):
    saving, end = BackgroundSave(torch.device("cpu"), 0.1), threading.Event()
    saving.start(lambda group: end.wait(60) and None)
    with pytest.raises(TimeoutError, match=r"not written within 0.1 s \(rpc_timeout_s\)"):
        saving.wait()
    with pytest.raises(TimeoutError, match="not written within"):
        saving.seconds_waited()
    end.set()


def test_an_error_is_raised_where_it_is_asked_for_and_not_where_it_is_waited_for(saving):
    def fail(group: dist.ProcessGroup) -> None:
        time.sleep(0.05)
        raise OSError(28, "No space left on device")

    saving.start(fail)
    saving.wait()
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            saving.seconds_waited()
    saving.start(lambda group: None)
    saving.wait()
    assert saving.seconds_waited() is not None

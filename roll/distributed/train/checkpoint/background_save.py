"""Writing a checkpoint on a thread, while the rank computes."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

import torch
import torch.distributed as dist

Write = Callable[[dist.ProcessGroup], None]
"""Writes this rank's part; its collectives use the group."""


class BackgroundSave:
    """Writes one checkpoint at a time.

    Nothing is copied first, which would take as much memory as the state has. What a checkpoint consists of changes
    in optimizer steps only, and moves with `offload` only: both call `wait` before. So a checkpoint is written during
    the forward and backward passes of the next step, and the trainer waits for what they leave of it.
    """

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        """Makes a process group for the threads of all ranks, which wait `timeout_s` for the slowest; collective."""
        self._device, self._timeout_s = device, timeout_s
        self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
        self._writing: Future[None] | None = None
        self._waited = 0.0
        self._deadline = 0.0

    def start(self, write: Write) -> None:
        """Calls `write` on a thread, after the one before has ended."""
        self.wait()
        self._writing, self._waited = Future(), 0.0
        self._deadline = time.monotonic() + self._timeout_s
        threading.Thread(target=self._run, args=(write, self._writing), name="checkpoint", daemon=True).start()

    def _run(self, write: Write, writing: Future[None]) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a thread starts with the first one
            write(self._group)
        except BaseException as error:
            writing.set_exception(error)
        else:
            writing.set_result(None)

    def seconds_waited(self) -> float | None:
        """How long `wait` took for the last checkpoint, once it is written; None before.

        Raises:
            TimeoutError: it is not written in time.
            Exception: with which writing it ended.
        """
        if self._writing is not None:
            if not self._writing.done():
                if time.monotonic() > self._deadline:
                    raise self._late()
                return None
            self._writing.result()
        return self._waited

    def wait(self) -> None:
        """Waits until what a checkpoint consists of may change, also if writing it fails.

        Raises:
            TimeoutError: it is not written in time.
        """
        if self._writing is None or self._writing.done():
            return
        start = time.monotonic()
        wait([self._writing], self._deadline - start)
        self._waited += time.monotonic() - start
        if not self._writing.done():
            raise self._late()

    def _late(self) -> TimeoutError:
        return TimeoutError(f"the checkpoint was not written within {self._timeout_s:g} s (rpc_timeout_s)")

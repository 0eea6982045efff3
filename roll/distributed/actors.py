"""The Ray actor around a worker: pins its process, keeps its log, and turns exceptions into values that name the rank.

Imports no torch, so that the process is pinned before torch counts its cores.
"""

from __future__ import annotations

import ctypes
import faulthandler
import inspect
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.distributed.garbage import freeze_heap
from roll.distributed.mail import Inbox, Mailed
from roll.distributed.ports import hold_port

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Failure:
    """An exception in a worker, as a value: exceptions of every kind survive the way to the driver.

    Attributes:
        rank: of the worker.
        time: seconds since the epoch; the earliest failure is the cause of the others.
        kind: name of the exception's class.
        message: its text.
        traceback: as Python prints it.
    """

    rank: int
    time: float
    kind: str
    message: str
    traceback: str


class Host:
    """Runs one worker in a process of its own; one call at a time, in the main thread."""

    def __init__(self, name: str, rank: int, cores: tuple[int, ...], log_file: str) -> None:
        """Pins the process to its cores and sends what it prints to its log file."""
        self._name, self._rank = name, rank
        self._worker: Any = None
        end_with_parent()
        _pin(cores)
        print_to(log_file)

    def process(self) -> int:
        """The process id."""
        return os.getpid()

    def hold_port(self) -> int:
        """A TCP port of this process's node, held by it until its worker's store serves on it."""
        return hold_port()

    def build(self, make: Callable[..., Any], environment: dict[str, str], *args: Any) -> Failure | None:
        """Makes the worker, with these variables set."""
        os.environ.update(environment)
        try:
            self._worker = make(*args)
        except Exception as error:
            return self._failed(error)
        freeze_heap()
        return None

    def call(self, method: str, keep: bool, *args: Any, **kwargs: Any) -> Any:
        """The worker's answer where it is wanted, None where it is not, a Failure where it raised."""
        try:
            result = getattr(self._worker, method)(*args, **kwargs)
        except Exception as error:
            return self._failed(error)
        return result if keep else None

    def _failed(self, error: Exception) -> Failure:
        text = "".join(traceback.format_exception(error))
        print(f"{self._name} failed:\n{text}", file=sys.stderr, flush=True)
        return Failure(self._rank, time.time(), type(error).__name__, str(error), text)


class ConcurrentHost(Mailed, Host):
    """Runs one worker whose methods are coroutines, side by side on one event loop; also calls that come by mail."""

    def __init__(self, *args: Any) -> None:
        """As in Host."""
        super().__init__(*args)
        self._inbox = Inbox(lambda method, *args: self.call(method, True, *args))

    async def process(self) -> int:  # type: ignore[override]
        """The process id."""
        return os.getpid()

    async def call(self, method: str, keep: bool, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """As in Host, awaiting the worker's coroutine."""
        try:
            result = getattr(self._worker, method)(*args, **kwargs)
            if inspect.isawaitable(result):
                result = await result
        except Exception as error:
            return self._failed(error)
        return result if keep else None


def end_with_parent() -> None:
    """Asks the kernel to end this process with the Ray daemon that started it, however that one ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _pin(cores: tuple[int, ...]) -> None:
    """Pins every thread there is; later ones inherit it."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


def print_to(log_file: str) -> None:
    """Sends stdout and stderr, those of child processes too, to the log; SIGUSR1 adds the stack of every thread."""
    path = Path(log_file)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)

"""A reward function that does what the response says; reward processes import it by name."""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

from roll.usercode.containment import COUNT_INTERVAL_S

HOUR = 3600.0


class Panic(BaseException):
    """What an extension in Rust raises: not an Exception."""


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def _raise(error: BaseException) -> None:
    raise error


def _loop() -> None:
    while True:
        pass


def _recurse() -> None:
    _recurse()


def foreign() -> list[str]:
    """What a daemon without an environment runs; these tests find it by its seconds, also beside other ones."""
    return ["sleep", f"37{os.environ['ROLL_TEST_SESSION']}"]


def _program() -> None:
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({HOUR})"])


def _child(leave_session: bool = False) -> None:
    if os.fork() == 0:
        if leave_session:
            os.setsid()
            if os.fork():
                os._exit(0)
        time.sleep(HOUR)
        os._exit(0)


def _ignore_signals() -> None:
    for number in range(1, signal.NSIG):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            continue


def _no_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**33, hard))
    bytearray(2**34)


def _threads() -> None:
    for _ in range(8):
        threading.Thread(target=time.sleep, args=(HOUR,), daemon=True).start()


def _lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


DEEDS: dict[str, Callable[[], Any]] = {
    "raise": lambda: _raise(RuntimeError("cannot judge this")),
    "raise a BaseException": lambda: _raise(Panic("in an extension")),
    "raise a KeyboardInterrupt": lambda: _raise(KeyboardInterrupt()),
    "raise an error without text": lambda: _raise(Silent()),
    "exit": lambda: sys.exit(3),
    "exit at once": lambda: os._exit(7),
    "kill itself": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "abort": os.abort,
    "crash": lambda: ctypes.string_at(0),
    "recurse": _recurse,
    "too much memory at once": _no_memory,
    "sleep": lambda: time.sleep(HOUR),
    "loop": _loop,
    "stop itself": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "ignore signals and loop": lambda: (_ignore_signals(), _loop()),
    "wait for a thread": lambda: (
        (thread := threading.Thread(target=time.sleep, args=(HOUR,)), thread.start()) and thread.join()
    ),
    "wait for a lock": _lock,
    "fork and hang": lambda: (_child(), time.sleep(HOUR)),
    "fork without end": lambda: [_child() for _ in range(10**6)],
    "ignore signals and fork without end": lambda: (_ignore_signals(), [_child() for _ in range(10**6)]),
    "start a program and hang": lambda: (_program(), time.sleep(HOUR)),
    "daemon and hang": lambda: (_child(leave_session=True), time.sleep(HOUR)),
    "daemon, wait and be killed": lambda: (
        _child(leave_session=True),
        time.sleep(4 * COUNT_INTERVAL_S),
        os.kill(os.getpid(), signal.SIGKILL),
    ),
    "daemon without an environment and die": lambda: (
        subprocess.run(["setsid", "env", "-i", "KEPT=1", "setsid", "sh", "-c", f"(setsid {' '.join(foreign())} &)"]),
        os._exit(7),
    ),
    "daemon by a double fork and die": lambda: (_child(leave_session=True), os._exit(7)),
    "start a program and die": lambda: (_program(), os._exit(7)),
    "fork and be killed": lambda: (_child(), os.kill(os.getpid(), signal.SIGKILL)),
    "nan": lambda: float("nan"),
    "infinity": lambda: float("-inf"),
    "a huge number": lambda: 10**400,
    "text": lambda: "good",
    "none": lambda: None,
    "a list": lambda: [1.0, 0.0],
    "a complex number": lambda: 1j,
    "a dictionary without a score": lambda: {"grade": 1.0},
    "a score that is a text": lambda: {"score": "1"},
    "an object": object,
    "say hello": lambda: os.write(1, b"hello\n") and 1.0,
    "flood stdout": lambda: os.write(1, b"x" * 10**6) and 1.0,
    "flood stderr": lambda: sys.stderr.write("x" * 10**6) and 1.0,
    "leave a child": lambda: _child() or 1.0,
    "leave a daemon": lambda: _child(leave_session=True) or 1.0,
    "leave threads": lambda: _threads() or 1.0,
    "change the folder": lambda: os.chdir("/") or 1.0,
}


def score(response: str) -> Any:
    """A number is its own score."""
    return DEEDS[response]() if response in DEEDS else float(response)


class Unreadable:
    """An array without dimensions that has no number."""

    ndim = 0

    def item(self) -> float:
        raise RuntimeError("no number here")


class Locked(Mapping[str, Any]):
    """A dictionary that gives nothing."""

    def __getitem__(self, key: str) -> Any:
        raise RuntimeError(f"{key} is locked")

    def __iter__(self) -> Iterator[str]:
        return iter(["score"])

    def __len__(self) -> int:
        return 1


async def _exit() -> None:
    sys.exit(3)


async def _interrupt() -> None:
    raise KeyboardInterrupt


async def _wait_for(work: Coroutine[Any, Any, None]) -> float:
    await asyncio.create_task(work)
    return 1.0


async def _exit_later() -> None:
    await asyncio.sleep(0.2)
    sys.exit(3)


async def _leave(work: Coroutine[Any, Any, None]) -> float:
    """The task runs on when the call has its score."""
    tasks.append(asyncio.create_task(work))
    return 1.0


tasks: list[asyncio.Task[None]] = []

ASYNC_DEEDS: dict[str, Callable[[], Any]] = {
    "exit": lambda: sys.exit(3),
    "raise a KeyboardInterrupt": lambda: _raise(KeyboardInterrupt()),
    "exit in a task": lambda: _wait_for(_exit()),
    "raise a KeyboardInterrupt in a task": lambda: _wait_for(_interrupt()),
    "exit in a callback": lambda: asyncio.get_running_loop().call_soon(sys.exit, 3) and asyncio.sleep(1, 1.0),
    "stop the loop": lambda: asyncio.get_running_loop().stop() or asyncio.sleep(1, 1.0),
    "cancel every task": lambda: [task.cancel() for task in asyncio.all_tasks()] and asyncio.sleep(1, 1.0),
    "return an unreadable number": Unreadable,
    "return a locked dictionary": Locked,
    "leave a task that exits": lambda: _leave(_exit()),
    "leave a task that exits later": lambda: _leave(_exit_later()),
    "wait": lambda: asyncio.sleep(1, 1.0),
}


async def score_async(response: str) -> Any:
    """A number is its own score."""
    found = ASYNC_DEEDS[response]() if response in ASYNC_DEEDS else float(response)
    return await found if inspect.isawaitable(found) else found

"""Ends what the code of a user has started together with the process that ran it, however that process ends."""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil

from roll.rewards.sandbox.isolation import adopt_orphans, signal_at_parents_end

MARK = "ROLL_REWARD_PROCESS"
"""Environment variable of a reward process and of the programs that it runs: its process id."""

ROUNDS, PAUSE_S = 50, 0.02
"""Times that processes are looked for and killed, until none is left: new ones may start meanwhile."""

COUNT_INTERVAL_S = 0.2
"""Interval at which descendants are counted."""

TOO_MANY_PROCESSES = signal.SIGVTALRM
"""Signal that ends a reward process which has started more processes than it may."""


def contain(process_limit: int | None = None) -> None:
    """Lets this process take along what it starts when it ends; call it before it has threads.

    With more than `process_limit` descendants at a time, it ends together with them by TOO_MANY_PROCESSES.

    Its descendants stay its own, since it adopts orphans, and are killed when it ends or gets SIGTERM. Where it is
    killed, crashes or ignores that signal, a guardian, a child of it, kills the processes of its session and those with
    its MARK. Only a forked process that left the session outlives a parent that was killed.
    """
    os.setsid()
    os.environ[MARK] = str(os.getpid())
    adopt_orphans()
    process = os.getpid()
    if os.fork() == 0:
        with contextlib.suppress(BaseException):
            _guard(process, process_limit)
        os._exit(0)
    signal.signal(signal.SIGTERM, _end)
    multiprocessing.util.Finalize(None, kill_descendants, exitpriority=0)


def _end(*_: Any) -> None:
    kill_descendants()
    os._exit(1)


def kill_descendants() -> None:
    """Kills everything that this process has started, the guardian too."""
    for _ in range(ROUNDS):
        children = psutil.Process().children(recursive=True)
        alive = [child for child in children if _is_alive(child)]
        if not alive:
            return
        for child in alive:
            with contextlib.suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(alive, timeout=PAUSE_S)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _guard(process: int, limit: int | None) -> None:
    """Waits for the end of the reward process, or ends it for its descendants; then kills what it has left."""
    os.setsid()
    for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    os.closerange(0, 256)
    signal_at_parents_end(signal.SIGUSR1)
    ended = False
    while os.getppid() == process and signal.sigtimedwait({signal.SIGUSR1}, COUNT_INTERVAL_S) is None:
        if ended:  # and alive: its code handles the signal
            _kill(process)
        elif limit is not None and len(started := _descendants(process, limit)) > limit:
            _kill(process, TOO_MANY_PROCESSES)
            for number in started:
                _kill(number)
            ended = True
    for _ in range(ROUNDS):
        left = [number for number in _processes() if _belongs(number, process)]
        if not left:
            return
        for number in left:
            _kill(number)
        time.sleep(PAUSE_S)


def _kill(number: int, by: signal.Signals = signal.SIGKILL) -> None:
    with contextlib.suppress(OSError):
        os.kill(number, by)


def _descendants(process: int, enough: int) -> list[int]:
    """Ids of its living descendants except this process; stops looking at more than `enough`."""
    found, parents = list[int](), [process]
    while parents and len(found) <= enough:
        parents = [child for parent in parents for child in _children(parent) if child != os.getpid()]
        found += parents
    return found


def _children(process: int) -> list[int]:
    """Ids of the children of all threads of a process."""
    try:
        threads = list(Path(f"/proc/{process}/task").iterdir())
        return [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:  # it has ended
        return []


def _processes() -> list[int]:
    own = os.getpid()
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != own]


def _belongs(number: int, process: int) -> bool:
    """Whether a living process is of the session of `process`, or has its mark."""
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        if state[0] == "Z":
            return False
        if int(state[3]) == process:
            return True
        environment = Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
    except (OSError, ValueError, IndexError):
        return False
    return f"{MARK}={process}".encode() in environment

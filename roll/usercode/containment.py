"""Ends what the code of a user has started together with the process that ran it, however that process ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import signal
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from roll.sandbox.isolation import adopt_orphans, signal_at_parents_end

MARKED_LIMIT, MARK = 10, 2**40
"""RLIMIT_LOCKS, which Linux does not use: MARK and its process id in a contained process and all that it starts, also
in a program with a clean environment and a session of its own."""

ROUNDS, PAUSE_S = 50, 0.02
"""Times that processes are looked for and killed, until none is left: new ones may start meanwhile."""

EMPTY_LOOKS = 3
"""Looks in a row that find no process before the search ends: one may start while a list is read."""

COUNT_INTERVAL_S = 0.2
"""Interval at which descendants are counted and remembered, and their memory is added up."""

WATCH_INTERVAL_S = 1.0
"""Interval at which descendants are remembered where none are counted: each look reads a file for every thread."""

MOST_PROCESSES = 4096
"""Descendants that are looked at where their number has no lower limit."""

TOO_MANY_PROCESSES = signal.SIGVTALRM
"""Signal that ends a process which has started more processes than it may."""

TOO_MUCH_MEMORY = signal.SIGPROF
"""Signal that ends a process which takes more memory than it may, together with what it has started."""

RESIDENT = ("RssAnon", "RssShmem", "VmSwap", "HugetlbPages")
"""Lines of /proc/PID/status that are memory and no pages of files."""

PROPORTIONAL = ("Pss_Anon", "Pss_Shmem", "SwapPss", "Private_Hugetlb", "Shared_Hugetlb")
"""The same in /proc/PID/smaps_rollup, where processes that share a page have equal parts of it."""


_watchdog, _adopts = 0, True
"""The watchdog of this process, and whether orphans among its descendants become its children."""


def contain(
    process_limit: int | None = None, memory_bytes: int | None = None, adopt: bool = True, driver: int | None = None
) -> None:
    """Makes the descendants of this process end with it, and it with its driver; call it before it has threads.

    The driver is the process that started this one; pass its id where it may have ended since.

    With more than `process_limit` descendants at a time, it ends together with them by TOO_MANY_PROCESSES; if they and
    it take more than `memory_bytes`, by TOO_MUCH_MEMORY. Shared mappings count, mapped files do not. Both limits are
    checked every COUNT_INTERVAL_S seconds, so they may be exceeded for that long.

    Its descendants stay its own if it is to `adopt` orphans, and are killed when it ends or gets SIGTERM. What is left
    when it has ended, in whatever way, is killed by a watchdog, a child of it: the processes of its session, those with
    its MARK, and the descendants that it saw when it last looked, with theirs. The watchdog of another contained
    process may be among them, so what has the mark of one that is killed is killed too. Only a process that removed the
    mark, left the session and lost its parent since the last look outlives a process that was killed. The watchdog also
    ends a process whose driver has ended: its own thread for that waits while a call holds the interpreter's lock.
    """
    global _watchdog, _adopts
    if adopt:
        adopt_orphans()
    process, driver = os.getpid(), driver or os.getppid()
    resource.setrlimit(MARKED_LIMIT, (MARK + process, resource.getrlimit(MARKED_LIMIT)[1]))
    _watchdog, _adopts = os.fork(), adopt
    if _watchdog == 0:
        with contextlib.suppress(BaseException):
            _watch(process, driver, process_limit, memory_bytes)
        os._exit(0)
    signal.signal(signal.SIGTERM, _end)
    atexit.register(kill_descendants)


def _end(*_: Any) -> None:
    kill_descendants()
    os._exit(1)


def kill_remaining() -> None:
    """As `kill_descendants`; ends the watchdog too where nothing is left, and no thread may start anything."""
    process = os.getpid()
    if _descendants([process], 1) != {_watchdog}:
        kill_descendants()
    elif len(os.listdir(f"/proc/{process}/task")) == 1:
        _kill(_watchdog)


def kill_descendants() -> None:
    """Kills what this process has started, except its watchdog.

    Where it adopts no orphans, other contained processes are left to their watchdogs, which find orphans too.
    """
    own = MARK + os.getpid()
    for _ in range(ROUNDS):
        children = psutil.Process().children(recursive=True)
        alive = [child for child in children if child.pid != _watchdog and _is_alive(child)]
        alive = [child for child in alive if _adopts or not MARK < _mark(child.pid) != own]
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


def _watch(process: int, driver: int, process_limit: int | None, memory_bytes: int | None) -> None:
    """Waits for the end of the contained process, or ends it for its descendants; then kills what it has left."""
    os.setsid()
    for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    os.closerange(0, 256)
    signal_at_parents_end(signal.SIGUSR1)
    enough = MOST_PROCESSES if process_limit is None else process_limit
    interval_s = WATCH_INTERVAL_S if process_limit is None and memory_bytes is None else COUNT_INTERVAL_S
    seen, ended = dict[int, int](), False
    while os.getppid() == process:
        if signal.sigtimedwait({signal.SIGUSR1}, interval_s) is not None:
            continue  # the thread that forked this process has ended, maybe without its process
        started = _descendants([process, *_alive(seen)], enough)
        seen = _alive(seen) | _start_times(started)
        by = _exceeded(process, started, process_limit, memory_bytes)
        if ended or _parent(process) not in (driver, None):  # where a signal was to end it, its code handles that
            _kill(process)
        elif by is not None:
            _kill(process, by)
            for number in started:
                _kill(number)
            ended = True
    _kill_left(process, seen)


def _kill_left(process: int, seen: Mapping[int, int]) -> None:
    """Kills what a process has left, of which these were seen; a process may start another one until it is killed."""
    marks, empty = {MARK + process}, 0
    for _ in range(ROUNDS):
        left = _alive(seen) | _start_times(each for each in _processes() if _belongs(each, process, marks))
        left |= _start_times(_descendants(left, MOST_PROCESSES))
        marks |= {mark for mark in map(_mark, left) if mark > MARK}
        empty = 0 if left else empty + 1
        if empty == EMPTY_LOOKS:
            return
        for number in left:
            _kill(number)
        time.sleep(PAUSE_S)


def _exceeded(
    process: int, started: Collection[int], process_limit: int | None, memory_bytes: int | None
) -> signal.Signals | None:
    if process_limit is not None and len(started) > process_limit:
        return TOO_MANY_PROCESSES
    if memory_bytes is not None and takes_more_than([process, *started], memory_bytes):
        return TOO_MUCH_MEMORY
    return None


def takes_more_than(processes: Sequence[int], num_bytes: int) -> bool:
    """Whether these processes take more memory, without pages of files; a page that they share counts once.

    To know what is shared, the kernel walks the page tables of each process. So that is asked only where the sum would
    be too large if nothing were shared.
    """
    resident = [_bytes_of(number, "status", RESIDENT) or 0 for number in processes]
    if sum(resident) <= num_bytes:
        return False
    exact = [_bytes_of(number, "smaps_rollup", PROPORTIONAL) for number in processes]
    return sum(most if part is None else part for part, most in zip(exact, resident, strict=True)) > num_bytes


def _bytes_of(number: int, file: str, names: Collection[str]) -> int | None:
    try:
        lines = [line.split() for line in Path(f"/proc/{number}/{file}").read_text().splitlines()]
    except OSError:
        return None
    found = [int(line[1]) * 2**10 for line in lines if line and line[0].removesuffix(":") in names]
    return sum(found) if found else None


def _kill(number: int, by: signal.Signals = signal.SIGKILL) -> None:
    with contextlib.suppress(OSError):
        os.kill(number, by)


def _descendants(roots: Iterable[int], enough: int) -> set[int]:
    """Ids of the descendants of some processes except this process; stops looking at more than `enough`."""
    found, parents = set[int](), list(roots)
    while parents and len(found) <= enough:
        children = {child for parent in parents for child in _children(parent)} - {os.getpid()}
        parents = list(children - found)
        found |= children
    return found


def _children(process: int) -> list[int]:
    try:
        threads = list(Path(f"/proc/{process}/task").iterdir())
        return [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:  # it has ended
        return []


def _processes() -> list[int]:
    own = os.getpid()
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != own]


def _start_times(numbers: Iterable[int]) -> dict[int, int]:
    """When each of these processes started that is alive; an id alone may be given to another process."""
    times = {number: _start_time(number) for number in numbers}
    return {number: started for number, started in times.items() if started is not None}


def _alive(seen: Mapping[int, int]) -> dict[int, int]:
    return {number: started for number, started in _start_times(seen).items() if started == seen[number]}


def _start_time(number: int) -> int | None:
    """When a living process started, in ticks since the machine did."""
    try:
        fields = _stat(number)
        return None if fields[0] == "Z" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def _parent(number: int) -> int | None:
    try:
        return int(_stat(number)[1])
    except (OSError, ValueError, IndexError):
        return None


def _stat(number: int) -> list[str]:
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()


def _mark(number: int) -> int:
    try:
        return resource.prlimit(number, MARKED_LIMIT)[0]
    except OSError:
        return 0


def _belongs(number: int, process: int, marks: Collection[int]) -> bool:
    """Whether a living process is of the session of `process`, or has one of the marks."""
    try:
        state = _stat(number)
        return state[0] != "Z" and (int(state[3]) == process or _mark(number) in marks)
    except (OSError, ValueError, IndexError):
        return False

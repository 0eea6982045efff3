"""What every process of a run has: its environment, cores, log and garbage collection; and how processes end.

Imports no torch: a worker process is pinned to its cores before torch counts them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from roll.base.custom_modules import CUSTOM_MODULES

if TYPE_CHECKING:
    from roll.configs.run_options import ProcessOptions

END_TIMEOUT_S = 5.0
"""A killed process is gone within milliseconds; an engine's children notice within seconds."""

END_POLL_S = 0.02


def process_environment(config: ProcessOptions, threads: int) -> dict[str, str]:
    """Environment variables of every process of a run that computes with `threads` threads."""
    return {**thread_environment(threads), **config.system_envs}


def thread_environment(threads: int) -> dict[str, str]:
    """Environment variables of a process with `threads` compute threads and the driver's import path."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONPATH": import_path(),
        "PYTHONSAFEPATH": "1",
        CUSTOM_MODULES: os.environ.get(CUSTOM_MODULES, ""),
    }


def import_path() -> str:
    """The driver's import path, for PYTHONPATH; the standard library comes first, so that no file replaces it."""
    library = os.path.dirname(os.__file__)
    standard = (library, os.path.join(library, "lib-dynload"))
    return os.pathsep.join(sorted((path or os.getcwd() for path in sys.path), key=lambda path: path not in standard))


def log_file(config: ProcessOptions, name: str) -> str:
    folder = Path(config.logging_dir or Path(config.output_dir) / "logs").absolute()
    return str(folder / f"{name}.log")


def print_to(log_file: str) -> None:
    """Redirects stdout and stderr, child processes included, to the log; SIGUSR1 adds the stack of every thread."""
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


def pin(cores: tuple[int, ...]) -> None:
    """Pins every running thread of this process to `cores`; later threads inherit the affinity."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses garbage collection while modules are imported: it takes a fifth of that time, and finds nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def gc_freeze() -> None:
    """Exempts all current objects from garbage collection; call it once a process has finished its start-up.

    Modules such as torch and SGLang leave millions of permanent objects. Every full collection would traverse them,
    half a second at a time, and short-lived small objects such as requests are what triggers full collections.
    It is enabled from now on.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def gc_unfreeze() -> None:
    """Makes frozen objects collectable again, so that the collection at process exit finds unused ones."""
    gc.unfreeze()


def descendants(process: psutil.Process) -> list[psutil.Process]:
    """The process and all processes below it."""
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


_followed: dict[str, tuple[int, int]] = {}
"""Process id and file descriptor of processes by name; the descriptor stays that of a dead process."""

_PIDFD_GET_INFO, _INFO_EXIT = 0xC040FF0B, 1 << 3


def follow(name: str, process_id: int) -> None:
    """Lets `how_ended` say later how this process of this node ended."""
    if name in _followed:
        os.close(_followed.pop(name)[1])
    with contextlib.suppress(OSError):
        _followed[name] = process_id, os.pidfd_open(process_id)


def how_ended(name: str) -> str:
    """`was killed by SIGKILL` or `exited with code 3`; `died` of a process that the kernel says nothing about."""
    process_id, descriptor = _followed.get(name, (0, -1))
    info, code = bytearray(struct.pack("<Q56x", _INFO_EXIT)), -1
    with contextlib.suppress(OSError, ValueError):  # before Linux 6.15 only of a zombie
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, info)
        if info[0] & _INFO_EXIT:
            code = struct.unpack_from("<i", info, 60)[0]
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
        code = int(fields[-1]) if fields[0] == "Z" else code
    if code < 0:
        return "died"
    return f"was killed by {signal.Signals(code & 0x7F).name}" if code & 0x7F else f"exited with code {code >> 8}"


def kill(process_id: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process_id, signal.SIGKILL)


class ProcessGroup:
    """A group of processes that is killed as soon as this process ends, however it ends, or by `end`.

    Signals to the group of this process, such as those of `timeout` or of a terminal, do not reach it. Its first
    process is a shell that waits for the end of a pipe, so the group's id is not used again while the shell waits.
    Ray's own processes are in it. Its workers are not, since Ray gives each of them a group of its own: they end with
    the raylet that started them, by `end_with_parent`.
    """

    def __init__(self) -> None:
        command = ["/bin/sh", "-c", "trap '' HUP INT TERM; read line; kill -9 0"]
        self._shell = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, process_group=0)
        self.id = self._shell.pid

    def end(self) -> None:
        """Kills what is left of the group; may be called twice."""
        if self._shell.poll() is None:
            os.killpg(self.id, signal.SIGKILL)
        self._shell.communicate()


def end(processes: list[psutil.Process]) -> None:
    """Waits for processes that are ending and kills any that have not ended after END_TIMEOUT_S."""
    for process in wait_for_end(processes, END_TIMEOUT_S):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    wait_for_end(processes, END_TIMEOUT_S)


def has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended with all its threads; its parent may take a second to notice."""
    try:
        return not process.is_running() or (process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1)
    except psutil.NoSuchProcess:
        return True


def wait_for_end(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Waits up to `timeout_s` for processes to end, and returns the processes that still run.

    Their exit codes remain for the process that started them, which `psutil.wait_procs` would take.
    """
    until = time.monotonic() + timeout_s
    while (alive := [process for process in processes if not has_ended(process)]) and time.monotonic() < until:
        time.sleep(END_POLL_S)
    return alive

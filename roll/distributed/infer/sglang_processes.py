"""The processes of an SGLang engine: how schedulers start, and how they have ended.

On a CPU schedulers are forked from a server process that has imported SGLang. It imports it while the worker does, and
stays, so an engine that is started again imports nothing:

    worker --starts--> fork server --forks--> scheduler
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from roll.distributed.infer.sglang_stops import decode_for_stop_strings
from roll.distributed.processes import kill, wait_for_end
from roll.sandbox.isolation import end_with_parent
from roll.usercode.stopped import is_stopped

SHARED_PREFIXES = ("sgl_shm_", "sglang_loads_")
"""Beginnings of the names of SGLang's files in shared memory."""

EXIT_CODE_S = 5.0
"""Longest wait for the exit code of a process that is dead: its other threads may take a moment to end."""

EXIT_CODE_POLL_S = 0.02

SERVER_END_S = 1.0
"""Longest wait for the end of a fork server that has closed its pipes."""

SERVER_DIED = 255
"""Python's exit code of a forked process whose fork server died with it."""

PRELOAD = "roll.distributed.infer.sglang_preload"

PRELOADED = (PRELOAD, "ray")
"""Modules that the server imports; Ray's worker is the main module of this process, which Python imports everywhere."""

SOCKET_PATH = 107
"""Longest path of a Unix socket."""

LOG_TAIL_BYTES = 1 << 18
"""How much of the end of a log is searched for an exception."""

TRACEBACK = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*(\S.*)")
"""A traceback; its group is the line after the indented ones, which names the exception."""

_server_thread = ThreadPoolExecutor(1, thread_name_prefix="sglang-fork-server")


def import_engine(forks: bool, schedulers: list[BaseProcess]) -> Any:
    """SGLang's engine without its detokenizer process, which is not needed for token ids.

    Args:
        forks: fork the schedulers from the server of `start_fork_server`.
        schedulers: gets the processes that the engine starts.
    """
    from sglang.srt.entrypoints import engine as module

    if forks:
        module.mp = _Forks()

    class TokenEngine(module.Engine):  # type: ignore[misc]  # SGLang is not typed
        run_scheduler_process_func = SchedulerProcess()

        @classmethod
        def _launch_scheduler_processes(cls, *args: Any, **options: Any) -> Any:
            launched = super()._launch_scheduler_processes(*args, **options)
            schedulers.extend(launched[1])
            return launched

        @classmethod
        def _launch_detokenizer_subprocesses(cls, *_: Any, **__: Any) -> tuple[list[Any], list[str]]:
            return [], []

    return TokenEngine


class SchedulerProcess:
    """SGLang's `run_scheduler_process`, with the environment of the worker; collects no garbage until it is imported.

    A new process unpickles this before the arguments, whose classes import SGLang.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        from sglang.srt.managers.scheduler import run_scheduler_process

        gc.enable()
        decode_for_stop_strings()
        run_scheduler_process(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., SchedulerProcess], tuple[dict[str, str]]]:
        return _in_new_process, ({**os.environ},)


def _in_new_process(environment: dict[str, str]) -> SchedulerProcess:
    gc.disable()
    end_with_parent()
    preload = sys.modules.get(PRELOAD)
    if preload is not None and os.getppid() != preload.SERVER:  # the server died before the kernel was asked
        os._exit(1)
    os.environ.update(environment)
    return SchedulerProcess()


class _Forks:
    """Python's `multiprocessing` with processes from the fork server, whatever start method SGLang sets."""

    Process = multiprocessing.get_context("forkserver").Process

    def __getattr__(self, name: str) -> Any:
        return getattr(multiprocessing, name)


def start_fork_server() -> None:
    """Starts the server unless it runs; its environment is that of this process now. It ends with this process.

    The kernel kills it when the thread that has started it ends, and schedulers when the server ends. A server that is
    stopped by a signal forks nothing: it is killed, and another one started.
    """
    multiprocessing.set_forkserver_preload([*PRELOADED])
    _server_thread.submit(_ensure_server).result()


def _ensure_server() -> None:
    server = _server_id()
    if server is not None and is_stopped(server):
        kill(server)
        wait_for_end([psutil.Process(server)], EXIT_CODE_S)
    _use_socket_folder_of_session()
    forkserver.ensure_running()


def _server_id() -> int | None:
    server: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return server


def _use_socket_folder_of_session() -> None:
    """Lets Python bind the server's socket where Ray's are, in a folder that is removed at the end of the run.

    Python removes its own folder when the process ends in order, and a worker is killed.
    """
    from ray._private import worker

    if worker._global_node is not None:
        folder = worker._global_node.get_sockets_dir_path()
        if len(f"{folder}/listener-12345678") <= SOCKET_PATH:
            multiprocessing.current_process()._config.setdefault("tempdir", folder)


async def exit_reason(child: BaseProcess | None) -> str:
    """How a child process has ended, to be appended to a sentence; empty where that is not known.

    A process counts as dead when its main thread is; it has an exit code only when its other threads have ended too.
    """
    until = time.monotonic() + EXIT_CODE_S
    while child is not None and child.exitcode is None and time.monotonic() < until:
        await asyncio.sleep(EXIT_CODE_POLL_S)
    code = None if child is None else child.exitcode
    if code == SERVER_DIED and isinstance(child, _Forks.Process):
        return f" with the server that had forked it{_exit_of(_server_exit_code())}"
    return _exit_of(code)


async def kill_reason(schedulers: Sequence[BaseProcess]) -> str:
    """How a signal has ended one of these processes, or the server that forks them; empty where none has.

    SIGABRT does not count: a process sends it to itself after an error.
    """
    until = time.monotonic() + SERVER_END_S
    while True:
        codes = [scheduler.exitcode for scheduler in schedulers]
        for code in [*codes, _server_exit_code()]:
            if code is not None and code < 0 and code != -signal.SIGABRT:
                return _exit_of(code).removeprefix(", ")
        if (codes and SERVER_DIED not in codes) or time.monotonic() > until:
            return ""
        await asyncio.sleep(EXIT_CODE_POLL_S)


def _server_exit_code() -> int | None:
    """Exit code of the fork server, minus the signal that killed it; leaves it to Python, which starts another one."""
    server = _server_id()
    if server is None:
        return None
    try:
        ended = os.waitid(os.P_PID, server, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _exit_of(code: int | None) -> str:
    if code is None:
        return ""
    if code >= 0:
        return f" with exit code {code}"
    names = {each.value: each.name for each in signal.Signals}
    killer = ", possibly by the kernel's out-of-memory killer" if -code == signal.SIGKILL else ""
    return f", killed by {names.get(-code, f'signal {-code}')}{killer}"


def size_of(log: str) -> int:
    """Bytes that a log has; 0 if there is none."""
    try:
        return Path(log).stat().st_size
    except OSError:
        return 0


def last_exception(log: str, start: int) -> str:
    """The exception that ends the last traceback of a log, such as `ImportError: No module named 'x'`; empty if none.

    The log is read from byte `start` on, and need not exist.
    """
    try:
        with open(log, "rb") as file:
            file.seek(max(start, size_of(log) - LOG_TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    found = TRACEBACK.findall(text)
    return found[-1].strip() if found else ""


def shared_files(process_id: int) -> set[Path]:
    """Files in shared memory that SGLang made and that the process has mapped."""
    try:
        lines = Path(f"/proc/{process_id}/maps").read_text().splitlines()
    except OSError:
        return set()
    names = {line.split(maxsplit=5)[-1].removesuffix(" (deleted)") for line in lines if "/dev/shm/" in line}
    return {Path(name) for name in names if Path(name).name.startswith(SHARED_PREFIXES)}


def ignore_quit_signal() -> None:
    """Keeps this process alive when an engine process fails.

    SGLang's processes report a failure by SIGQUIT to their parent, whose default is to die silently; and Python
    installs handlers in the main thread only, where a Ray actor's code does not run.
    """
    ctypes.CDLL(None).signal(signal.SIGQUIT, ctypes.c_void_p(1))

"""How the processes of an engine have ended."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess

import psutil

from roll.distributed.strategy.sglang_processes import exit_reason, is_alive

DIES_SLOWLY = """
import ctypes, os, signal, sys, threading

def kill():
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)

threading.Thread(target=kill).start()
ctypes.CDLL(None).pthread_exit(None)
"""


class Child(BaseProcess):
    """A process that `subprocess` has started."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._started = process

    @property
    def exitcode(self) -> int | None:
        return self._started.poll()


def test_how_a_process_died_is_known_once_its_last_thread_has_ended() -> None:
    started = subprocess.Popen([sys.executable, "-c", DIES_SLOWLY], stdin=subprocess.PIPE)
    process, child = psutil.Process(started.pid), Child(started)
    while is_alive(process):
        time.sleep(0.01)
    assert child.exitcode is None

    async def run() -> str:
        reason = asyncio.create_task(exit_reason(child))
        await asyncio.sleep(0.1)
        assert not reason.done()
        assert started.stdin is not None
        started.stdin.close()
        return await reason

    assert asyncio.run(run()).startswith(", killed by SIGKILL")
    assert asyncio.run(exit_reason(None)) == ""

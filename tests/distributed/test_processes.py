"""Garbage collection during start-up, and how processes end."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import time

import psutil
import pytest

from roll.distributed.processes import end, follow, gc_paused, has_ended, how_ended

DIES_WITH_A_THREAD_LEFT = """
import ctypes, sys, threading
threading.Thread(target=sys.stdin.read).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def status_of(process: psutil.Process) -> str | None:
    return process.status() if process.is_running() else None


def test_garbage_collection_is_as_before_after_a_pause() -> None:
    with gc_paused():
        assert not gc.isenabled()
        with gc_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), gc_paused():
        import no_such_module  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()


def test_a_dead_process_is_not_waited_for_until_its_parent_asks_for_its_exit_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("roll.distributed.processes.END_TIMEOUT_S", math.inf)
    child = subprocess.Popen([sys.executable, "-c", ""])
    process = psutil.Process(child.pid)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    end([process])
    assert status_of(process) == psutil.STATUS_ZOMBIE and has_ended(process)
    assert child.wait() == 0
    assert has_ended(process)


def test_a_process_whose_main_thread_has_ended_is_waited_for() -> None:
    child = subprocess.Popen([sys.executable, "-c", DIES_WITH_A_THREAD_LEFT], stdin=subprocess.PIPE)
    process = psutil.Process(child.pid)
    while status_of(process) != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert not has_ended(process)
    child.communicate()
    assert has_ended(process)


def test_a_process_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll.distributed.processes.END_TIMEOUT_S", 0.2)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10_000)"])
    end([psutil.Process(child.pid)])
    assert child.wait() == -9


@pytest.mark.parametrize(
    ("end_it", "text"), [("kill -KILL $$", "was killed by SIGKILL"), ("exit 3", "exited with code 3")]
)
def test_how_a_process_ended_is_known_while_its_parent_has_not_waited_for_it(end_it: str, text: str) -> None:
    child = subprocess.Popen(["sh", "-c", f"read line; {end_it}"], stdin=subprocess.PIPE)
    follow("worker-0", child.pid)
    assert how_ended("worker-0") == how_ended("unknown") == "died"
    assert child.stdin is not None
    child.stdin.close()
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert how_ended("worker-0") == text
    child.wait()

"""How the processes of an engine have ended, and the server that forks them; the server here imports nothing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess

import psutil
import pytest

from roll.distributed.infer.sglang_processes import exit_reason, kill_reason, last_exception, size_of
from roll.usercode.stopped import is_alive

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


SERVER = """
import asyncio, os, signal, time
import psutil
from roll.distributed.infer import sglang_processes
from roll.distributed.infer.sglang_processes import _Forks, _server_id, exit_reason, start_fork_server
from roll.usercode.stopped import is_stopped

sglang_processes.PRELOADED = ()
start_fork_server()
first = _server_id()
start_fork_server()
assert _server_id() == first, "it runs"
os.kill(first, signal.SIGSTOP)
while not is_stopped(first):
    time.sleep(0.01)
start_fork_server()
assert _server_id() != first and not psutil.pid_exists(first)
child = _Forks.Process(target=time.sleep, args=(600,))
child.start()
os.kill(_server_id(), signal.SIGKILL)
print(asyncio.run(exit_reason(child)))
os.kill(child.pid, signal.SIGKILL)
"""


def test_a_stopped_fork_server_is_replaced_and_the_signal_that_killed_one_is_named() -> None:
    done = subprocess.run([sys.executable, "-c", SERVER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(" with the server that had forked it, killed by SIGKILL, possibly by")


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGTERM)", "killed by SIGTERM"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL, possibly by the kernel's out-of-memory killer"),
        ("os.abort()", ""),
        ("sys.exit(1)", ""),
        ("", ""),
    ],
)
def test_only_a_signal_from_outside_counts_as_killed(end: str, reason: str) -> None:
    script = f"import os, signal, sys\n{end}"
    scheduler, other = (subprocess.Popen([sys.executable, "-c", code]) for code in (script, ""))
    scheduler.wait(), other.wait()
    assert asyncio.run(kill_reason([Child(other), Child(scheduler)])) == reason


SERVER_DIES_FIRST = """
import asyncio, os, signal, threading, time
from roll.distributed.infer import sglang_processes
from roll.distributed.infer.sglang_processes import _Forks, _server_id, kill_reason, start_fork_server

sglang_processes.PRELOADED = ()
start_fork_server()
assert asyncio.run(kill_reason([])) == ""
server = _server_id()
os.kill(server, signal.SIGSTOP)  # as one that still imports
threading.Timer(1.0, os.kill, (server, signal.SIGKILL)).start()
try:
    _Forks.Process(target=time.sleep, args=(600,)).start()
except EOFError:
    print(asyncio.run(kill_reason([])))
"""


def test_a_fork_server_that_was_killed_before_it_forked_is_the_cause() -> None:
    done = subprocess.run([sys.executable, "-c", SERVER_DIES_FIRST], capture_output=True, text=True)
    assert done.stdout.startswith("killed by SIGKILL"), done.stderr


ORPHAN = """
import os, sys, types
from roll.distributed.infer.sglang_processes import PRELOAD, _in_new_process

sys.modules[PRELOAD] = types.SimpleNamespace(SERVER=os.getppid() + int(sys.argv[1]))
_in_new_process({})
sys.exit(7)
"""


def test_a_scheduler_whose_fork_server_has_died_ends_before_it_starts() -> None:
    ended = [subprocess.run([sys.executable, "-c", ORPHAN, other]).returncode for other in ("0", "1")]
    assert ended == [7, 1]


LOG = """loading weights
[2026-11-26 17:14:53] Scheduler hit an exception: Traceback (most recent call last):
  File "model.py", line 27, in forward
    output = norm(x)
             ^^^^^^^
RuntimeError: input must be a tensor

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "runner.py", line 492, in __init__
    raise Exception(

Exception: capture failed: input must be a tensor
Possible solutions:
1. a smaller value
"""


def test_the_last_exception_of_a_start_is_found_in_its_log(tmp_path):
    log = tmp_path / "actor_infer-0.log"
    assert (size_of(str(log)), last_exception(str(log), 0)) == (0, "")
    log.write_text(LOG)
    assert last_exception(str(log), 0) == "Exception: capture failed: input must be a tensor"
    before = size_of(str(log))
    assert last_exception(str(log), before) == ""
    with log.open("a") as file:
        file.write("x" * (1 << 19))
        file.write("\nTraceback (most recent call last):\n  File\nImportError: No module named 'gguf'\n")
    assert last_exception(str(log), before) == "ImportError: No module named 'gguf'"
    with log.open("ab") as file:
        file.write(b"\xff Traceback (most recent call last):\n  File")
    assert last_exception(str(log), before) == "ImportError: No module named 'gguf'"

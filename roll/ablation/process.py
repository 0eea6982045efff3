"""One run as a process group of its own: started, waited for, and ended whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

GRACE_S = 60.0
"""After SIGTERM a run ends its workers and engines by itself; what is left after this is killed."""

CAUSE_LINES = 12
"""Lines of output that say why a run failed: the message, and for a bug the end of its traceback."""

TAIL_BYTES = 20_000
"""Where those lines are looked for."""


def run_process(command: Sequence[str], log: Path, grace_s: float = GRACE_S) -> int:
    """Runs a command to its end, its output appended to `log`, and returns its exit code.

    It gets a session of its own, so Ctrl-C reaches this process only: then the command is asked to end, and after
    `grace_s`, or at a second Ctrl-C, its whole process group is killed.

    Raises:
        KeyboardInterrupt: after the group has ended.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait()
        except BaseException:
            process.send_signal(signal.SIGTERM)
            _wait(process, grace_s)
            raise
        finally:
            _kill_group(process.pid)
            process.wait()


def last_lines(log: Path, count: int = CAUSE_LINES) -> str:
    """The last lines of a log that say something; empty when there is none."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join([line.rstrip() for line in lines if line.strip()][-count:])


def _wait(process: subprocess.Popen[bytes], grace_s: float) -> None:
    try:
        process.wait(grace_s)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        return


def _kill_group(pid: int) -> None:
    """Whatever the run has left in its session's group; nothing, as a rule."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return

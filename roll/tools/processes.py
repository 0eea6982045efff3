"""A command in a process of its own: its output, its end, and what it printed last."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

CONSOLE_LOG = "console.log"
"""File with everything that a command prints."""

GRACE_S = 60.0
"""Seconds between SIGTERM, after which a run stops its workers and engines itself, and SIGKILL."""

POLL_S = 0.5
"""Seconds between two calls of `poll` while a command runs."""

CAUSE_LINES = 12
"""Lines of output kept of a failed run: the message, and for a bug the end of its traceback."""

TAIL_BYTES = 20_000
"""End of a log in which `tail` looks for lines."""


def run_process(
    command: Sequence[str],
    log: Path,
    grace_s: float = GRACE_S,
    pass_fds: Sequence[int] = (),
    variables: Mapping[str, str] | None = None,
    poll: Callable[[], None] | None = None,
) -> int:
    """Runs a command, appends its output to `log`, and returns its exit code.

    The command runs in its own session, so Ctrl-C reaches only this process. It then gets SIGTERM, and its process
    group gets SIGKILL after `grace_s` or a second Ctrl-C. `variables` are added to the environment;
    `poll` is called now and then while the command runs.

    Raises:
        KeyboardInterrupt: after the process group has ended.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=pass_fds,
            env=None if variables is None else {**os.environ, **variables},
        )
        try:
            return _wait(process, poll)
        except BaseException:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                process.wait(grace_s)
            raise
        finally:
            with suppress(ProcessLookupError):  # raised if no process of the group is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen[bytes], poll: Callable[[], None] | None) -> int:
    if poll is None:
        return process.wait()
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(POLL_S)
        poll()


def tail(log: Path, count: int = CAUSE_LINES) -> str:
    """The last non-empty lines of a log; empty if there is no log."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join([line.rstrip() for line in lines if line.strip()][-count:])

"""One run as a process group of its own: started, waited for, and ended whatever happens."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from roll.configs.errors import ConfigError, Problem
from roll.configs.pipeline import RLConfig
from roll.pipeline.checkpoint import CheckpointManager
from roll.trackers.run_json import FILE_NAME, plain

GRACE_S = 60.0
"""After SIGTERM a run ends its workers and engines by itself; what is left after this is killed."""

CAUSE_LINES = 12
"""Lines of output that say why a run failed: the message, and for a bug the end of its traceback."""

LOCK = ".lock"
"""File in the folder of a grid that whoever works there holds."""

TAIL_BYTES = 20_000
"""Where those lines are looked for."""


@contextmanager
def held(folder: Path) -> Iterator[int]:
    """Keeps other grids out of a folder; gives the descriptor that does.

    A run that inherits it keeps the folder held when it outlives its grid, so that no second one joins it.

    Raises:
        ConfigError: the folder cannot be written, or another grid, or a run it left behind, is at work there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("w")
    except OSError as error:
        raise ConfigError([Problem("--out", f"{folder} cannot be written: {error.strerror}; name another")]) from None
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            advice = (
                f"another grid, or a run it left behind, is at work in {folder}; wait for it, or use another folder"
            )
            raise ConfigError([Problem("--out", advice)]) from None
        yield file.fileno()


def run_process(command: Sequence[str], log: Path, grace_s: float = GRACE_S, inherit: Sequence[int] = ()) -> int:
    """Runs a command to its end, its output appended to `log`, and returns its exit code.

    It gets a session of its own, so Ctrl-C reaches this process only: then the command is asked to end, and after
    `grace_s`, or at a second Ctrl-C, its whole process group is killed.

    Raises:
        KeyboardInterrupt: after the group has ended.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=inherit,
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


Progress = Literal["finished", "resumable", "new"]
"""`resumable` has a complete checkpoint of the same configuration."""

NOT_COMPARED = ("source", "resume_from_checkpoint")
"""Keys of a configuration that do not change what is learned: where it came from, and how it was started."""

CHECKPOINTS = "checkpoints"
"""Folder of a run that holds them."""


def progress(folder: Path, config: RLConfig) -> Progress:
    """How far the run in `folder` is, if its run.json says that it had this configuration."""
    record = read_record(folder)
    if record is None or _compared(record["config"]) != _compared(_as_json(config)):
        return "new"
    if (record.get("summary") or {}).get("status") == "finished":
        return "finished"
    return "resumable" if CheckpointManager(folder / CHECKPOINTS, 0).complete() else "new"


def read_record(folder: Path) -> dict[str, Any] | None:
    """The run.json of a run; None where there is none that can be read."""
    try:
        record = json.loads((folder / FILE_NAME).read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("config"), dict) else None


def forget(folder: Path) -> None:
    """Removes the checkpoints of a run of another configuration, which this one must not go on from."""
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)


def _as_json(config: RLConfig) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(config), default=plain))


def _compared(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in NOT_COMPARED}

"""Health of a run: a report every few seconds, and the peak memory of all of its processes."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import psutil

from roll.base.errors import ConfigError, Problem, RunError, RunInterrupted
from roll.base.events import Repeats
from roll.configs.run_options import CheckpointOptions, ProcessOptions
from roll.configs.user_code import failure_text
from roll.pipeline.checkpoint import checkpoint_folder
from roll.trackers.files import HEALTH_FILE, FolderInUseError, locked, write_in_place, write_whole

logger = logging.getLogger(__name__)

_REPEATS = Repeats(logger)

INTERVAL_S = 5.0
"""Seconds between two reports: often enough to watch, and cheap."""

VALID_S = 6 * INTERVAL_S
"""How long a report of a running run is valid; a busy driver may be late with the next one."""

Health = Mapping[str, Any]
"""`status` (running, finished, interrupted or failed), `time` (seconds since 1970), and the state of each component."""


@runtime_checkable
class Monitor(Protocol):
    """Watches a run; `async_training.monitor_class` names such a class, constructed with the config of the run."""

    def report(self, health: Health) -> None:
        """Receives the health of the run, every few seconds and once at its end; must not block."""


class HealthFile:
    """Writes output_dir/health.json: the report is out of date after its `valid_until`, and the driver hangs or died.

    On a full disk the report is written over the last one, which needs no space.
    """

    def __init__(self, config: ProcessOptions) -> None:
        self._path = Path(config.output_dir) / HEALTH_FILE

    def report(self, health: Health) -> None:
        """Replaces the file, so that a reader never sees half of it."""
        valid = {"valid_until": health["time"] + VALID_S} if health.get("status") == "running" else {}
        text = json.dumps({**health, **valid}, indent=2) + "\n"
        try:
            write_whole(self._path, lambda file: file.write(text))
        except RunError:
            if not self._path.exists():
                raise
            write_in_place(self._path, text)

    def begin(self, stage: str) -> None:
        """Replaces what an earlier run in this folder reported last."""
        self.report({"status": "running", "time": time.time(), "stage": stage})

    def end(self, status: str) -> None:
        """Writes the last report of a run that ended without one."""
        try:
            last = json.loads(self._path.read_text())
            if last["status"] == "running":
                del last["valid_until"]
                self.report({**last, "status": status, "time": time.time()})
        except (OSError, ValueError, KeyError, TypeError, RunError) as error:
            logger.warning("could not write to %s that the run is %s: %s", self._path, status, error)


@contextmanager
def lock_folders(config: CheckpointOptions) -> Iterator[None]:
    """Keeps other runs out of output_dir and of the folder of checkpoints while the block runs; see `locked`.

    Raises:
        ConfigError: a run that is alive writes there, or a folder cannot be written.
    """
    folders = {"output_dir": Path(config.output_dir)}
    if checkpoint_folder(config).resolve() != folders["output_dir"].resolve():
        folders["checkpoint_dir"] = checkpoint_folder(config)
    with ExitStack() as held:
        for key, folder in folders.items():
            try:
                held.enter_context(locked(folder))
            except FolderInUseError as error:
                message = f"{folder} is that of a run which is alive, process {error.process}; wait until it ends, or "
                raise ConfigError([Problem(key, f"{message}use another {key}")], config.source.file) from None
            except OSError as error:
                message = f"{folder} cannot be written: {error.strerror or error}; use another folder"
                raise ConfigError([Problem(key, message)], config.source.file) from None
        yield


@asynccontextmanager
async def watched(
    read: Callable[[], Awaitable[Health]], monitor: Monitor, interval_s: float = INTERVAL_S
) -> AsyncIterator[None]:
    """Reports the health that `read` returns while the block runs, and once more when it ended.

    An exception of `read`, or no answer within `interval_s`, is reported as `error`. A monitor that raises is
    logged; the run continues.
    """
    task = asyncio.create_task(_watch(read, monitor, interval_s))
    status = "finished"
    try:
        yield
    except BaseException as error:
        status = ended_by(error)
        raise
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        _report(monitor, status, await read_in_time(read, interval_s))


def ended_by(error: BaseException) -> str:
    interrupted = isinstance(error, asyncio.CancelledError | KeyboardInterrupt | RunInterrupted)
    return "interrupted" if interrupted else "failed"


async def _watch(read: Callable[[], Awaitable[Health]], monitor: Monitor, interval_s: float) -> None:
    while True:
        _report(monitor, "running", await read_in_time(read, interval_s))
        await asyncio.sleep(interval_s)


async def read_in_time(read: Callable[[], Awaitable[Health]], within_s: float) -> Health:
    """The health that `read` returns; its error, or that it did not answer in time, under `error`."""
    try:
        async with asyncio.timeout(within_s):
            return await read()
    except TimeoutError:
        return {"error": f"no answer within {within_s:g} s"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _report(monitor: Monitor, status: str, components: Health) -> None:
    try:
        monitor.report({"status": status, "time": time.time(), **components})
    except Exception as error:  # of the user's class, every few seconds
        cause = str(error) if isinstance(error, OSError | RunError) else failure_text(error, type(monitor))
        _REPEATS.warn(cause, f"the monitor failed: {cause}")


MEMORY_INTERVAL_S = 1.0
"""Seconds between samples: large allocations last for many seconds, and a sample costs milliseconds."""


def resident_bytes() -> int:
    """Resident memory of this process and its descendants, in bytes.

    A page that several processes share counts for each of them, so this is an upper bound. The exact figure (PSS) costs
    a hundred times as much to read. A process that was forked and runs the same program as its parent, such as one of
    hundreds of agents, counts with what it has more than its parent.
    """
    own = psutil.Process()
    total, seen = 0, dict[int, tuple[list[str], int]]()
    for process in [own, *own.children(recursive=True)]:
        try:
            resident, command, parent = process.memory_info().rss, process.cmdline(), process.ppid()
        except psutil.NoSuchProcess:
            continue
        seen[process.pid] = command, resident
        inherited = seen[parent][1] if parent in seen and seen[parent][0] == command else 0
        total += max(0, resident - inherited)
    return total


class PeakMemory:
    """Samples `resident_bytes` on a thread; use as a context manager."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak-memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, resident_bytes())
            if self._stop.wait(MEMORY_INTERVAL_S):
                return

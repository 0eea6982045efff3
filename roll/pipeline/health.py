"""Whether the components of a run are alive and getting on, said every few seconds while it runs."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from roll.configs.pipeline import BaseConfig

logger = logging.getLogger(__name__)

FILE_NAME = "health.json"

INTERVAL_S = 5.0
"""Between two reports: often enough to watch, too seldom to cost anything."""

Health = Mapping[str, Any]
"""`status` (running, finished or failed), `time` (seconds since 1970), and per component what it says of itself."""


@runtime_checkable
class Monitor(Protocol):
    """Watches a run: `async_training.monitor_class` names a class that is made with the run's config."""

    def report(self, health: Health) -> None:
        """Takes the health of the run, every few seconds and once at its end; must not block."""


class HealthFile:
    """Keeps output_dir/health.json: a `time` long past says that the driver hangs or is gone."""

    def __init__(self, config: BaseConfig) -> None:
        """Takes the run's config."""
        self._path = Path(config.output_dir) / FILE_NAME

    def report(self, health: Health) -> None:
        """Replaces the file, so that a reader never sees half of it."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        aside = self._path.with_suffix(".partial")
        aside.write_text(json.dumps(health, indent=2) + "\n")
        os.replace(aside, self._path)


@asynccontextmanager
async def watched(
    ask: Callable[[], Awaitable[Health]], monitor: Monitor, interval_s: float = INTERVAL_S
) -> AsyncIterator[None]:
    """Reports what `ask` answers while the block runs, and how the block ended.

    A component that gives no answer within `interval_s` is reported as that. A monitor or component that raises is
    logged and watched no longer; the run goes on.
    """
    task = asyncio.create_task(_watch(ask, monitor, interval_s))
    status = "failed"
    try:
        yield
        status = "finished"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        try:
            monitor.report({"status": status, "time": time.time()})
        except Exception:
            logger.exception("the monitor failed at the end of the run")


async def _watch(ask: Callable[[], Awaitable[Health]], monitor: Monitor, interval_s: float) -> None:
    try:
        while True:
            try:
                async with asyncio.timeout(interval_s):
                    components = await ask()
            except TimeoutError:
                components = {"error": f"no answer within {interval_s:g} s"}
            monitor.report({"status": "running", "time": time.time(), **components})
            await asyncio.sleep(interval_s)
    except Exception:
        logger.exception("health is no longer watched")

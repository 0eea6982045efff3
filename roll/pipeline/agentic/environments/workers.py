"""The lives of a pool's workers: brought up under a deadline, watched, replaced, killed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from roll.pipeline.agentic.environments.fleet import Fleet
from roll.pipeline.agentic.environments.types import EnvWorker, EnvWorkerError

logger = logging.getLogger(__name__)


class EnvWorkers:
    """Does what `Fleet` decides, and tells it what becomes of the workers.

    Attributes:
        closed: there are no workers any more, and there will be none.
    """

    def __init__(self, count: int, capacity: int, start_timeout_s: float, launch: Callable[[], EnvWorker]) -> None:
        """Starts nothing.

        Args:
            count: workers that take environments.
            capacity: environments one worker holds.
            start_timeout_s: deadline of a worker's start, and of an environment's wait for a worker.
            launch: begins to start a worker.
        """
        self._start_timeout_s, self._launch = start_timeout_s, launch
        self._fleet = Fleet(count, capacity, self._begin, self._kill)
        self._workers: dict[int, EnvWorker] = {}
        self._killed: list[EnvWorker] = []
        self._starting: dict[int, asyncio.Task[None]] = {}
        self._not_started: list[str] = []
        self.closed = False
        self.leave, self.hung = self._fleet.leave, self._fleet.hung

    @property
    def full(self) -> bool:
        """Whether a worker takes environments but none has room."""
        return self._fleet.full

    @property
    def starting(self) -> list[asyncio.Task[None]]:
        """Workers that are being brought up."""
        return list(self._starting.values())

    async def start(self) -> None:
        """Waits until all workers are up.

        Raises:
            EnvWorkerError: which did not start, and why.
        """
        self.raise_if_closed()
        self._not_started.clear()
        self._fleet.fill()
        if self._starting:
            await asyncio.wait(self._starting.values())
        if self._not_started:
            raise EnvWorkerError("; ".join(self._not_started))

    async def place(self, key: int) -> None:
        """Gives an environment a worker, waiting for one that starts.

        Raises:
            EnvWorkerError: none came up in time, or all are full.
        """
        self.raise_if_closed()
        self._not_started.clear()
        self._fleet.fill()
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._start_timeout_s
        while self._fleet.place(key) is None:
            left_s = deadline - clock()
            if not self._starting or left_s <= 0:
                raise EnvWorkerError(self._why_none())
            await asyncio.wait(self._starting.values(), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            self.raise_if_closed()

    def of(self, key: int) -> tuple[int, EnvWorker] | None:
        """Number and worker of an environment; None where it has none."""
        index = self._fleet.worker_of(key)
        return None if index is None else (index, self._workers[index])

    def died(self, index: int, how: str) -> None:
        """The worker's process has ended; news of it may come from several calls."""
        if index in self._workers:
            logger.error("environment worker %d died: %s", index, how)
            self._fleet.died(index)

    def close(self) -> None:
        """Kills the workers and waits for their end. Safe to call twice."""
        self.closed = True
        for task in self._starting.values():
            task.cancel()
        self._fleet.close()
        while self._killed:
            self._killed.pop().join()

    def raise_if_closed(self) -> None:
        """Raises RuntimeError after `close`."""
        if self.closed:
            raise RuntimeError("the pool of environments is closed")

    def _begin(self, index: int) -> None:
        worker = self._workers[index] = self._launch()
        task = self._starting[index] = asyncio.create_task(self._bring_up(index, worker))
        task.add_done_callback(lambda _: self._starting.pop(index, None))

    def _kill(self, index: int) -> None:
        worker = self._workers.pop(index)
        worker.kill()
        self._killed.append(worker)

    async def _bring_up(self, index: int, worker: EnvWorker) -> None:
        try:
            await asyncio.wait_for(worker.ready(), self._start_timeout_s)
        except TimeoutError:
            self._give_up(index, f"was not up within start_timeout_s = {self._start_timeout_s:g}")
        except Exception as error:
            self._give_up(index, f"did not start: {worker.death(error) or repr(error)}")
        else:
            self._fleet.up(index)
            worker.call("watch").add_done_callback(lambda watch: self._watch_ended(index, worker, watch))

    def _give_up(self, index: int, why: str) -> None:
        self._not_started.append(f"environment worker {index} {why}")
        logger.error(self._not_started[-1])
        self._fleet.not_started(index)

    def _watch_ended(self, index: int, worker: EnvWorker, watch: asyncio.Future[Any]) -> None:
        if not watch.cancelled():
            error = watch.exception()
            self.died(index, (error and worker.death(error)) or repr(error))

    def _why_none(self) -> str:
        if self._fleet.full:
            return "every environment worker holds as many environments as it can; use more workers"
        return "; ".join(self._not_started) or f"no environment worker was up within {self._start_timeout_s:g} s"

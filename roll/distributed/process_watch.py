"""Watches processes of this node that no call is waiting for, or that do not answer because they are stopped.

A call of a rank fails at once when its process dies, so a death is reported only to code that waits for something else,
such as a batch, or that got the error of another rank first. A call of a process that is stopped by a signal does not
fail before its deadline, which may be an hour: the process is killed, and its calls fail as those of a dead one.
For a minute no call notices the death of gcs_server, and then Ray ends the driver: such a death ends the run's calls.
Processes of other nodes are not watched.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import psutil

from roll.base.events import Repeats
from roll.distributed.calls.remote_errors import PROCESS_DIED, WATCH, ClusterError
from roll.distributed.cluster import Cluster
from roll.distributed.infer.engine_monitor import EnginesLostError
from roll.distributed.ray_session import dead_ray_process, ray_processes
from roll.usercode.stopped import INTERVAL_S, STOPPED_TOO_LONG, StopTimes, is_alive, is_stopped

if TYPE_CHECKING:
    from roll.base.events import EventLog
    from roll.distributed.worker import Worker

logger = logging.getLogger(__name__)


class ProcessWatch:
    """Looks at the processes of training ranks, engines and remote actors about once a second."""

    def __init__(
        self,
        clusters: Sequence[Cluster[Worker]],
        events: EventLog,
        others: Callable[[], Mapping[str, psutil.Process]] = dict,
        clock: Callable[[], float] = time.monotonic,
        stop_times: StopTimes[int] | None = None,
    ) -> None:
        """Watches nothing before `start`.

        The death of a rank of `clusters` is the error of `wait_for_death`; callers notice that of `others`, by name.
        """
        self._clusters, self._events, self._others = clusters, events, others
        self._clock, self._stop_times = clock, stop_times or StopTimes(is_stopped)
        self._died: asyncio.Future[ClusterError] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self._run: asyncio.Task[Any] | None = None
        self._ray_death: ClusterError | None = None
        self._repeats = Repeats(logger)

    def start(self) -> None:
        self._task = asyncio.create_task(self._watch())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def wait_for_death(self) -> None:
        """Waits until the process of a training rank is dead.

        Raises:
            ClusterError: it is, of kind PROCESS_DIED.
        """
        raise await asyncio.shield(self._died)

    async def _watch(self) -> None:
        while True:
            try:
                self.look()
            except Exception as error:  # the next look may succeed, and without a watch a death is not noticed
                cause = f"{type(error).__name__}: {error}"
                unexpected = not isinstance(error, OSError | psutil.Error)
                self._repeats.warn(cause, f"processes could not be inspected: {cause}", unexpected)
            await asyncio.sleep(INTERVAL_S)

    def look(self) -> None:
        """Reports a dead training rank, and kills processes that have been stopped for too long."""
        ranks = {
            f"{cluster.role}-{rank}": (cluster, rank, process)
            for cluster in self._clusters
            for rank, process in cluster.local_processes.items()
        }
        of_ray = ray_processes()
        processes = {**self._others(), **{name: process for name, (_, _, process) in ranks.items()}, **of_ray}
        dead = {name: "its process died" for name, process in processes.items() if not is_alive(process)}
        alive = {process.pid: name for name, process in processes.items() if name not in dead}
        for name in [alive[number] for number in self._stop_times.overdue(self._clock(), alive)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                processes[name].kill()
            dead[name] = STOPPED_TOO_LONG
            self._events.record(name, "killed", dead[name])
        if self._run is not None and (dead_of_ray := [name for name in of_ray if name in dead]):
            self._ray_death = _death_of(dead_of_ray[0])
            self._events.record(
                dead_of_ray[0], "died", f"{dead[dead_of_ray[0]]}; all processes of the run end with Ray"
            )
            with contextlib.suppress(psutil.NoSuchProcess):
                of_ray["raylet"].kill()  # all workers end with it, so no call waits for an answer
            self._run.cancel()
            self._run = None
        for name in dead:
            if name in ranks and not self._died.done():
                cluster, rank, _ = ranks[name]
                self._died.set_result(cluster.died(rank, f"{name}: {dead[name]}"))

    @contextlib.contextmanager
    def deaths_as_causes(self) -> Iterator[None]:
        """Ends the block when a process of Ray dies, and raises that death, or a training rank's, instead of others.

        The ranks whose collective a dead one broke fail with errors of their own, which may arrive before that of the
        dead one, and so may those of engines and the rollouter: they may have died at the same time.

        Raises:
            ClusterError: of kind PROCESS_DIED, or of one after which no run starts again: gcs_server died.
        """
        self._run = run = asyncio.current_task()
        try:
            yield
        except (Exception, asyncio.CancelledError) as error:
            interrupted = run is None or self._ray_death is None or run.uncancel() > 0
            if isinstance(error, asyncio.CancelledError) and interrupted:
                raise
            if (death := self._ray_death or ray_death()) is not None:
                raise death from error
            failed = isinstance(error, ClusterError | EnginesLostError)
            of_rank = isinstance(error, ClusterError) and error.role in [cluster.role for cluster in self._clusters]
            if not failed or (isinstance(error, ClusterError) and error.process_failed and of_rank):
                raise
            for cluster in self._clusters:
                for rank, process in cluster.local_processes.items():
                    if not is_alive(process):
                        raise cluster.died(rank, f"{cluster.role}-{rank}: its process died") from error
            raise
        finally:
            self._run = None


def ray_death() -> ClusterError | None:
    """The death of a process of the run's own Ray; None if all live."""
    name = dead_ray_process()
    return None if name is None else _death_of(name)


def _death_of(name: str) -> ClusterError:
    kind = PROCESS_DIED if name == "raylet" else "RayDied"  # Ray ends a driver a minute after its gcs_server died
    return ClusterError(name, WATCH, 0, kind, f"{name}, a process of Ray, died")

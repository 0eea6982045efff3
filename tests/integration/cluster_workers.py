"""Workers of the cluster tests; they import no torch, so that their processes are up within a second."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from roll.base.errors import RunError
from roll.distributed.calls.remote_errors import PROCESS_DIED, ClusterError
from roll.distributed.worker import Worker, WorkerRank, register


class Echo(Worker):
    """Returns its arguments, or fails on request."""

    @register()
    def same(self, value: Any, extra: int = 0) -> tuple[int, Any, int]:
        return self.rank.rank, value, extra

    @register()
    def describe(self) -> WorkerRank:
        return self.rank

    @register()
    def shard(self, data: list[int]) -> tuple[int, list[int]]:
        return self.rank.rank, data

    @register()
    def surroundings(self) -> dict[str, Any]:
        return {
            "affinity": sorted(os.sched_getaffinity(0)),
            "threads": int(os.environ["OMP_NUM_THREADS"]),
            "env": {key: os.environ[key] for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MINE")},
        }

    @register()
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    @register()
    def stumble(self, rank: int, first: Path) -> None:
        """This rank raises after it has written the file `first`, and the others after that."""
        if self.rank.rank == rank:
            first.touch()
            raise KeyError(f"rank {rank} lost its key")
        while not first.exists():
            time.sleep(0.01)
        time.sleep(0.2)
        raise RuntimeError("the peer went away")

    @register()
    def call_dead_rank(self) -> None:
        raise ClusterError("reward", "score", 2, PROCESS_DIED, "reward.score failed on rank 2", "it died")

    @register()
    def refuse(self) -> None:
        raise RunError("pretrain: is not a folder; give one")

    @register()
    def sleep(self, rank: int, seconds: float) -> None:
        if self.rank.rank == rank:
            time.sleep(seconds)

    @register()
    def die(self, rank: int) -> None:
        if self.rank.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    @register()
    def process_id(self) -> int:
        return os.getpid()

    def not_registered(self) -> None: ...

    @register()
    def spawn(self) -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


class AsyncEcho(Worker):
    """Calls that run concurrently."""

    concurrent = True
    restartable = True
    met = 0

    @register()
    async def spawn(self) -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid

    @register()
    async def meet(self, count: int) -> int:
        """Returns once `count` calls of it run: which of them this one was."""
        self.met += 1
        number = self.met - 1
        while self.met < count:
            await asyncio.sleep(0.01)
        return number

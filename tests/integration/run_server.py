"""`roll` commands one after another in one process, whose worker processes and engines serve all of them.

Reads one JSON line per command from stdin, {"arguments": [...], "output": file}, and answers with the exit code. A run
here differs from `roll run` in a shell in this only: Ray, the processes of the roles, what they have imported, and
SGLang's scheduler stay up for the next run. Workers, models, process groups and the state of an engine are new.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import ray

from roll.cli import main as roll
from roll.configs.pipeline import BaseConfig, RLConfig
from roll.configs.roles import ActorInferConfig, MegatronRoleConfig
from roll.distributed.calls.remote_actor import ObjectT, P, RemoteActor
from roll.distributed.calls.remote_errors import Failure
from roll.distributed.cluster import CLOSE_TIMEOUT_S, Cluster, WorkerT
from roll.distributed.infer import sglang_engine
from roll.distributed.infer.infer_worker import InferWorker
from roll.distributed.infer.sglang_engine import Engine
from roll.distributed.processes import gc_unfreeze, log_file, print_to, process_environment
from roll.distributed.ray_session import start_ray
from roll.distributed.resources import ResourceManager
from roll.distributed.train.train_worker import TrainWorker
from roll.distributed.worker import WorkerRank

DEVICES = 32
"""CPU slots of the Ray session: enough for every run."""

LARGEST = {"max_running_requests": 512, "max_total_tokens": 100_000}
"""Sizes of an engine that fit every run."""

POSITIONS = 1032
"""A context that fits every run of a tiny model: all of its positions and the engine's margin."""

IDLE_TIMEOUT_S = 30.0
"""Requests that a run left behind are aborted within a step of the engine."""


def own_environment(config: BaseConfig, threads: int) -> dict[str, str]:
    """The environment of a process without the folder of its recipe, so that runs from other folders reuse it."""
    environment = process_environment(config, threads)
    return {name: value for name, value in environment.items() if name != "PYTHONPATH"}


class KeptResources(ResourceManager):
    """Reserves the devices once: a reservation that is released would end the processes in it."""

    groups: dict[int, Any] = {}

    def _reserve(self) -> Any:
        if self.devices_per_node not in self.groups:
            self.groups[self.devices_per_node] = super()._reserve()
        return self.groups[self.devices_per_node]

    def release(self) -> None:
        """The next run needs the devices."""


class KeptCluster(Cluster[WorkerT]):
    """Reuses processes of an earlier run with the same devices, and leaves its own to the next run."""

    idle: defaultdict[Any, list[Any]] = defaultdict(list)

    def _start(self, rank: int, node_rank: int) -> Any:
        idle = self.idle[self._key(rank, node_rank)]
        return idle.pop() if idle else super()._start(rank, node_rank)

    def _key(self, rank: int, node_rank: int) -> Any:
        slot = self._slots[rank][node_rank]
        environment = own_environment(self._pipeline_config, self._resources.threads(slot))
        return (
            self._worker_cls.concurrent,
            rank,
            slot.devices,
            self._resources.cores(slot),
            tuple(sorted((environment | self.config.system_envs).items())),
        )

    def shutdown(self) -> None:
        """Closes the workers; a process whose worker does not close is killed."""
        if self._ended:
            return
        self._ended = True
        closing = [actor.call.remote("close", False) for actor in self.actors]
        for rank, (actor, answer) in enumerate(zip(self.actors, closing, strict=True)):
            if has_closed(answer):
                self.idle[self._key(rank, 0)].append(actor)
            else:
                ray.kill(actor)


def has_closed(answer: ray.ObjectRef[Any]) -> bool:
    """Waits for the answer to a call of `close`; whether it succeeded in time."""
    try:
        return not isinstance(ray.get(answer, timeout=CLOSE_TIMEOUT_S), Failure)
    except ray.exceptions.RayError:
        return False


class KeptRemoteActor(RemoteActor[ObjectT]):
    """Reuses the process of an earlier run, and leaves it to the next run."""

    idle: defaultdict[Any, list[Any]] = defaultdict(list)

    def __init__(
        self,
        name: str,
        config: BaseConfig,
        deadlines: Mapping[str, float],
        make: Callable[P, ObjectT],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        super().__init__(name, config, deadlines, make_with_log, log_file(config, name), make, args, kwargs)

    def _start(self) -> Any:
        idle = self.idle[self._key]
        return idle.pop() if idle else super()._start()

    @property
    def _key(self) -> Any:
        return tuple(sorted(own_environment(self._config, threads=1).items()))

    def shutdown(self) -> None:
        """Closes the object; a process whose object does not close is killed."""
        if self._ended:
            return
        self._ended = True
        if has_closed(self._actor.call.remote("close", False)):
            self.idle[self._key].append(self._actor)
        else:
            ray.kill(self._actor)


def make_with_log(log: str, make: Callable[..., ObjectT], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ObjectT:
    """Makes the object of a KeptRemoteActor, whose process prints to the log of its run."""
    print_to(log)
    return make(*args, **kwargs)


class KeptTrainWorker(TrainWorker):
    """Frees its model and leaves its process group in `close`, since its process continues."""

    def __init__(self, rank: WorkerRank, config: MegatronRoleConfig, pipeline_config: BaseConfig) -> None:
        print_to(log_file(pipeline_config, rank.name))
        super().__init__(rank, config, pipeline_config)

    def close(self) -> None:
        if self._infer_strategy is not None:
            self._infer_strategy.shutdown()
        vars(self).clear()
        gc_unfreeze()
        gc.collect()


class KeptEngine(Engine):
    """Starts on the scheduler that an earlier run has left in this process, if it has the same arguments.

    It has the same sizes in every run with a tiny model, so that one scheduler does for all.
    """

    left: dict[str, KeptEngine] = {}

    def __init__(self, name: str, arguments: dict[str, Any], environment: dict[str, str], log: str) -> None:
        context = max(POSITIONS, arguments.get("context_length") or 0)
        super().__init__(name, arguments | LARGEST | {"context_length": context}, environment, log)

    async def start(self, arguments: dict[str, Any], timeout_s: float) -> None:
        """Nothing that the earlier run did is left in the scheduler but its weights, which count as none."""
        before = self.left.pop(self._kind, None)
        if before is None or len(before.processes()) < len(before._processes):
            return await super().start(arguments, timeout_s)
        self._engine, self._processes, self._thread = before._engine, before._processes, before._thread
        self._schedulers, self._shared_files = before._schedulers, before._shared_files
        self._children = before._children
        self._death = asyncio.get_running_loop().create_future()
        self._watcher = asyncio.create_task(self._watch())
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self.manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
        self.manager.abort_request(abort_all=True)
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        while self.manager.rid_to_state and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    @property
    def _kind(self) -> str:
        return json.dumps([self.arguments, self._environment], sort_keys=True, default=str)

    def stop(self) -> None:
        """Ends all waits for the engine, and leaves it to the next run."""
        if self._engine is None:
            return super().stop()
        self.left[self._kind] = self
        if self._watcher is not None:
            self._watcher.cancel()
        if self._death is not None and not self._death.done():
            self._death.set_result("the engine was stopped")


class KeptInferWorker(InferWorker):
    """Runs a KeptEngine."""

    def __init__(self, rank: WorkerRank, config: ActorInferConfig, pipeline_config: RLConfig) -> None:
        print_to(log_file(pipeline_config, rank.name))
        super().__init__(rank, config, pipeline_config)
        sglang_engine.Engine = KeptEngine  # type: ignore[misc]

    def close(self) -> None:
        super().close()
        gc_unfreeze()


def serve() -> None:
    """Runs what comes on stdin until it is closed."""
    from roll.pipeline import session

    session.Cluster, session.ResourceManager, session.RemoteActor = KeptCluster, KeptResources, KeptRemoteActor  # type: ignore[misc]
    session.TrainWorker, session.InferWorker = KeptTrainWorker, KeptInferWorker  # type: ignore[misc]
    session.stop_ray = lambda: None
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    start_ray(BaseConfig(), "cpu", DEVICES)
    for line in sys.stdin:
        command = json.loads(line)
        descriptor = os.open(command["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        code = 1
        try:
            code = roll(command["arguments"])
        except Exception:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        print(code, file=answers)
    with contextlib.suppress(Exception):
        ray.shutdown()


if __name__ == "__main__":
    from tests.integration import run_server  # processes of the session import its classes by this name

    run_server.serve()

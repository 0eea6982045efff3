"""From the death of an engine to its first new token, over a cold start; and what it costs the engine beside it.

    python -m benchmarks.recovery --json FILE

A cold start is that of one engine with nothing beside it, to its first token after a weight update. Then its scheduler
is killed, and its worker's process. Last, one of two engines is killed while both generate: the throughput until it
serves again, over that before; the median of three times, since it depends on which processes share a core.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import Measurement, at_least, at_most, main, median
from benchmarks.weight_sync import TINY

TOKENS = 64
"""Length of every answer."""
RUNNING = 32
"""Requests at a time, for each engine."""
WINDOW_S = 20.0
"""Time over which throughput is measured before an engine is killed."""
KILLED_ENGINES = (1, 0, 1)
"""Engines that are killed while both generate, one after the other."""


def measure() -> Measurement:
    """Times of a cold start and of recoveries, and the throughput with one of two engines."""
    raw: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as root, engines(Path(root), 1) as world:
        raw["cold_start_s"] = world.cold_start_s
        raw["scheduler_killed_s"] = asyncio.run(recover(world, scheduler=True))
        raw["worker_killed_s"] = asyncio.run(recover(world, scheduler=False))
    with tempfile.TemporaryDirectory() as root, engines(Path(root), 2) as world:
        raw["tokens_per_second"] = asyncio.run(throughput(world))
    kept = median([speed["meanwhile"] / speed["before"] for speed in raw["tokens_per_second"]])
    return raw, [
        at_most("recovery: killed scheduler, over a cold start", raw["scheduler_killed_s"] / raw["cold_start_s"], 1.3),
        at_most("recovery: killed worker, over a cold start", raw["worker_killed_s"] / raw["cold_start_s"], 1.3),
        at_least("recovery: throughput with one of two engines", kept, 0.5),
    ]


class World:
    """A training rank and engines, with their monitor and synchronizer."""

    def __init__(self, config: Any, train: Any, infer: Any, cold_start_s: float) -> None:
        self.config, self.train, self.infer, self.cold_start_s = config, train, infer, cold_start_s


@contextmanager
def engines(folder: Path, count: int) -> Iterator[World]:
    """Running clusters; the cold start is timed from the start of the engines' processes."""
    from roll.configs.arguments import ModelArguments, TrainModelArguments
    from roll.configs.pipeline import RLVRConfig
    from roll.configs.roles import ActorInferConfig, ActorTrainConfig, SGLangArguments
    from roll.distributed.cluster import Cluster
    from roll.distributed.infer.infer_worker import InferWorker
    from roll.distributed.ray_session import start_ray, stop_ray
    from roll.distributed.resources import ResourceManager
    from roll.distributed.train.train_worker import TrainWorker
    from roll.models.tiny import write_tiny_model

    config = RLVRConfig(
        output_dir=str(folder),
        pretrain=str(write_tiny_model(folder / "model", "qwen2", **TINY)),
        prompt_length=32,
        response_length=TOKENS,
    )
    devices = {"actor_train": [0], "actor_infer": list(range(1, 1 + count))}
    train_config = ActorTrainConfig(model_args=TrainModelArguments(dtype="fp32"), device_mapping=devices["actor_train"])
    infer_config = ActorInferConfig(
        model_args=ModelArguments(dtype="fp32"),
        strategy_args=SGLangArguments(strategy_config={"load_format": "dummy"}),
        device_mapping=devices["actor_infer"],
        max_running_requests=RUNNING,
    )
    start_ray(config, "cpu", 1 + count)
    resources = ResourceManager("cpu", 1 + count, devices)
    train = Cluster("actor_train", TrainWorker, train_config, config, resources, train_config.layout)
    clusters: list[Any] = [train]
    try:
        train.initialize().get()
        start = time.monotonic()
        infer = Cluster("actor_infer", InferWorker, infer_config, config, resources, infer_config.layout)
        clusters.append(infer)
        infer.initialize().get()
        asyncio.run(first_token(World(config, train, infer, 0.0), infer))
        yield World(config, train, infer, time.monotonic() - start)
    finally:
        for cluster in clusters:
            cluster.shutdown()
        resources.release()
        stop_ray()


async def first_token(world: World, infer: Any) -> None:
    """Updates the weights and generates a token with every engine."""
    from roll.distributed.weights.synchronizer import WeightSynchronizer

    synchronizer = WeightSynchronizer(world.train, infer, world.config)
    await synchronizer.setup()
    await synchronizer.update_weights(0)
    for engine in range(infer.world_size):
        await pool_of(world).generate([[request("first", 1)]], engine)


def request(name: str, tokens: int) -> Any:
    """A request for exactly so many tokens, unless the model ends earlier."""
    from roll.rollout.types import GenerateRequest, SamplingParams

    return GenerateRequest(name, [5, 6, 7], SamplingParams(max_new_tokens=tokens), seed=1)


def pool_of(world: World) -> Any:
    """Sends requests to the engines that serve."""
    from roll.distributed.infer.infer_worker import EngineClient
    from roll.rollout.engine_pool import EnginePool

    return EnginePool(EngineClient(world.infer.client()), 0, RUNNING, restarted=True)


@contextmanager
def watched(world: World) -> Iterator[tuple[Any, Any]]:
    """The synchronizer and the running monitor of the engines."""
    from roll.base.events import EventLog
    from roll.distributed.infer.engine_monitor import EngineMonitor
    from roll.distributed.weights.synchronizer import WeightSynchronizer

    monitor = EngineMonitor(world.infer, world.config, EventLog(world.config.output_dir))
    monitor.start()
    yield WeightSynchronizer(world.train, world.infer, world.config, monitor=monitor), monitor


def processes(world: World, engine: int) -> tuple[psutil.Process, psutil.Process]:
    """The worker of an engine, and its scheduler."""
    from roll.distributed.infer.infer_worker import InferWorker

    [found] = world.infer.call([engine], InferWorker.process_ids).get()
    all_of_it = [psutil.Process(number) for number in found]
    scheduler = next(process for process in all_of_it if "sglang::scheduler" in process.name())
    return all_of_it[0], scheduler


async def recover(world: World, scheduler: bool) -> float:
    """Seconds from SIGKILL to the first token, with the trainer idle."""
    worker, child = await asyncio.to_thread(processes, world, 0)
    with watched(world) as (synchronizer, monitor):
        await synchronizer.setup()
        await synchronizer.update_weights(1)
        start = time.monotonic()
        (child if scheduler else worker).send_signal(signal.SIGKILL)
        await synchronizer.while_idle(pool_of(world).generate([[request("again", 1)]]))
        seconds = time.monotonic() - start
        await monitor.close()
    return seconds


async def throughput(world: World) -> list[dict[str, float]]:
    """Tokens per second of two engines before one is killed, and until it serves again, for each of KILLED_ENGINES."""
    pool, done, stop = pool_of(world), [0], asyncio.Event()

    async def stream(number: int) -> None:
        for index in range(10**6):
            if stop.is_set():
                return
            [[answer]] = await pool.generate([[request(f"{number}-{index}", TOKENS)]])
            done[0] += len(answer.response_ids)

    async def rate_until(end: Awaitable[None]) -> float:
        tokens, start = done[0], time.monotonic()
        await end
        return (done[0] - tokens) / (time.monotonic() - start)

    async def kill_and_recover(scheduler: psutil.Process, restarts: int) -> None:
        scheduler.send_signal(signal.SIGKILL)
        while monitor.restarts < restarts or monitor.serving != [0, 1]:
            await asyncio.sleep(0.05)

    async def load() -> list[dict[str, float]]:
        streams = [asyncio.create_task(stream(number)) for number in range(2 * RUNNING)]
        rates = []
        for restarts, engine in enumerate(KILLED_ENGINES, 1):
            _, scheduler = await asyncio.to_thread(processes, world, engine)
            await asyncio.sleep(3.0)
            before = await rate_until(asyncio.sleep(WINDOW_S))
            rates.append({"before": before, "meanwhile": await rate_until(kill_and_recover(scheduler, restarts))})
        stop.set()
        await asyncio.gather(*streams)
        return rates

    with watched(world) as (synchronizer, monitor):
        await synchronizer.setup()
        await synchronizer.update_weights(1)
        rates: list[dict[str, float]] = await synchronizer.while_idle(load())
        await monitor.close()
    return rates


if __name__ == "__main__":
    main(measure, __doc__ or "")

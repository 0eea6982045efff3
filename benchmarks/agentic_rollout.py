"""Trajectories of many turns: each environment at its own pace, beside all of them in lock-step.

    python -m benchmarks.agentic_rollout --json FILE

Both ways play the same groups on one engine with 64 environments; lengths of episodes and of answers have long tails.
A whole run at async_generation_ratio 1 then tells how much of the time its engine is busy.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common import Measurement, at_least, at_most, main, median

GROUPS, GROUP, AT_A_TIME, REPEATS = 24, 8, 8, 2
"""192 trajectories in groups of 8, 64 environments at a time."""
STEPS, WARM_UP_STEPS = 10, 2
ENDS = list("ab")
"""Letters that end an answer. The model draws every token alike, so an answer has 86 tokens on average, and one in a
hundred four times as many. The shorter answers are, the less there is to win: with 43 tokens lock-step loses a fourth,
with 20 next to nothing.
"""
RECIPE: dict[str, Any] = {
    "pipeline": "agentic",
    "platform": "cpu",
    "num_devices_per_node": 2,
    "track_with": [],
    "save_checkpoint": False,
    "max_steps": STEPS,
    "async_generation_ratio": 1,
    "rollout_batch_size": 64,
    "sequence_length": 1024,
    "max_tokens_per_step": 384,
    "custom_envs": {
        "Walk": {
            "env_type": "benchmarks.walks:Walk",
            "max_steps": 16,
            "agent_system_template": None,
            "agent_template": "{observation}\n",
        }
    },
    "train_env_manager": {"group_size": GROUP, "num_env_groups": AT_A_TIME, "max_env_num_per_worker": 0},
    "actor_train": {
        "model_args": {"dtype": "fp32"},
        "training_args": {"learning_rate": 1e-5, "per_device_train_batch_size": 64},
        "use_dynamic_batching_in_train": True,
        "max_tokens_per_microbatch_in_train": 8192,
        "pg_variant": "tis",
        "device_mapping": [0],
    },
    "actor_infer": {
        "model_args": {"dtype": "fp32"},
        "generating_args": {"stop_strings": ENDS},
        "strategy_args": {"strategy_name": "sglang", "strategy_config": {"load_format": "dummy"}},
        "device_mapping": [1],
        "max_running_requests": 64,
    },
}


class Sums:
    """Seconds of each kind of work, added over everything that does it."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Adds the block."""
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start


class OneEngine:
    """An engine of this process, as the pool asks it."""

    world_size = 1

    def __init__(self, engine: Any) -> None:
        """Takes it."""
        self._engine = engine

    def call(self, rank: int, method: str, *args: Any) -> Any:
        """The engine's own coroutine."""
        return getattr(self._engine, method)(*args)


def measure() -> Measurement:
    """Trajectories per minute both ways, shares of time, prefix reuse, and the busy share of a run."""
    with tempfile.TemporaryDirectory() as folder:
        config = write_recipe(Path(folder))
        raw = asyncio.run(compare(config))
        raw["engine_busy_share"] = busy_share(config)
    faster = raw["trajectories_per_minute"]["free"] / raw["trajectories_per_minute"]["lock_step"]
    return raw, [
        at_least("agentic_rollout: trajectories per minute over lock-step", faster, 1.5),
        at_most("agentic_rollout: environment and bookkeeping of a trajectory's time", raw["environment_share"], 0.1),
        at_least("agentic_rollout: prompt tokens of later turns from the cache", raw["prefix_reuse"], 0.8),
        at_least("agentic_rollout: busy share of the engine at ratio 1", raw["engine_busy_share"], 0.8),
    ]


def write_recipe(folder: Path) -> Path:
    """Model and configuration below `folder`; returns the configuration."""
    from examples.tiny_math.prepare import prepare

    prepare(folder / "base")
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump({**RECIPE, "pretrain": str(folder / "base"), "output_dir": str(folder / "run")}))
    return file


async def compare(file: Path) -> dict[str, Any]:
    """Plays the same groups both ways in turn, REPEATS times each."""
    from roll.configs.agentic import AgenticConfig
    from roll.configs.load import load_config
    from roll.distributed.resources import start_ray, stop_ray
    from roll.distributed.strategy.sglang_strategy import SGLangStrategy
    from roll.pipeline.agentic.metrics import rollout_metrics
    from roll.pipeline.agentic.pipeline import AgenticPipeline
    from roll.pipeline.agentic.rollouter import make_producer
    from roll.platforms import get_platform
    from roll.rollout.policy import Ticket

    os.environ["OMP_NUM_THREADS"] = "1"
    config = load_config(file, ["actor_infer.strategy_args.strategy_config.load_format=auto"])
    assert isinstance(config, AgenticConfig)
    pipeline = AgenticPipeline(config)
    await pipeline.prepare()
    start_ray(config, "cpu", 1)
    engine = SGLangStrategy(config.actor_infer, config, get_platform("cpu").engine_arguments(), rank=0, seed=0)
    rates: dict[str, list[float]] = {"free": [], "lock_step": []}
    sums, groups = Sums(), []
    try:
        await engine.initialize()
        producer = make_producer(pipeline.inputs(), OneEngine(engine))
        for repeat in range(REPEATS + 1):
            for way in rates:
                config.deterministic = way == "lock_step"
                groups = producer.draw(Ticket(repeat * GROUPS + number, 0, 0) for number in range(GROUPS))
                await engine.flush_cache()
                start = time.perf_counter()
                await producer.produce(groups, sums if way == "free" else Sums())
                if repeat:  # the first warms up
                    rates[way].append(60 * GROUPS * GROUP / (time.perf_counter() - start))
        producer.close()
    finally:
        engine.shutdown()
        stop_ray()
    return {
        "trajectories_per_minute": {way: median(values) for way, values in rates.items()},
        "environment_share": sums.seconds["env"] / sum(sums.seconds.values()),
        "prefix_reuse": rollout_metrics(groups, 0)["rollout/prefix_reuse"],
        "turns": rollout_metrics(groups, 0)["rollout/turns_mean"],
    }


def busy_share(file: Path) -> float:
    """Of the engine, in a run that trains too."""
    from roll.configs.load import load_config
    from roll.pipeline.run import run
    from roll.trackers.files import read_metrics

    asyncio.run(run(load_config(file, [])))
    lines = read_metrics(file.parent / "run" / "metrics.jsonl")[WARM_UP_STEPS:]
    return 1 - sum(line["throughput/rollout_idle"] for line in lines) / len(lines)


if __name__ == "__main__":
    main(measure, __doc__ or "")

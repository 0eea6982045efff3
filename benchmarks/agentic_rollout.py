"""Trajectories per minute of multi-turn rollouts: independent environments against environments in lockstep.

    python -m benchmarks.agentic_rollout --json FILE

Both modes run the same groups on one engine with 64 environments; episodes and answers have long-tailed lengths. A run
at async_generation_ratio 1 then measures how busy its engine is.

Lockstep loses by steps with few requests, which cost less the more a step's time grows with its requests. On a CPU it
grows in proportion, except for about 0.4 ms. With answers of 20 tokens lockstep makes many small steps, and independent
environments are 1.5 times as fast; with 86 tokens they are 1.2 times as fast. The target of 1.5 is meant for engines
whose steps take about as long for one request as for 64, as on a GPU.
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
from typing import TYPE_CHECKING, Any

import yaml

from benchmarks.common import Measurement, at_least, at_most, main, median
from roll.envs import TextEnv, Turn

if TYPE_CHECKING:
    from roll.configs.agentic import AgenticConfig
    from roll.distributed.infer.infer_worker import InferWorker

GROUPS, GROUP_SIZE, CONCURRENT_GROUPS, REPEATS = 24, 8, 8, 2
"""192 trajectories in groups of 8; 64 environments run at a time."""
STEPS, WARM_UP_STEPS = 10, 2
STOP_STRINGS = {86: ["a", "b"], 20: list("abcdefghijkl")}
"""Stop strings by the mean number of tokens of an answer: the model draws all tokens with about the same probability.
One answer in a hundred has more than four times as many.
"""
EPISODE_END = 0.2
"""Probability that an action ends the episode: episodes have 5 actions on average, and at most `max_steps`."""

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
            "env_type": "benchmarks.agentic_rollout:Walk",
            "max_steps": 16,
            "agent_system_template": None,
            "agent_template": "{observation}\n",
        }
    },
    "train_env_manager": {"group_size": GROUP_SIZE, "num_env_groups": CONCURRENT_GROUPS, "max_env_num_per_worker": 0},
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
        "generating_args": {"stop_strings": STOP_STRINGS[86]},
        "strategy_args": {"strategy_name": "sglang", "strategy_config": {"load_format": "dummy"}},
        "device_mapping": [1],
        "max_running_requests": 64,
    },
}


class Walk(TextEnv):
    """An environment whose episode length depends only on the seed: most episodes are short, a few long."""

    def rules(self) -> str:
        return "Walk."

    def begin(self) -> str:
        return "You are at 0. Where do you go?"

    def act(self, text: str) -> Turn:
        ended = self.np_random.random() < EPISODE_END
        return Turn(f"You are at {self.steps}. Where do you go?", float(len(text)), ended)


class TimeSums:
    """Seconds per kind of work, summed over all concurrent tasks."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Adds the duration of the block."""
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start


class LocalEngine:
    """Calls an engine in this process, with the interface of a cluster of engines."""

    world_size = 1

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def generate(self, rank: int, requests: list[Any]) -> Any:
        return self._engine.generate(requests)

    async def is_serving(self, rank: int) -> bool:
        return True


def measure() -> Measurement:
    """Trajectories per minute in both modes, fractions of time, prefix reuse, and how busy the engine of a run is."""
    with tempfile.TemporaryDirectory() as folder:
        config = write_recipe(Path(folder))
        raw = {f"{tokens} tokens": each for tokens, each in asyncio.run(compare(config)).items()}
        busy = busy_fraction(config)
    checks = []
    for name, each in raw.items():
        rates = each["trajectories_per_minute"]
        faster = rates["independent"] / rates["lockstep"]
        checks += [
            at_least(f"agentic_rollout: trajectories per minute over lockstep, {name}", faster, 1.5),
            at_most(f"agentic_rollout: time of environments, fraction, {name}", each["environment_fraction"], 0.1),
            at_least(f"agentic_rollout: cached prompt tokens of later turns, {name}", each["prefix_reuse"], 0.8),
        ]
    checks.append(at_least("agentic_rollout: busy time of the engine at ratio 1, fraction", busy, 0.8))
    return {**raw, "engine_busy_fraction": busy}, checks


def write_recipe(folder: Path) -> Path:
    """Writes model and configuration below `folder`; returns the configuration."""
    from examples.tiny_math.prepare import prepare

    prepare(folder / "base")
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump({**RECIPE, "pretrain": str(folder / "base"), "output_dir": str(folder / "run")}))
    return file


async def compare(file: Path) -> dict[int, dict[str, Any]]:
    """Figures of both modes by the mean tokens of an answer, from one engine."""
    from roll.configs.agentic import AgenticConfig
    from roll.distributed.infer.infer_worker import InferWorker
    from roll.distributed.ray_session import start_ray, stop_ray
    from roll.distributed.worker import WorkerRank
    from roll.loading.load import load_config

    os.environ["OMP_NUM_THREADS"] = "1"
    configs: dict[int, AgenticConfig] = {}
    for tokens, stop_strings in STOP_STRINGS.items():
        overrides = [f"actor_infer.generating_args.stop_strings=[{','.join(stop_strings)}]"]
        config = load_config(file, ["actor_infer.strategy_args.strategy_config.load_format=auto", *overrides])
        assert isinstance(config, AgenticConfig)
        configs[tokens] = config
    first = configs[86]
    start_ray(first, "cpu", 1)
    engine = InferWorker(WorkerRank("actor_infer"), first.actor_infer, first)
    try:
        await engine.initialize()
        return {tokens: await compare_modes(each, engine) for tokens, each in configs.items()}
    finally:
        engine.close()
        stop_ray()


async def compare_modes(config: AgenticConfig, engine: InferWorker) -> dict[str, Any]:
    """Runs the same groups in both modes alternately, REPEATS times each after one that warms up."""
    from roll.pipeline.kinds.agentic import AgenticPipeline
    from roll.pipeline.session import Session
    from roll.rollout.engine_pool import EnginePool
    from roll.rollout.ledger import PromptRequest
    from roll.rollout.metrics import rollout_metrics

    pipeline = AgenticPipeline(config)
    await pipeline.prepare()
    pool = EnginePool(LocalEngine(engine), 0, config.actor_infer.max_running_requests)
    worker = pipeline.worker_factory(Session(config), own_process=False)(pool)
    rates: dict[str, list[float]] = {"independent": [], "lockstep": []}
    sums, groups = TimeSums(), []
    for repeat in range(REPEATS + 1):
        for mode in rates:
            config.deterministic = mode == "lockstep"
            groups = worker.draw([PromptRequest(repeat * GROUPS + number, 0, 0) for number in range(GROUPS)])
            await engine.flush_cache()
            start = time.perf_counter()
            await worker.generate(groups, "train", sums if repeat and mode == "independent" else TimeSums())
            if repeat:
                rates[mode].append(60 * GROUPS * GROUP_SIZE / (time.perf_counter() - start))
    worker.close()
    metrics = rollout_metrics(groups, version=0, stale_after=0)
    return {
        "trajectories_per_minute": {mode: median(values) for mode, values in rates.items()},
        "environment_fraction": sums.seconds["env"] / sum(sums.seconds.values()),
        "prefix_reuse": metrics["rollout/prefix_reuse"],
        "turns": metrics["rollout/turns_mean"],
        "tokens_of_trajectory": metrics["rollout/response_length_mean"],
    }


def busy_fraction(file: Path) -> float:
    """Fraction of time in which the engine of a training run has requests."""
    from roll.loading.load import load_config
    from roll.pipeline.launch import run_with_restarts
    from roll.trackers.files import read_metrics

    asyncio.run(run_with_restarts(load_config(file, [])))
    lines = read_metrics(file.parent / "run" / "metrics.jsonl")[WARM_UP_STEPS:]
    return 1 - sum(line["throughput/rollout_idle"] for line in lines) / len(lines)


if __name__ == "__main__":
    main(measure, __doc__ or "")

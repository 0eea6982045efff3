"""Runs of one recipe at several ratios, for the benchmarks that compare them: one core trains, the other generates.

Response lengths are long-tailed: a random model draws a stop token or the end with about the same probability at every
step, so lengths are geometric, up to a limit of almost four times the mean. Samples and limit are as in the long tail
of `against_trl`; a batch takes about as long to generate as to train on.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

STEPS = 20
WARM_UP_STEPS = 4
"""Steps left out: engines and allocators warm up, and an asynchronous run fills its buffer."""
SPIN = "import torch\ntorch.set_num_threads(1)\nmatrix = torch.randn(256, 256)\nwhile True:\n    matrix @ matrix"
"""Python program that keeps a core as busy as training or generation."""
SLOTS = 64
"""Requests that the engine runs at a time."""
TRAIN_CORE, GENERATE_CORE = 0, 1
"""Indices of the cores that each side is pinned to by its device."""

RECIPE: dict[str, Any] = {
    "pipeline": "rlvr",
    "platform": "cpu",
    "num_devices_per_node": 2,
    "track_with": [],
    "max_steps": STEPS,
    "save_checkpoint": False,
    "rollout_batch_size": 16,
    "num_return_sequences_in_group": 8,
    "prompt_length": 24,
    "response_length": 512,
    "loss_agg_mode": "token-mean",
    "actor_train": {
        "model_args": {"dtype": "fp32"},
        "training_args": {
            "learning_rate": 1.0e-5,
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 16,
        },
        "data_args": {"template": "native"},
        "pg_variant": "decoupled_ppo",  # computes the same at every ratio, so that steps are comparable
        "use_dynamic_batching_in_train": True,
        "max_tokens_per_microbatch_in_train": 4096,
        "use_dynamic_batching_in_infer": True,
        "max_tokens_per_microbatch_in_infer": 8192,
        "device_mapping": [0],
    },
    "actor_infer": {
        "model_args": {"dtype": "fp32"},
        "generating_args": {"stop_strings": ["a"]},
        "strategy_args": {"strategy_name": "sglang", "strategy_config": {"load_format": "dummy"}},
        "device_mapping": [1],
        "max_running_requests": SLOTS,
    },
    "rewards": {"digits": {"function": "benchmarks.overlap_runs:digits"}},
}


def digits(response: str, ground_truth: str, config: Any) -> float:
    """Reward: fraction of characters that are digits."""
    return sum(character.isdigit() for character in response) / max(1, len(response))


def write_recipe(folder: Path) -> Path:
    """Writes model, problems and configuration below `folder`; returns the configuration."""
    from examples.tiny_math.prepare import prepare
    from examples.tiny_math.problems import write_problems

    prepare(folder / "base")
    write_problems(folder / "data", seed=1, train=1000, val=10, levels=(1,))
    tree = {**RECIPE, "pretrain": str(folder / "base")}
    tree["actor_train"] = {
        **RECIPE["actor_train"],
        "data_args": {"template": "native", "file_name": [f"{folder}/data/train.jsonl"]},
    }
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(tree))
    return config


def run_at(config: Path, ratio: float, name: str, *overrides: str) -> list[dict[str, float]]:
    """Runs at a ratio in the folder `name` next to the configuration; returns its metrics without the warm-up steps."""
    from roll.loading.load import load_config
    from roll.pipeline.launch import run_with_restarts
    from roll.trackers.files import read_metrics

    folder = config.parent / name
    ratio_keys = [f"async_generation_ratio={ratio}", f"output_dir={folder}", *overrides]
    asyncio.run(run_with_restarts(load_config(config, ratio_keys)))
    return read_metrics(folder / "metrics.jsonl")[WARM_UP_STEPS:]


@contextmanager
def busy_core(number: int) -> Iterator[None]:
    """Keeps a core busy inside the block."""
    spinner = subprocess.Popen([sys.executable, "-c", SPIN])
    try:
        os.sched_setaffinity(spinner.pid, {sorted(os.sched_getaffinity(0))[number]})
        yield
    finally:
        spinner.kill()
        spinner.wait()


def mean(lines: list[dict[str, float]], name: str) -> float:
    """Mean of one metric."""
    return sum(line[name] for line in lines) / len(lines)

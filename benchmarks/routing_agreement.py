"""How many experts the trained router would choose as the engine did, by how far generation runs ahead of training.

    python -m benchmarks.routing_agreement --json FILE

A mixture of experts with random weights is trained at several ratios with router replay, which trains every token with
the experts of the engine and counts how many the trainer would have chosen itself. Without replay the trainer's own
experts are trained. At ratio 0 engine and trainer have equal weights.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from benchmarks.common import Check, Measurement, at_least, main
from examples.tiny_math.problems import write_problems
from examples.tiny_moe.demo import prepare
from roll.trackers.files import read_metrics

RATIOS = (0, 1, 2, 4)
STEPS = 14
WARM_UP_STEPS = 5
"""Steps left out: tokens become older until generation is as far ahead as it may be."""

AT_EQUAL_WEIGHTS = 0.999
"""Least agreement at ratio 0: rounding moves a token only where two experts are equally likely."""

RECIPE: dict[str, Any] = {
    "pipeline": "rlvr",
    "platform": "cpu",
    "num_devices_per_node": 2,
    "track_with": [],
    "max_steps": STEPS,
    "save_checkpoint": False,
    "eval_steps": 0,
    "rollout_batch_size": 16,
    "num_return_sequences_in_group": 8,
    "prompt_length": 24,
    "response_length": 32,
    "actor_train": {
        "model_args": {"dtype": "fp32"},
        "training_args": {"learning_rate": 1.0e-3, "per_device_train_batch_size": 32, "gradient_accumulation_steps": 4},
        "data_args": {"template": "native"},
        "pg_variant": "decoupled_ppo",
        "router_replay": {"mode": "R3"},
        "device_mapping": [0],
    },
    "actor_infer": {"model_args": {"dtype": "fp32"}, "device_mapping": [1]},
    "rewards": {"digits": {"function": "benchmarks.overlap_runs:digits"}},
}


def write_inputs(folder: Path) -> None:
    """Writes the model and the problems of the runs."""
    prepare(folder / "base", 1)
    write_problems(folder / "data", seed=1, train=1000, val=10, levels=(1,))


def run_once(folder: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    """The metrics of each step of a run after its warm-up."""
    places = {"pretrain": f"{folder}/base", "output_dir": f"{folder}/{name}"}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(RECIPE | places))
    data = f"actor_train.data_args.file_name=[{folder}/data/train.jsonl]"
    subprocess.run([sys.executable, "-m", "roll", "run", str(file), data, *overrides], check=True)
    return [line for line in read_metrics(folder / name / "metrics.jsonl") if line["step"] > WARM_UP_STEPS]


def run_at(ratio: int, folder: Path) -> dict[str, float]:
    """Mean age of tokens in weight versions, and agreement, of one run."""
    later = run_once(folder, str(ratio), f"async_generation_ratio={ratio}")
    return {
        "staleness": mean(line["staleness/token_mean"] for line in later),
        "agreement": mean(line["moe/routing_agreement"] for line in later),
    }


def measure() -> Measurement:
    """A run for each ratio."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        found = {ratio: run_at(ratio, folder) for ratio in RATIOS}
    agreement = [found[ratio]["agreement"] for ratio in RATIOS]
    checks: list[Check] = [at_least("routing: agreement at ratio 0", agreement[0], AT_EQUAL_WEIGHTS)]
    for before, after, ratio in zip(agreement, agreement[1:], RATIOS[1:], strict=False):
        checks.append(at_least(f"routing: agreement lost at ratio {ratio}", before - after, 0.0))
    return {str(ratio): values for ratio, values in found.items()}, checks


if __name__ == "__main__":
    main(measure, __doc__ or "")

"""Fraction of a demo step that is not generation, training, log-probs, reward or weight update.

    python -m benchmarks.overhead --json FILE

Runs the reinforcement learning stage of examples/tiny_math from a random model, shortened and without validation and
checkpoints, and reads the times of each step from metrics.jsonl. The first steps, in which engines warm up, are left
out.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from benchmarks.common import Check, Measurement, at_most, main, median

STEPS = 20
WARM_UP_STEPS = 3
WORK = ("generate", "train", "old_log_probs", "reward", "weight_update")
"""Times in metrics.jsonl that are not overhead."""


def measure() -> Measurement:
    """Overhead of each step, and the median of all times."""
    with tempfile.TemporaryDirectory() as folder:
        steps = run_demo_steps(Path(folder))[WARM_UP_STEPS:]
    overheads = [1 - sum(step[f"time/{name}"] for name in WORK) / step["time/step"] for step in steps]
    names = sorted({name for step in steps for name in step if name.startswith("time/")})
    raw = {
        "steps": len(steps),
        "overhead_fractions": overheads,
        "median_seconds": {name: median([step.get(name, 0.0) for step in steps]) for name in names},
    }
    checks: list[Check] = [at_most("overhead: fraction of a demo step", median(overheads), 0.05)]
    return raw, checks


def run_demo_steps(folder: Path) -> list[dict[str, float]]:
    """Runs the demo for STEPS steps; returns the lines of its metrics.jsonl."""
    from examples.tiny_math.demo import HERE
    from examples.tiny_math.prepare import prepare
    from examples.tiny_math.problems import write_problems
    from roll.loading.load import load_config
    from roll.pipeline.launch import run_with_restarts
    from roll.trackers.files import read_metrics

    prepare(folder / "base")
    write_problems(folder / "data", seed=1)
    overrides = [
        f"pretrain={folder}/base",
        f"output_dir={folder}/run",
        f"actor_train.data_args.file_name=[{folder}/data/train.jsonl]",
        f"validation.data_args.file_name=[{folder}/data/val.jsonl]",
        "async_generation_ratio=0",  # so that parts do not overlap and add up
        "actor_train.infer_batch_size=256",
        f"max_steps={STEPS}",
        "eval_steps=0",
        "save_steps=0",
        "save_checkpoint=false",
    ]
    asyncio.run(run_with_restarts(load_config(HERE / "rlvr_config.yaml", overrides)))
    return read_metrics(folder / "run" / "metrics.jsonl")


if __name__ == "__main__":
    main(measure, __doc__ or "")

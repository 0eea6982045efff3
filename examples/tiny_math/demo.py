"""The whole recipe in one command: create a model and problems, fine-tune, then reinforcement learning.

    python -m examples.tiny_math.demo --out output/demo

Writes `summary.json` (validation accuracy before and after reinforcement learning, seconds, peak memory) and
`curves.png` to the output folder. Heavy imports are inside functions, because the reward processes import this file.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from examples import stages

if TYPE_CHECKING:
    from roll.pipeline.summary import RunSummary

HERE = Path(__file__).parent
TRAIN_PROBLEMS, VALIDATION_PROBLEMS, LEVELS = 3840, 400, (1,)


def demo(out: Path, seed: int, overrides: list[str]) -> dict[str, float]:
    """Runs every stage below `out`, with `overrides` for the reinforcement learning run, and returns the summary."""
    from examples.tiny_math.prepare import prepare

    stages.heading("[bold]A small language model learns arithmetic")
    return learn(HERE, prepare, out, seed, overrides)


def learn(
    recipe: Path, prepare: Callable[[Path, int], Path], out: Path, seed: int, overrides: list[str]
) -> dict[str, float]:
    """Both stages of a model, with the files in the folder of its recipe; `prepare(folder, seed)` makes the model."""
    from roll.trackers.curves import draw_curves

    start = time.perf_counter()
    stages.heading("1/2  Warm start: supervised fine-tuning")
    warm, inputs = warm_start(out, seed, recipe, prepare)
    stages.heading("2/2  Reinforcement learning: Megatron-Core trains, SGLang generates")
    rl = stages.train(recipe / "rlvr_config.yaml", [f"output_dir={out}/rlvr", *inputs, *overrides])
    draw_curves([out / "rlvr"], out / "curves.png")
    return stages.summarise(out, seed, start, warm, rl, "val/score")


def warm_start(
    out: Path, seed: int, recipe: Path = HERE, prepare: Callable[[Path, int], Path] | None = None
) -> tuple[RunSummary, list[str]]:
    """Makes the model and the problems below `out`, and trains the model on worked problems.

    Returns:
        Summary of the training, and the overrides that let another recipe begin with the result.
    """
    from examples.tiny_math.prepare import prepare as prepare_dense
    from examples.tiny_math.problems import write_problems

    base = (prepare or prepare_dense)(out / "base", seed)
    write_problems(out / "data", seed=seed, train=TRAIN_PROBLEMS, val=VALIDATION_PROBLEMS, levels=LEVELS)
    model, *data = warm_inputs(out, seed)
    warm = stages.train(recipe / "sft_config.yaml", [f"pretrain={base}", f"output_dir={out}/sft", *data])
    return warm, [model, *data]


def warm_inputs(out: Path, seed: int) -> list[str]:
    """The overrides that let a recipe begin with the model and the problems of `warm_start`; the model is the first."""
    return [
        f"pretrain={out}/sft/hf_model",
        f"actor_train.data_args.file_name=[{out}/data/train.jsonl]",
        f"validation.data_args.file_name=[{out}/data/val.jsonl]",
        f"seed={seed}",
    ]


if __name__ == "__main__":
    stages.main(__doc__ or "", "output/demo", "validation accuracy ... on problems not trained on", demo)

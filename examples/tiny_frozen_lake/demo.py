"""The whole recipe in one command: create a model and example episodes, fine-tune on them, then reinforcement learning.

    python -m examples.tiny_frozen_lake.demo --out output/demo-agentic

Writes to the output folder: `summary.json` (success rate on 200 maps before and after reinforcement learning,
seconds, peak memory), `curves.png`, and `last_step.html`, trajectories of the last step turn by turn.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from examples import stages

if TYPE_CHECKING:
    from roll.pipeline.summary import RunSummary

HERE = Path(__file__).parent


def demo(out: Path, seed: int, overrides: list[str]) -> dict[str, float]:
    """Runs every stage below `out`, with `overrides` for the reinforcement learning run, and returns the summary."""
    from roll.tools.show.command import show
    from roll.trackers.curves import draw_curves

    start = time.perf_counter()
    stages.heading("[bold]A small language model learns to play FrozenLake")
    stages.heading("1/2  Warm start: supervised fine-tuning on episodes with random moves")
    warm, inputs = warm_start(out, seed)
    stages.heading("2/2  Reinforcement learning: Megatron-Core trains, SGLang plays")
    rl = stages.train(HERE / "agentic_config.yaml", [f"output_dir={out}/agentic", *inputs, *overrides])
    draw_curves([out / "agentic"], out / "curves.png")
    show(out / "agentic", html=out / "last_step.html")
    return stages.summarise(out, seed, start, warm, rl, "val/FrozenLake/success")


def warm_start(out: Path, seed: int) -> tuple[RunSummary, list[str]]:
    """Makes the model and the episodes below `out`, and trains the model on them.

    Returns:
        Summary of the training, and the overrides that let another recipe begin with the result.
    """
    from examples.tiny_frozen_lake import play
    from examples.tiny_math.prepare import prepare

    base = prepare(out / "base", seed, play.WORDS)
    data = play.write_play(out / "data", seed, play.TRAIN_EPISODES, play.VALIDATION_EPISODES, play.RANDOM_MOVES)
    files = [
        f"actor_train.data_args.file_name=[{data}/train.jsonl]",
        f"validation.data_args.file_name=[{data}/val.jsonl]",
    ]
    places = [f"pretrain={base}", f"output_dir={out}/sft", f"seed={seed}"]
    return stages.train(HERE / "sft_config.yaml", [*places, *files]), warm_inputs(out, seed)


def warm_inputs(out: Path, seed: int) -> list[str]:
    """The overrides that let a recipe begin with the model of `warm_start`."""
    return [f"pretrain={out}/sft/hf_model", f"seed={seed}"]


if __name__ == "__main__":
    stages.main(__doc__ or "", "output/demo-agentic", "success rate ... on 200 held-out maps", demo)

"""On-policy distillation in one command: a model learns from a better one on its own answers.

    python -m examples.tiny_distill.demo --out output/demo-distill

Writes `summary.json` and `curves.png` to the output folder. The teacher is the same model, fine-tuned for longer.
"""

from __future__ import annotations

import time
from pathlib import Path

from examples import stages
from examples.tiny_math import demo as tiny_math

HERE = Path(__file__).parent
TEACHER_LOSS = 0.04


def demo(out: Path, seed: int, overrides: list[str]) -> dict[str, float]:
    """Runs every stage below `out`, with `overrides` for the distillation, and returns the summary."""
    from roll.trackers.curves import draw_curves

    start = time.perf_counter()
    stages.heading("[bold]A small language model learns from a better one")
    stages.heading("1/3  Student: supervised fine-tuning")
    warm, inputs = tiny_math.warm_start(out, seed)
    stages.heading("2/3  Teacher: the same for longer")
    teacher = make_teacher(out, inputs)
    stages.heading("3/3  Distillation: the student answers, the teacher rates every token")
    distilled = stages.train(HERE / "distill_config.yaml", [f"output_dir={out}/distill", teacher, *inputs, *overrides])
    draw_curves([out / "distill"], out / "curves.png")
    return stages.summarise(out, seed, start, warm, distilled, "val/score")


def make_teacher(out: Path, inputs: list[str]) -> str:
    """Trains the model of `warm_start` for longer, below `out`, unless it is there; returns the override that names it.

    Args:
        out: folder of the warm start.
        inputs: overrides that `warm_start` returned.
    """
    teacher = out / "teacher" / "hf_model"
    if not (teacher / "config.json").is_file():
        longer = [f"pretrain={out}/base", f"output_dir={out}/teacher", f"target_loss={TEACHER_LOSS}", "eval_steps=20"]
        stages.train(tiny_math.HERE / "sft_config.yaml", [*longer, *inputs[1:]])
    return f"reference.model_args.model_name_or_path={teacher}"


if __name__ == "__main__":
    stages.main(__doc__ or "", "output/demo-distill", "validation accuracy ... on problems not trained on", demo)

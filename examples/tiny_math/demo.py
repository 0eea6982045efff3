"""The whole recipe in one command: make a model and problems, warm it up, improve it by reinforcement learning.

    python -m examples.tiny_math.demo --out output/demo

Writes `summary.json` (validation accuracy before and after reinforcement learning, seconds, peak memory) and
`curves.png` to the output folder. Heavy imports are inside functions, because the reward processes import this file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from roll.pipeline.run import RunSummary

HERE = Path(__file__).parent
TRAIN_PROBLEMS, VALIDATION_PROBLEMS, LEVELS = 3200, 400, (1,)
console = Console()


def train(name: str, overrides: list[str]) -> RunSummary:
    """Runs one YAML of this folder to its end."""
    from roll.configs.load import load_config
    from roll.pipeline.run import configure_logging, run

    config = load_config(HERE / f"{name}_config.yaml", overrides)
    configure_logging(config)
    return asyncio.run(run(config))


def demo(out: Path, seed: int, overrides: list[str]) -> dict[str, float]:
    """Runs every stage below `out` and returns the summary.

    Args:
        out: output folder.
        seed: of the weights, the problems, and both runs.
        overrides: `key=value` for the reinforcement learning run.
    """
    from examples.tiny_math.prepare import prepare
    from roll.datasets.math_problems import write_problems
    from roll.trackers.curves import draw_curves

    start = time.perf_counter()
    console.rule("[bold]A small language model learns arithmetic")
    base = prepare(out / "base", seed)
    write_problems(out / "data", seed=seed, train=TRAIN_PROBLEMS, val=VALIDATION_PROBLEMS, levels=LEVELS)
    data = [
        f"actor_train.data_args.file_name=[{out}/data/train.jsonl]",
        f"validation.data_args.file_name=[{out}/data/val.jsonl]",
        f"seed={seed}",
    ]
    console.rule("1/2  Warm start: supervised fine-tuning")
    warm = train("sft", [f"pretrain={base}", f"output_dir={out}/sft", *data])
    console.rule("2/2  Reinforcement learning: Megatron-Core trains, SGLang generates")
    rl = train("rlvr", [f"pretrain={out}/sft/hf_model", f"output_dir={out}/rlvr", *data, *overrides])
    scores = {int(step): metrics["val/score"] for step, metrics in rl.validation.items()}
    summary = {
        "val_before": scores[min(scores)],
        "val_after": scores[max(scores)],
        "seconds": round(time.perf_counter() - start, 1),
        "peak_rss_bytes": max(warm.peak_memory_bytes, rl.peak_memory_bytes),
        "seed": seed,
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    draw_curves(out / "rlvr", out / "curves.png")
    return summary


def main() -> None:
    """Reads the command line and prints what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("output/demo"), help="folder to write")
    parser.add_argument("--seed", type=int, default=42, help="seed of everything random")
    parser.add_argument("overrides", nargs="*", help="key=value for the reinforcement learning run")
    arguments = parser.parse_args()
    summary = demo(arguments.out, arguments.seed, arguments.overrides)
    console.print(
        f"validation accuracy [bold]{summary['val_before']:.3f} -> {summary['val_after']:.3f}[/bold] on problems not "
        f"trained on, in {summary['seconds']:.0f} s, at most {summary['peak_rss_bytes'] / 2**30:.1f} GiB of memory"
    )
    console.print(f"{arguments.out}/summary.json   {arguments.out}/curves.png   tensorboard --logdir {arguments.out}")


if __name__ == "__main__":
    main()

"""Preference training in one command: a fine-tuned model learns to prefer right answers to wrong ones.

    python -m examples.tiny_dpo.demo --out output/demo-dpo

Writes `summary.json` to the output folder. A wrong answer differs from the right one by a small number, so that only
the arithmetic tells them apart.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

from examples import stages
from examples.tiny_math.demo import warm_start

HERE = Path(__file__).parent
OFFSETS = (-10, -2, -1, 1, 2, 10)


def demo(out: Path, seed: int, overrides: list[str]) -> dict[str, float]:
    """Runs every stage below `out`, with `overrides` for the preference training, and returns the summary."""
    start = time.perf_counter()
    stages.heading("[bold]A small language model learns which answers are right")
    stages.heading("1/2  Warm start: supervised fine-tuning")
    warm, inputs = warm_start(out, seed)
    files = make_pairs(out, seed)
    stages.heading("2/2  DPO")
    places = [inputs[0], f"seed={seed}", f"output_dir={out}/dpo"]
    trained = stages.train(HERE / "dpo_config.yaml", [*places, *files, *overrides])
    return stages.summarise(out, seed, start, warm, trained, "val/accuracy")


def make_pairs(out: Path, seed: int) -> list[str]:
    """Writes pairs of the problems of `warm_start` below `out`; returns the overrides that name them."""
    for split in ("train", "val"):
        write_pairs(out / "data" / f"{split}.jsonl", out / "data" / f"pairs-{split}.jsonl", seed)
    return [
        f"actor_train.data_args.file_name=[{out}/data/pairs-train.jsonl]",
        f"validation.data_args.file_name=[{out}/data/pairs-val.jsonl]",
    ]


def write_pairs(problems: Path, pairs: Path, seed: int) -> None:
    """Writes a pair for each problem: its answer, and one that is a little off."""
    source = random.Random(seed)
    with pairs.open("w", encoding="utf-8") as file:
        for line in problems.read_text(encoding="utf-8").splitlines():
            problem = json.loads(line)
            right = int(problem["ground_truth"])
            wrong = source.choice([right + offset for offset in OFFSETS if right + offset >= 0])
            row = {"id": problem["id"], "prompt": problem["prompt"], "chosen": str(right), "rejected": str(wrong)}
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    stages.main(__doc__ or "", "output/demo-dpo", "share of held-out pairs whose right answer gained more: ...", demo)

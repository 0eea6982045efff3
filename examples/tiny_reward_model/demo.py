"""A reward model in one command: a fine-tuned model learns to rate right answers above wrong ones.

    python -m examples.tiny_reward_model.demo --out output/demo-reward-model

Writes `summary.json` to the output folder. A wrong answer is the right one to another problem, so that nothing but the
problem tells them apart.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

from examples import stages
from examples.tiny_math.demo import warm_start

HERE = Path(__file__).parent


def demo(out: Path, seed: int, overrides: list[str]) -> dict[str, float]:
    """Runs every stage below `out`, with `overrides` for the training of the reward model, and returns the summary."""
    start = time.perf_counter()
    stages.heading("[bold]A small language model becomes a reward model")
    stages.heading("1/2  Warm start: supervised fine-tuning")
    warm, inputs = warm_start(out, seed)
    for split in ("train", "val"):
        write_pairs(out / "data" / f"{split}.jsonl", out / "data" / f"pairs-{split}.jsonl", seed)
    stages.heading("2/2  Reward model")
    files = [
        f"actor_train.data_args.file_name=[{out}/data/pairs-train.jsonl]",
        f"validation.data_args.file_name=[{out}/data/pairs-val.jsonl]",
    ]
    places = [inputs[0], f"seed={seed}", f"output_dir={out}/reward_model"]
    trained = stages.train(HERE / "reward_model_config.yaml", [*places, *files, *overrides])
    return stages.summarise(out, seed, start, warm, trained, "val/accuracy")


def write_pairs(problems: Path, pairs: Path, seed: int) -> None:
    """Writes a pair for each problem: its answer, and that of another problem where it is a different number."""
    rows = [json.loads(line) for line in problems.read_text(encoding="utf-8").splitlines()]
    answers = [row["ground_truth"] for row in rows]
    source = random.Random(seed)
    with pairs.open("w", encoding="utf-8") as file:
        for row in rows:
            wrong = source.choice([answer for answer in answers if answer != row["ground_truth"]])
            pair = {"id": row["id"], "prompt": row["prompt"], "chosen": row["ground_truth"], "rejected": wrong}
            file.write(json.dumps(pair) + "\n")


if __name__ == "__main__":
    what = "share of held-out pairs whose right answer has the higher reward: ..."
    stages.main(__doc__ or "", "output/demo-reward-model", what, demo)

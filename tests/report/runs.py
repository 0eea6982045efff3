"""Writes the files of small runs, healthy ones and ones that are spoiled on purpose."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]

CONFIG = {
    "pipeline": "rlvr",
    "exp_name": "small",
    "platform": "cpu",
    "num_devices_per_node": 3,
    "seed": 7,
    "output_dir": "output/small",
    "rollout_dump_dir": "samples",
    "response_length": 64,
    "adv_estimator": "grpo",
    "async_generation_ratio": 1.0,
    "actor_train": {"pg_variant": "ppo", "model_args": {"model_name_or_path": "no/model", "dtype": "fp32"}},
    "actor_infer": {"model_args": {"dtype": "fp32"}},
    "source": {"given": ["seed", "actor_train.pg_variant"]},
}


def row(step: int, steps: int = 60) -> Row:
    """A step of a run that learns, with some noise that is the same each time."""
    part, noise = step / steps, math.sin(step * 12.9898) * 0.02
    values = {
        "step": step,
        "actor/loss": noise,
        "actor/grad_norm": 1.0 + noise,
        "actor/entropy": 1.2 - 0.6 * part,
        "actor/log_ratio_abs_mean": 0.001,
        "rollout/reward_mean": 0.2 + 0.5 * part + noise,
        "rollout/response_length_mean": 20.0 + noise,
        "rollout/truncated_fraction": 0.01,
        "advantage/zero_variance_group_fraction": 0.1,
        "correction/ess": 0.98,
        "correction/behavior_k3": 0.002,
        "staleness/mean": 1.0,
        "staleness/max": 1.0,
        "staleness/token_max": 1.0,
        "throughput/trainer_idle": 0.1,
        "throughput/rollout_idle": 0.1,
        "throughput/tokens_per_second": 1000.0,
        "time/step": 1.0,
        "time/train": 0.7,
        "time/wait_prev_gen": 0.1,
        "ledger/submitted": 8.0 * step,
        "ledger/dropped_generation_failed": 0.0,
    }
    return values | ({"val/score": 0.2 + 0.5 * part} if step % 10 == 0 else {})


def write_run(
    folder: Path,
    steps: int = 60,
    spoil: Callable[[Row, float], None] | None = None,
    config: Mapping[str, Any] | None = None,
    status: str | None = "finished",
    samples: list[Row] | None = None,
    events: list[Row] | None = None,
    spans: list[Row] | None = None,
    groups: list[Row] | None = None,
) -> Path:
    """A run of so many steps; `spoil(row, part of the run)` changes its rows."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row(step, steps) for step in range(steps + 1)]
    for each in rows:
        if spoil is not None:
            spoil(each, each["step"] / steps)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    summary = None if status is None else {"status": status, "steps": steps, "seconds": 61.0}
    record = {
        "config": {**CONFIG, "rollout_dump_dir": str(folder / "samples"), **(config or {})},
        "versions": {"torch": "2"},
    }
    (folder / "run.json").write_text(json.dumps({**record, "summary": summary}))
    if samples is not None:
        (folder / "samples").mkdir(exist_ok=True)
        lines = "".join(json.dumps(each) + "\n" for each in samples)
        (folder / "samples" / f"step-{steps:06d}.jsonl").write_text(lines)
    for name, lines_of in (("events", events), ("spans", spans), ("groups", groups)):
        if lines_of is not None:
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines_of))
    return folder


def sample(group: int, score: float, advantage: float, ids: list[int], **fields: Any) -> Row:
    """A line of a dump."""
    return {
        "id": f"p{group}",
        "prompt_id": f"p{group}",
        "ground_truth": "7",
        "group": group,
        "score": score,
        "prompt_ids": [1, 2, group + 10],
        "response_ids": ids,
        "behavior_log_probs": [-0.5] * len(ids),
        "old_log_probs": [-0.6] * len(ids),
        "weight_version": [3] * len(ids),
        "advantages": [advantage] * len(ids),
        **fields,
    }


def append(folder: Path, *rows: Row) -> None:
    """Writes further lines of metrics, as the run does at the end of a step."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in rows)


def spans_of(steps: int, engines: int = 2) -> list[Row]:
    """A second a step: the trainer waits, trains and updates weights, and the engines generate all the time."""
    made = []
    for step in range(1, steps + 1):
        at = 1000.0 + step
        work = [("trainer", "wait_prev_gen", 0.0, 0.1), ("trainer", "train", 0.1, 0.8)]
        work += [("trainer", "weight_update", 0.8, 1.0), ("rollout", "reward", 0.5, 0.6)]
        work += [(f"engine {number}", "generate", 0.0, 0.8) for number in range(engines)]
        made += [
            {"who": who, "what": what, "step": step, "start": at + start, "end": at + end}
            for who, what, start, end in work
        ]
    return made


def group_line(number: int, step: int, **fields: Any) -> Row:
    """A line of groups.jsonl: two samples of weights that are two versions old."""
    known = {"number": number, "step": step, "version": step - 3, "tag": "math", "name": f"p{number}", "engines": [0]}
    return {**known, "lengths": [4, 20], "scores": [1.0, 0.0], "consumed": 1000.0 + step, **fields}


def long_run(folder: Path, steps: int = 10_000, engines: int = 64) -> Path:
    """A run of many steps, engines, metrics and tokens; one gradient norm stands out."""
    chance = random.Random(5)

    def spoil(row: Row, part: float) -> None:
        row.update({f"reward/tag/metric_{number}": chance.random() for number in range(80)})
        row["actor/grad_norm"] = 77.0 if row["step"] == 4321 else 1.0

    ids = [[chance.randrange(50_000) for _ in range(1_000)] for _ in range(24)]
    samples = [
        sample(number // 4, 1.0, 0.5, ids[number], entropy=[chance.random() for _ in ids[number]])
        for number in range(24)
    ]
    groups = [group_line(number, number, lengths=[chance.randrange(2_000)] * 8) for number in range(1, steps + 1)]
    write_run(folder, steps, spoil, samples=samples, spans=spans_of(600, engines), groups=groups)
    (last,) = (folder / "samples").iterdir()
    for step in (1, steps // 4, steps // 2, 3 * steps // 4):
        (folder / "samples" / f"step-{step:06d}.jsonl").hardlink_to(last)
    return folder

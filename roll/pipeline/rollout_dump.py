"""Dumps of the samples of a step, for `roll show` and for analysis."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roll.distributed.protocol import DataProto

TOKEN_VALUES = ("behavior_log_probs", "weight_version", "old_log_probs", "ref_log_probs", "advantages")
"""Tensors [B, T] whose values at response tokens are written, where the batch has them."""


def dump_path(folder: Path, step: int) -> Path:
    """The file of one step."""
    return folder / f"step-{step:06d}.jsonl"


def dumped_steps(folder: Path) -> list[int]:
    """The steps with a file in the folder, in order; none if there is no folder."""
    numbers = (path.stem.removeprefix("step-") for path in folder.glob("step-*.jsonl"))
    return sorted(int(number) for number in numbers if number.isdecimal())


def dump_samples(data: DataProto, folder: Path, step: int) -> Path:
    """Writes one line for each sample and returns the file; a partly written file is never visible under its name.

    A line has `id`, `group`, `score`, `prompt_ids`, `response_ids`, and TOKEN_VALUES of each response token. In agentic
    runs it has `episode` too: `trajectory` (its name), `tag`, `seed`, `stop`, `outcome`, `metrics`, and `turns`, each
    with `observation`, `text`, `reward` and `versions`. Padding samples are left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = dump_path(folder, step)
    aside = path.with_suffix(".partial")
    with aside.open("w") as file:
        for sample in _samples(data):
            file.write(json.dumps(sample) + "\n")
    os.replace(aside, path)
    return path


def read_samples(folder: Path, step: int) -> list[dict[str, Any]]:
    """The lines that `dump_samples` wrote."""
    return [json.loads(line) for line in dump_path(folder, step).read_text().splitlines()]


def _samples(data: DataProto) -> Iterator[dict[str, Any]]:
    batch, names = data.batch, [name for name in TOKEN_VALUES if name in data.batch.keys()]
    for row in range(len(batch["input_ids"])):
        response = batch["response_mask"][row].bool()
        if not response.any():
            continue
        attended = batch["attention_mask"][row].bool()
        first = int(response.float().argmax())
        yield {
            "id": data.non_tensor_batch["id"][row],
            "group": int(batch["group_ids"][row]),
            "score": float(batch["scores"][row]),
            "prompt_ids": batch["input_ids"][row, :first][attended[:first]].tolist(),
            "response_ids": batch["input_ids"][row][response].tolist(),
            **{name: batch[name][row][response].tolist() for name in names},
            **({"episode": data.non_tensor_batch["episode"][row]} if "episode" in data else {}),
        }

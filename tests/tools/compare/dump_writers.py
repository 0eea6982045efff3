"""Writes batches in the formats of verl, slime and TRL, with the columns that their writers give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import torch
from pyarrow import parquet

PROMPTS = ("one", "one", "one", "one", "two", "two", "two", "two")
SCORES = (1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0)
LENGTHS = (1, 2, 3, 4, 1, 1, 2, 2)
PROMPT_IDS = {"one": [5, 6], "two": [7]}


def verl(folder: Path, uids: bool = False, scores: tuple[float, ...] = SCORES) -> Path:
    """As RayPPOTrainer and, with `uids`, the trainer of the transfer queue write it."""
    rows = []
    for number, (prompt, score) in enumerate(zip(PROMPTS, scores, strict=False)):
        row: dict[str, Any] = {"input": f"user\n{prompt}\nassistant\n", "output": f"answer\u2028{number}", "gts": "4"}
        row |= {"score": score, "step": 12}
        rows.append(row | ({"uid": f"{prompt}-uid_{number}_0"} if uids else {"acc": bool(score)}))
    path = folder / "12.jsonl"
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n")
    return path


def ids_of(number: int) -> list[int]:
    return [*PROMPT_IDS[PROMPTS[number]], *(11 + number + at for at in range(LENGTHS[number]))]


def slime_rollout(folder: Path, **columns: list[Any]) -> Path:
    """As `save_debug_rollout_data` writes the dictionaries of samples."""
    samples = [
        {
            "group_index": 0 if prompt == "one" else 1,
            "index": number,
            "rollout_id": None,
            "prompt": prompt,
            "tokens": ids_of(number),
            "response": f"answer {number}",
            "response_length": LENGTHS[number],
            "label": "4",
            "reward": SCORES[number],
            "loss_mask": None,
            "weight_versions": ["3"],
            "rollout_log_probs": [-0.5] * LENGTHS[number],
            "remove_sample": False,
            "status": "completed",
            "metadata": {},
            "spec_info": {"spec_accept_token_num": 0, "completion_token_num": 0},
        }
        | {name: values[number] for name, values in columns.items()}
        for number, prompt in enumerate(PROMPTS)
    ]
    path = folder / "3.pt"
    torch.save({"rollout_id": 3, "samples": samples}, path)
    return path


def slime_train(folder: Path, advantages: list[float], log_probs: list[torch.Tensor] | None = None) -> Path:
    """As `save_debug_train_data` writes what a training step computed."""
    samples = [
        {
            "data_parallel_rank": number % 2,
            "sample_index": number,
            "rollout_position": number,
            "tokens": torch.tensor(ids_of(number)),
            "response_lengths": length,
            "loss_masks": torch.ones(length, dtype=torch.int),
            "rewards": advantages[number],
            "log_probs": torch.full((length,), -0.7) if log_probs is None else log_probs[number],
            "rollout_log_probs": torch.full((length,), -0.7),
            "advantages": torch.full((length,), advantages[number]),
            "returns": torch.full((length,), advantages[number]),
        }
        for number, length in enumerate(LENGTHS)
    ]
    path = folder / "train_3.pt"
    payload = {"format_version": 2, "rollout_id": 3, "rank": 0, "samples": samples, "raw_reward": [*SCORES]}
    torch.save(payload | {"dp_shards": [{"rank": 0, "data_parallel_rank": 0, "sample_indices": [0]}]}, path)
    return path


def trl(folder: Path, advantages: list[float], **columns: list[Any]) -> Path:
    """As GRPOTrainer.log writes them: the rewards between completion and advantage, messages for conversations."""
    table: dict[str, list[Any]] = {
        "step": [20] * len(PROMPTS),
        "prompt": [[{"content": prompt, "role": "user"}] for prompt in PROMPTS],
        "completion": [[{"content": f"answer {number}", "role": "assistant"}] for number in range(len(PROMPTS))],
        **(columns or {"accuracy_reward": [*SCORES]}),
        "advantage": advantages,
    }
    path = folder / "completions_00020.parquet"
    parquet.write_table(pyarrow.table(table), path)
    return path

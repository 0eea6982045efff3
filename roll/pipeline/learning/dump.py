"""A batch as the file of `rollout_dump_dir`: the samples of a step with everything that the loss read of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
import torch

from roll.algorithms.aggregation import SAMPLE_WEIGHTS
from roll.datasets.batch import Batch
from roll.rollout.rollout_batch import TAG
from roll.trackers.sample_files import write_samples

COLUMNS = ("id", "prompt_id", "ground_truth", TAG, "stop", "engine", "parts", "episode")
"""Columns of a batch that say what a sample is, where the batch has them."""

TOKEN_VALUES = (
    *("behavior_log_probs", "weight_version", "old_log_probs", "train_log_probs", "ref_log_probs", "advantages"),
    *("entropy", "correction_weights", "correction_kept", "high_covariance", "turn_index", "learned"),
)
"""Tensors [B, T] whose values at response tokens are written, where the batch has them."""


def dump_samples(
    data: Batch,
    folder: Path,
    step: int,
    per_update: int = 0,
    about: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a row for each sample and returns the file; a partly written file is never visible under its name.

    A row has `id`, `prompt_id`, `ground_truth`, `tag`, `stop`, `engine`, `parts`, `group`, `score`, `prompt_ids`,
    `response_ids`, and TOKEN_VALUES of each response token; `update` is the optimizer step of a pass over the batch
    that learns from it, where each takes `per_update` samples. In agentic runs it has `episode` too: `trajectory` (its
    name), `tag`, `seed`, `stop`, `outcome`, `metrics`, and `turns`, each with `observation`, `text`, `reward` and
    `versions`. A branch of a trajectory has its number in `episode` as `branch`, and `sample_weight`, its weight in
    means over samples. Padding samples are left out. `about` is what all samples share: the settings of their loss.

    Raises:
        RunError: the file cannot be written.
    """
    return write_samples(folder, step, _columns(data, per_update), about or {})


def _columns(data: Batch, per_update: int) -> dict[str, Any]:
    batch = data.batch
    response, attended = batch["response_mask"].bool(), batch["attention_mask"].bool()
    before = attended & (response.long().cumsum(-1) == 0)
    rows = response.any(-1).nonzero().flatten()
    columns: dict[str, Any] = {
        name: [data.non_tensor_batch[name][row] for row in rows.tolist()] for name in COLUMNS if name in data
    }
    columns |= {"group": batch["group_ids"][rows].tolist(), "score": batch["scores"][rows].double().tolist()}
    if per_update:
        columns["update"] = (rows // per_update).tolist()
    if SAMPLE_WEIGHTS in data:
        columns["sample_weight"] = batch[SAMPLE_WEIGHTS][rows].double().tolist()
    columns["prompt_ids"] = _lists(batch["input_ids"][rows].int(), before[rows])
    columns["response_ids"] = _lists(batch["input_ids"][rows].int(), response[rows])
    for name in TOKEN_VALUES:
        if name in batch.keys():
            columns[name] = _lists(batch[name][rows], response[rows])
    return columns


def _lists(values: torch.Tensor, mask: torch.Tensor) -> pyarrow.ListArray:
    """The values [B, T] where the mask is true, as a list for each row."""
    counts = torch.cat([torch.zeros(1, dtype=torch.long), mask.sum(-1).cumsum(0)])
    return pyarrow.ListArray.from_arrays(pyarrow.array(counts.int().numpy()), pyarrow.array(values[mask].numpy()))

"""From scored groups to the tensors the learner takes, and the measures of a rollout."""

from __future__ import annotations

import statistics

import numpy as np
import torch

from roll.datasets.collate import collate_samples
from roll.distributed.protocol import DataProto
from roll.pipeline.rlvr.groups import Group


def batch_of_groups(groups: list[Group]) -> DataProto:
    """One row for each response, the rows of a group together.

    Adds `scores` [B] float32 and `group_ids` [B] int64 to the token tensors of architecture key names.
    """
    rows = [(group.prompt.ids, result) for group in groups for result in group.results]
    tensors = collate_samples([(ids, result.response_ids, result.log_probs, result.versions) for ids, result in rows])
    tensors["scores"] = torch.tensor([score for group in groups for score in group.scores], dtype=torch.float32)
    tensors["group_ids"] = torch.tensor([i for i, group in enumerate(groups) for _ in group.results])
    ids = np.array([group.prompt.id for group in groups for _ in group.results], dtype=object)
    return DataProto.from_dict(tensors, {"id": ids})


def rollout_metrics(groups: list[Group], version: int) -> dict[str, float]:
    """`rollout/...` and `staleness/...` of one batch that the weights of `version` learn from."""
    results = [result for group in groups for result in group.results]
    scores = [score for group in groups for score in group.scores]
    lengths = [len(result.response_ids) for result in results]
    ages = [version - token_version for result in results for token_version in result.versions]
    oldest = [version - min(result.versions) for result in results]
    return {
        "rollout/reward_mean": statistics.fmean(scores),
        "rollout/reward_std": statistics.pstdev(scores),
        "rollout/response_length_mean": statistics.fmean(lengths),
        "rollout/response_length_max": float(max(lengths)),
        "rollout/truncated_fraction": statistics.fmean(result.finish_reason == "length" for result in results),
        "staleness/mean": statistics.fmean(oldest),
        "staleness/max": float(max(oldest)),
        "staleness/token_mean": statistics.fmean(ages),
        "staleness/token_max": float(max(ages)),
    }


def validation_metrics(groups: list[Group]) -> dict[str, float]:
    """Mean score over all responses, and by tag."""
    by_tag: dict[str, list[float]] = {}
    for group in groups:
        by_tag.setdefault(group.prompt.tag, []).extend(group.scores)
    every = [score for scores in by_tag.values() for score in scores]
    lengths = [len(result.response_ids) for group in groups for result in group.results]
    metrics = {f"val/{tag}/score": sum(scores) / len(scores) for tag, scores in sorted(by_tag.items())}
    return {**metrics, "val/score": sum(every) / len(every), "val/response_length_mean": sum(lengths) / len(lengths)}

"""From groups of trajectories to the tensors the learner takes: one row for a trajectory, or for each of its turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roll.configs.agentic import SampleBy
from roll.datasets.collate import Sample, collate_samples
from roll.distributed.protocol import DataProto
from roll.pipeline.agentic.groups import TrajectoryGroup
from roll.rollout.types import Trajectory, Turn

NO_TURN = -1
"""`turn_index` of a token that no policy sampled, and `state_ids` of a turn that is not there."""
PADDING = Trajectory(ids=[0, 0], log_probs=[0.0, 0.0], versions=[-1, -1])
"""A sample of which no token is learned from, to make a number of samples divide."""


@dataclass(frozen=True)
class Row:
    """One sample: a trajectory up to the end of the last of its `turns`, of which only these are learned from."""

    name: str
    trajectory: Trajectory
    turns: Sequence[Turn]
    number: int
    group: int
    tag: str
    trajectory_name: str = ""


def batch_of_groups(groups: Sequence[TrajectoryGroup], sample_by: SampleBy, multiple: int = 1) -> DataProto:
    """One row for each trajectory (`traj`) or turn (`step`), the rows of a group together.

    Args:
        groups: complete ones.
        sample_by: what a row is.
        multiple: masked rows are added until the number of rows is one of this, as many to each run of so many rows, so
            that optimizer steps learn from about as many samples; a row is never there twice.

    Returns:
        The token tensors [B, T] of `collate_samples` and, with K the most turns of a row:
        `turn_index` [B, T] int64, the turn in its row of each sampled token, else NO_TURN;
        `turn_count` [B]; `turn_rewards` [B, K] float32; `state_ids` [B, K] int64, equal for turns of one group that
        answered the same observation; `scores` [B] of the whole episode; `group_ids`, `trajectory_ids`, `tag_ids` [B].
    """
    rows = _filled(list(_rows(groups, sample_by)), multiple)
    tensors = collate_samples([_sample(row) for row in rows])
    tags = {tag: index for index, tag in enumerate(dict.fromkeys(row.tag for row in rows))}
    most = max(len(row.turns) for row in rows)
    tensors |= {
        "turn_index": _turn_index(rows, tensors["response_mask"]),
        "turn_count": torch.tensor([len(row.turns) for row in rows]),
        "turn_rewards": _padded([[turn.reward for turn in row.turns] for row in rows], most, 0.0),
        "state_ids": _padded(_states(rows), most, NO_TURN),
        "scores": torch.tensor([row.trajectory.score for row in rows], dtype=torch.float32),
        "group_ids": torch.tensor([row.group for row in rows]),
        "trajectory_ids": torch.tensor([row.number for row in rows]),
        "tag_ids": torch.tensor([tags[row.tag] for row in rows]),
    }
    told = np.empty(len(rows), dtype=object)
    for index, row in enumerate(rows):
        told[index] = _told(row, groups)
    ids = np.array([row.name for row in rows], dtype=object)
    return DataProto.from_dict(tensors, {"id": ids, "episode": told})


def _rows(groups: Sequence[TrajectoryGroup], sample_by: SampleBy) -> Iterator[Row]:
    """Named after tag, group, member and, where a row is a turn, the turn."""
    number = 0
    for index, group in enumerate(groups):
        for member, trajectory in enumerate(group.trajectories):
            name = f"{group.tag}-{group.number}-{member}"
            shares = {name: trajectory.turns}
            if sample_by == "step":
                shares = {f"{name}-{place}": [turn] for place, turn in enumerate(trajectory.turns)}
            for share, turns in shares.items():
                yield Row(share, trajectory, turns, number, index, group.tag, name)
            number += 1


def _filled(rows: Sequence[Row], multiple: int) -> list[Row]:
    """The rows in their order, with masked ones at the end of each run of `multiple`."""
    runs = -(-len(rows) // multiple)
    empty, last = runs * multiple - len(rows), rows[-1]
    real = iter(rows)
    masked = iter(
        Row("padding", PADDING, (), last.number + 1 + place, last.group + 1 + place, "") for place in range(empty)
    )
    filled: list[Row] = []
    for run in range(runs):
        share = empty // runs + (run < empty % runs)
        filled += [*islice(real, multiple - share), *islice(masked, share)]
    return filled


def _sample(row: Row) -> Sample:
    """Prompt is what stands before the first turn of the row; between turns no policy sampled."""
    trajectory = row.trajectory
    start, end = (row.turns[0].start, row.turns[-1].end) if row.turns else (1, 2)
    return (
        trajectory.ids[:start],
        trajectory.ids[start:end],
        trajectory.log_probs[start:end],
        trajectory.versions[start:end],
    )


def _turn_index(rows: Sequence[Row], response_mask: Tensor) -> Tensor:
    index = torch.full(response_mask.shape, NO_TURN, dtype=torch.int64)
    for number, row in enumerate(rows):
        for place, turn in enumerate(row.turns):
            index[number, turn.start : turn.end] = place
    return index


def _states(rows: Sequence[Row]) -> list[list[int]]:
    """A number for each observation of each group."""
    numbers: dict[tuple[int, str], int] = {}
    return [[numbers.setdefault((row.group, turn.observation), len(numbers)) for turn in row.turns] for row in rows]


def _padded(values: Sequence[Sequence[Any]], width: int, fill: float | int) -> Tensor:
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in values])


def _told(row: Row, groups: Sequence[TrajectoryGroup]) -> dict[str, Any]:
    """What a person wants to see of a row; empty for padding."""
    if not row.turns:
        return {}
    group, trajectory = groups[row.group], row.trajectory
    return {
        "trajectory": row.trajectory_name,
        "tag": group.tag,
        "seed": group.seed,
        "stop": trajectory.stop,
        "outcome": trajectory.outcome,
        "metrics": trajectory.metrics,
        "turns": [
            {
                "observation": turn.observation,
                "text": turn.text,
                "reward": turn.reward,
                "versions": sorted(set(trajectory.versions[turn.start : turn.end])),
            }
            for turn in row.turns
        ],
    }

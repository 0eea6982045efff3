"""Groups of trajectories as the tensors the learner takes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from roll.algorithms.advantages import REWARD_PARTS
from roll.algorithms.aggregation import SAMPLE_WEIGHTS
from roll.configs.environments import SampleBy
from roll.datasets.batch import POLICY, ROUTING, Batch
from roll.datasets.collate import Sample, collate_samples, sampling_masks
from roll.rollout.types import NOT_SAMPLED, Group, Routing, SampledTurn, Trajectory

NO_TURN = -1
"""`turn_index` of a token that no policy sampled, and `state_ids` behind the last turn of a row."""

TAG = "tag"
"""Name of the column with the tag of each sample; empty for padding."""

PADDING = Trajectory(ids=[0, 0], log_probs=[0.0, 0.0], versions=[NOT_SAMPLED, NOT_SAMPLED])
"""A row without a trained token; it fills a batch up to whole optimizer steps."""


@dataclass(slots=True)
class Row:
    """One sample: a trajectory up to the end of the last of its `turns`; only the tokens of these turns are trained on.

    Attributes:
        name: of the sample in dumps.
        trajectory: that it is or belongs to, or a branch of it.
        turns: all of the trajectory, or one of them; none in a padding row.
        trajectory_id: number of the trajectory in the batch.
        group_id: number of the group in the batch.
        group: None in a padding row.
        trajectory_name: of the trajectory in dumps.
        whole: the trajectory, also where `trajectory` is a branch of it; its score is that of the row.
        branch: number of the branch, from 1; 0 where there is one only.
    """

    name: str
    trajectory: Trajectory
    turns: Sequence[SampledTurn]
    trajectory_id: int
    group_id: int
    group: Group | None
    trajectory_name: str
    whole: Trajectory
    branch: int = 0

    @property
    def end(self) -> int:
        return self.turns[-1].end if self.turns else 2


def batch_of_groups(
    groups: Sequence[Group],
    sample_by: SampleBy = "traj",
    multiple: int = 1,
    episodes: bool = False,
    rewards: Sequence[str] = (),
    policies: Mapping[str, str] | None = None,
) -> Batch:
    """One row for each trajectory or branch of one (`traj`) or turn (`step`), the rows of a group together.

    Args:
        groups: complete ones.
        sample_by: what a row is.
        multiple: padding rows are added until the number of rows is a multiple of this, spread evenly over the runs of
            so many rows, so that optimizer steps learn from about as many samples; no sample is copied.
        episodes: rows are named after trajectory and turn instead of the group, and described in the column `episode`.
        rewards: names of those whose scores the batch has one by one.
        policies: that share the batch, by tag: the rows of each are together, and padded.

    Returns:
        The token tensors [B, T] of `collate_samples` and, with K the most turns of a row:
        `turn_index` [B, T] int64, the turn within its row of each sampled token, else NO_TURN;
        `turn_count` [B]; `turn_rewards` [B, K] float32; `state_ids` [B, K] int64, equal for turns of one group that
        responded to the same observation; `scores` [B] of the whole trajectory; `group_ids`, `trajectory_ids` and
        `tag_ids` [B]; `truncated` [B] bool, whether the trajectory was cut at its length. Where every group has a
        greedy response: `greedy_scores` [B] float32, its score, and `greedy_lengths` [B] int64, its tokens. With
        `rewards`, R of them: `reward_parts` [B, R] float32, the score of each before its weight, NaN where a reward
        does not score the sample. With branches SAMPLE_WEIGHTS [B] float32, 1 / the rows of the trajectory. With
        truncated sampling also the tensors of `sampling_masks`. The column `tag` has
        the name of each tag; the columns `id`, `prompt_id`, `ground_truth`, `stop` (why the trajectory ended),
        `engine`, `parts` (its score by each reward) and `episode` are for dumps; the column `routing` has the experts
        of each row, where they are recorded; the column `policy` has the policy of each row, where there are several.
    """
    of_policies: dict[str, list[Row]] = {}
    for row in _rows(groups, sample_by):
        name = policies[row.group.tag] if policies and row.group else ""
        of_policies.setdefault(name, []).append(row)
    of_policies = {name: _pad_rows(own, multiple) for name, own in of_policies.items()}
    rows = [row for own in of_policies.values() for row in own]
    columns = _columns(rows, episodes)
    if policies:
        columns[POLICY] = [name for name, own in of_policies.items() for _ in own]
    return Batch(_tensors(rows, groups, sample_by, rewards), columns)


def _tags(rows: Sequence[Row]) -> list[str]:
    return ["" if row.group is None else row.group.tag for row in rows]


def _tensors(
    rows: Sequence[Row], groups: Sequence[Group], sample_by: SampleBy, rewards: Sequence[str]
) -> dict[str, torch.Tensor]:
    tensors = collate_samples([_sample(row) for row in rows])
    tags = _tags(rows)
    tag_numbers = {tag: number for number, tag in enumerate(dict.fromkeys(tags))}
    width = max(len(row.turns) for row in rows)
    tensors |= {
        "turn_index": _turn_index(rows, tensors["response_mask"]),
        "turn_count": torch.tensor([len(row.turns) for row in rows]),
        "turn_rewards": _pad_columns([[turn.reward for turn in row.turns] for row in rows], width, 0.0),
        "state_ids": _pad_columns(_state_ids(rows), width, NO_TURN),
        "scores": torch.tensor([row.whole.score for row in rows], dtype=torch.float32),
        "group_ids": torch.tensor([row.group_id for row in rows]),
        "trajectory_ids": torch.tensor([row.trajectory_id for row in rows]),
        "tag_ids": torch.tensor([tag_numbers[tag] for tag in tags]),
        "truncated": torch.tensor([row.whole.stop == "sequence_length" for row in rows]),
    }
    if all(group.greedy is not None for group in groups):
        greedy = [None if row.group is None else row.group.greedy for row in rows]
        tensors |= {
            "greedy_scores": torch.tensor([each.score if each else 0.0 for each in greedy], dtype=torch.float32),
            "greedy_lengths": torch.tensor([len(each.sampled_versions) if each else 0 for each in greedy]),
        }
    if sample_by == "traj" and any(row.branch for row in rows):
        tensors[SAMPLE_WEIGHTS] = torch.tensor([1 / len(row.whole.rows) for row in rows])
    masks = [row.trajectory.sampling_mask[: row.end] for row in rows]
    tensors |= sampling_masks(masks, tensors["input_ids"].shape[1])
    if rewards:
        parts = [[row.whole.reward_parts.get(name, math.nan) for name in rewards] for row in rows]
        tensors[REWARD_PARTS] = torch.tensor(parts, dtype=torch.float32)
    return tensors


def _columns(rows: Sequence[Row], episodes: bool) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {
        TAG: _tags(rows),
        "id": [row.name if episodes or row.group is None else row.group.name for row in rows],
        "prompt_id": ["" if row.group is None else _prompt_id(row.group, episodes) for row in rows],
        "ground_truth": [None if row.group is None else row.group.ground_truth for row in rows],
        "stop": [row.whole.stop for row in rows],
        "engine": [row.turns[-1].engine if row.turns else None for row in rows],
        "parts": [row.whole.reward_parts for row in rows],
    }
    if any(row.trajectory.routing is not None for row in rows):
        columns[ROUTING] = _routing(rows)
    if episodes:
        columns["episode"] = [_describe_episode(row) for row in rows]
    return columns


def _routing(rows: Sequence[Row]) -> list[Routing]:
    """The experts of all tokens of a row but the last; of none in a padding row."""
    [first, *_] = (row.trajectory.routing for row in rows if row.trajectory.routing is not None)
    recorded = (first[:0] if row.trajectory.routing is None else row.trajectory.routing for row in rows)
    return [routing[: row.end - 1] for row, routing in zip(rows, recorded, strict=True)]


def _prompt_id(group: Group, episodes: bool) -> str:
    """The same for groups of the same prompt, or of the same environment with the same seed."""
    return f"{group.tag}/{group.problem}" if episodes else group.name


def _rows(groups: Sequence[Group], sample_by: SampleBy) -> Iterator[Row]:
    """Rows in the order of the groups; their names contain the index of trajectory and turn."""
    trajectory_id = 0
    for group_id, group in enumerate(groups):
        for index, whole in enumerate(group.trajectories):
            name = f"{group.name}-{index}"
            for number, trajectory in enumerate(whole.rows, start=1):
                branch, own = (number, f"{name}.{number}") if whole.branches else (0, name)
                about = trajectory_id, group_id, group, name, whole, branch
                if sample_by == "traj":
                    yield Row(own, trajectory, trajectory.turns, *about)
                else:
                    for turn_place, turn in enumerate(trajectory.turns):
                        yield Row(f"{own}-{turn_place}", trajectory, [turn], *about)
            trajectory_id += 1


def _pad_rows(rows: Sequence[Row], multiple: int) -> list[Row]:
    """The rows in their order, with padding rows at the end of each run of `multiple`."""
    runs = -(-len(rows) // multiple)
    missing, last = runs * multiple - len(rows), rows[-1]
    real = iter(rows)
    padding = (
        Row("padding", PADDING, (), last.trajectory_id + 1 + index, last.group_id + 1 + index, None, "", PADDING)
        for index in range(missing)
    )
    padded: list[Row] = []
    for run in range(runs):
        share = missing // runs + (run < missing % runs)
        padded += [*islice(real, multiple - share), *islice(padding, share)]
    return padded


def _sample(row: Row) -> Sample:
    """The prompt ends where the first turn of the row begins; observations between its turns are not sampled."""
    trajectory = row.trajectory
    start, end = row.turns[0].start if row.turns else 1, row.end
    return (
        trajectory.ids[:start],
        trajectory.ids[start:end],
        trajectory.log_probs[start:end],
        trajectory.versions[start:end],
    )


def _turn_index(rows: Sequence[Row], response_mask: Tensor) -> Tensor:
    index = torch.where(response_mask, 0, NO_TURN)
    for number, row in enumerate(rows):
        for turn_number, turn in enumerate(row.turns[1:], start=1):
            index[number, turn.start : turn.end] = turn_number
    return index


def _state_ids(rows: Sequence[Row]) -> list[list[int]]:
    """A number for each observation of each group."""
    numbers: dict[tuple[int, str], int] = {}
    return [[numbers.setdefault((row.group_id, turn.observation), len(numbers)) for turn in row.turns] for row in rows]


def _pad_columns(values: Sequence[Sequence[float]], width: int, fill: float) -> Tensor:
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in values])


def _describe_episode(row: Row) -> dict[str, Any]:
    """The row's trajectory as JSON for dumps; empty for padding."""
    if row.group is None:
        return {}
    whole = row.whole
    return {
        "trajectory": row.trajectory_name,
        **({"branch": row.branch} if row.branch else {}),
        "tag": row.group.tag,
        "seed": row.group.problem,
        "stop": whole.stop,
        "outcome": whole.outcome,
        "metrics": whole.metrics,
        "turns": [
            {
                "observation": turn.observation,
                "text": turn.text,
                "reward": turn.reward,
                "versions": sorted(set(row.trajectory.versions[turn.start : turn.end])),
            }
            for turn in row.turns
        ],
    }

"""The turns of a batch of trajectories, and the trajectories themselves, each counted once.

A sample is a whole trajectory of up to K turns, or one turn of it (step sampling: K is 1, and several samples share a
trajectory). Samples without response tokens are padding and count for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class Turns:
    """What a batch says about turns.

    Attributes:
        turn_index: [B, T] int64, the turn of each response token, from 0 within its sample; -1 elsewhere.
        turn_rewards: [B, K] float32, what the environment gave for each turn; 0 behind the last.
        turn_count: [B] int64.
        state_ids: [B, K] int64, equal where two turns of one group began in the same state; -1 behind the last.
        trajectory_ids: [B] int64. Samples of one trajectory stand in the order of its turns.
        tag_ids: [B] int64, the kind of environment.
    """

    turn_index: Tensor
    turn_rewards: Tensor
    turn_count: Tensor
    state_ids: Tensor
    trajectory_ids: Tensor
    tag_ids: Tensor


TURN_KEYS = tuple(item.name for item in fields(Turns))
"""The tensors of a batch that `read_turns` takes."""


def read_turns(batch: Mapping[str, Tensor]) -> Turns | None:
    """The turns of a batch; None where it has no `turn_index`.

    Raises:
        ValueError: some of the tensors are there and some are not.
    """
    present = set(batch.keys())
    if "turn_index" not in present:
        return None
    missing = [name for name in TURN_KEYS if name not in present]
    if missing:
        raise ValueError(f"the batch has turn_index but not {', '.join(missing)}; turns need all of {TURN_KEYS}")
    return Turns(**{name: batch[name] for name in TURN_KEYS})


def check_turns(turns: Turns, scores: Tensor, groups: Tensor, response_mask: Tensor) -> None:
    """Refuses turns that contradict the rest of the batch.

    Raises:
        ValueError: a response token belongs to no turn, a turn has no finite reward or no state, or samples of one
            trajectory differ in score or group.
    """
    mask = response_mask.bool()
    live = mask.any(-1)
    columns = torch.arange(turns.turn_rewards.shape[1], device=mask.device)
    there = (columns < turns.turn_count[:, None]) & live[:, None]
    turn = turns.turn_index
    _refuse((mask & ((turn < 0) | (turn >= turns.turn_count[:, None]))).any(-1), "have response tokens of no turn")
    _refuse(live & (turns.turn_count > len(columns)), f"have more turns than the {len(columns)} of turn_rewards")
    _refuse((there & ~turns.turn_rewards.isfinite()).any(-1), "have turn_rewards that are not finite")
    _refuse((there & (turns.state_ids < 0)).any(-1), "have turns without a state (state_ids below 0)")
    episodes = episodes_of(mask, turns)
    for name, values in (("scores", scores), ("group_ids", groups)):
        differs = live & (values != episodes.spread(episodes.once(values)))
        _refuse(differs, f"differ in {name} from the first sample of their trajectory")


def _refuse(bad: Tensor, what: str) -> None:
    if bool(bad.any()):
        raise ValueError(f"samples {bad.nonzero().flatten()[:8].tolist()} {what}")


@dataclass(frozen=True)
class Episodes:
    """The E trajectories of a batch, in whatever number of samples each of them stands.

    Attributes:
        rows: [E] int64, the first sample of each.
        of_row: [B] int64, whose each sample is; -1 for padding.
    """

    rows: Tensor
    of_row: Tensor

    def once(self, values: Tensor) -> Tensor:
        """[E] of values [B] on which the samples of a trajectory agree."""
        return values[self.rows]

    def numbers(self, ids: Tensor) -> Tensor:
        """[E] group numbers from 0 on, from ids [B]."""
        return self.once(ids).unique(return_inverse=True)[1]

    def total(self, values: Tensor) -> Tensor:
        """[E] sums of values [B] over the samples of each trajectory."""
        live = self.of_row >= 0
        return values.new_zeros(len(self.rows)).index_add_(0, self.of_row[live], values[live])

    def spread(self, values: Tensor) -> Tensor:
        """[B] from values [E]: each sample has its trajectory's, padding has 0."""
        return torch.cat([values, values.new_zeros(1)])[self.of_row]


def episodes_of(response_mask: Tensor, turns: Turns | None) -> Episodes:
    """The trajectories of a batch with response_mask [B, T]; without turns every sample is one, padding or not."""
    everyone = torch.arange(len(response_mask), device=response_mask.device)
    if turns is None:
        return Episodes(everyone, everyone)
    live = everyone[response_mask.bool().any(-1)]
    ids, episode = turns.trajectory_ids[live].unique(return_inverse=True)
    of_row = torch.full_like(everyone, -1)
    of_row[live] = episode
    first = everyone.new_full((len(ids),), len(everyone)).scatter_reduce_(0, episode, live, "amin")
    return Episodes(first, of_row)

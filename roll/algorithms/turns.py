"""The turns of a batch of trajectories, and its episodes.

A sample is a whole trajectory of up to K turns, or a single turn of one (step sampling: K is 1, and several samples
belong to one trajectory). Samples without response tokens are padding and are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from roll.algorithms.lazy_torch import Tensor, torch


@dataclass(frozen=True)
class Turns:
    """Tensors that describe the turns of a batch.

    Attributes:
        turn_index: [B, T] int64, the turn of each response token, counted from 0 in its sample; -1 elsewhere.
        turn_rewards: [B, K] float32, the environment's reward for each turn; 0 after the last.
        turn_count: [B] int64.
        state_ids: [B, K] int64, equal for turns of one group that began in the same state; -1 after the last.
        trajectory_ids: [B] int64; the samples of one trajectory are in the order of its turns.
        tag_ids: [B] int64, the environment tag.
    """

    turn_index: Tensor
    turn_rewards: Tensor
    turn_count: Tensor
    state_ids: Tensor
    trajectory_ids: Tensor
    tag_ids: Tensor


TURN_KEYS = tuple(item.name for item in fields(Turns))
"""Names of the batch tensors that `read_turns` reads."""


def read_turns(batch: Mapping[str, Tensor]) -> Turns | None:
    """The turns of a batch; None if it has no `turn_index`.

    Raises:
        ValueError: only some of the tensors are present.
    """
    present = set(batch.keys())
    if "turn_index" not in present:
        return None
    missing = [name for name in TURN_KEYS if name not in present]
    if missing:
        raise ValueError(f"the batch has turn_index but not {', '.join(missing)}; turns need all of {TURN_KEYS}")
    return Turns(**{name: batch[name] for name in TURN_KEYS})


def check_turns(turns: Turns, scores: Tensor, groups: Tensor, response_mask: Tensor) -> None:
    """Checks that the turns are consistent with the rest of the batch.

    Raises:
        ValueError: a response token belongs to no turn, a turn has no finite reward or no state, or samples of one
            trajectory differ in score or group.
    """
    mask = response_mask.bool()
    live = mask.any(-1)
    columns = torch.arange(turns.turn_rewards.shape[1], device=mask.device)
    present = (columns < turns.turn_count[:, None]) & live[:, None]
    turn = turns.turn_index
    _refuse((mask & ((turn < 0) | (turn >= turns.turn_count[:, None]))).any(-1), "have response tokens of no turn")
    _refuse(live & (turns.turn_count > len(columns)), f"have more turns than the {len(columns)} of turn_rewards")
    _refuse((present & ~turns.turn_rewards.isfinite()).any(-1), "have turn_rewards that are not finite")
    _refuse((present & (turns.state_ids < 0)).any(-1), "have turns without a state (state_ids below 0)")
    episodes = episodes_of(mask, turns)
    for name, values in (("scores", scores), ("group_ids", groups)):
        differs = live & (values != episodes.to_samples(episodes.per_episode(values)))
        _refuse(differs, f"differ in {name} from the first sample of their trajectory")


def _refuse(bad: Tensor, what: str) -> None:
    if bool(bad.any()):
        raise ValueError(f"samples {bad.nonzero().flatten()[:8].tolist()} {what}")


@dataclass(frozen=True)
class Episodes:
    """The E episodes of a batch: its trajectories, or its samples if it has no turns.

    Attributes:
        rows: [E] int64, the first sample of each episode.
        of_row: [B] int64, the episode of each sample; -1 for padding.
    """

    rows: Tensor
    of_row: Tensor

    def per_episode(self, values: Tensor) -> Tensor:
        """[E] from values [B] that are equal for all samples of an episode."""
        return values[self.rows]

    def group_numbers(self, ids: Tensor) -> Tensor:
        """[E] group numbers from 0, from ids [B]."""
        return consecutive(self.per_episode(ids))

    def sum_samples(self, values: Tensor) -> Tensor:
        """[E] sums of values [B] over the samples of each episode."""
        live = self.of_row >= 0
        return values.new_zeros(len(self.rows)).index_add_(0, self.of_row[live], values[live])

    def to_samples(self, values: Tensor) -> Tensor:
        """[B] from values [E]: each sample gets the value of its episode, padding gets 0."""
        return torch.cat([values, values.new_zeros(1)])[self.of_row]


def episodes_of(response_mask: Tensor, turns: Turns | None) -> Episodes:
    """The episodes of a batch with response_mask [B, T]; without turns every sample is one, including padding."""
    samples = torch.arange(len(response_mask), device=response_mask.device)
    if turns is None:
        return Episodes(samples, samples)
    live = samples[response_mask.bool().any(-1)]
    episode = consecutive(turns.trajectory_ids[live])
    of_row = torch.full_like(samples, -1)
    of_row[live] = episode
    count = int(episode.max()) + 1 if len(episode) else 0
    first = samples.new_full((count,), len(samples)).scatter_reduce_(0, episode, live, "amin")
    return Episodes(first, of_row)


def consecutive(ids: Tensor) -> Tensor:
    """Numbers from 0 without gaps, in the order of the ids [n]; equal where the ids are equal."""
    numbers: Tensor = torch.unique(ids, return_inverse=True)[1]
    return numbers

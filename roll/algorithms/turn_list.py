"""The turns of a batch as one list, whichever samples they stand in, and their way back to the tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.estimation import Shaped
from roll.algorithms.masking import masked
from roll.algorithms.turns import Turns


@dataclass(frozen=True)
class TurnList:
    """N turns: those of each sample in order, samples in the batch's order, padding left out.

    Attributes:
        rows: [N] the sample a turn stands in.
        columns: [N] its number within the sample.
        episode: [N] its trajectory, as `Episodes` numbers them.
        position: [N] its number within the trajectory.
        last: [N] bool, whether it is the trajectory's last.
    """

    rows: Tensor
    columns: Tensor
    episode: Tensor
    position: Tensor
    last: Tensor

    @classmethod
    def of(cls, shaped: Shaped, turns: Turns) -> TurnList:
        """The turns of a batch."""
        of_row = shaped.episodes.of_row
        numbers = torch.arange(turns.turn_rewards.shape[1], device=of_row.device)
        there = (numbers < turns.turn_count[:, None]) & (of_row >= 0)[:, None]
        rows, columns = there.nonzero(as_tuple=True)
        episode = of_row[rows]
        order = episode.argsort(stable=True)
        counts = torch.bincount(episode, minlength=len(shaped.episodes.rows))
        position = torch.empty_like(episode)
        position[order] = torch.arange(len(order), device=of_row.device) - (counts.cumsum(0) - counts)[episode[order]]
        return cls(rows, columns, episode, position, position == counts[episode] - 1)

    def totals(self, values: Tensor, episodes: int) -> Tensor:
        """[E] sums of values [N] over the turns of each of E trajectories."""
        return values.new_zeros(episodes).index_add_(0, self.episode, values)

    def discounted(self, rewards: Tensor, gamma: float) -> Tensor:
        """G_k = r_k + gamma G_{k+1} [N] over the turns of each trajectory, from rewards r [N]."""
        if not len(rewards):
            return rewards
        table = rewards.new_zeros(int(self.episode.max()) + 1, int(self.position.max()) + 1)
        table[self.episode, self.position] = rewards
        for k in range(table.shape[1] - 2, -1, -1):
            table[:, k] += gamma * table[:, k + 1]
        return table[self.episode, self.position]


def turn_rewards(shaped: Shaped, turns: Turns, listed: TurnList) -> Tensor:
    """The reward r [N] of each turn less the KL penalty of its tokens."""
    penalties = torch.zeros_like(turns.turn_rewards, dtype=shaped.token_kl.dtype)
    penalties.scatter_add_(1, turns.turn_index.clamp(min=0), masked(shaped.token_kl, shaped.response_mask))
    return (turns.turn_rewards.float() - penalties)[listed.rows, listed.columns]


def on_tokens(values: Tensor, shaped: Shaped, turns: Turns, listed: TurnList) -> Tensor:
    """[B, T] from values of turns [N]: every response token has its turn's, all others have 0."""
    table = values.new_zeros(turns.turn_rewards.shape)
    table[listed.rows, listed.columns] = values
    return masked(table.gather(1, turns.turn_index.clamp(min=0)), shaped.response_mask)

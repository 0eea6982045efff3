"""Rewards of tokens, and sums of them over the tokens that follow: returns, and advantages from a critic's values.

A sequence is what is generated without a break in time: a response, or all samples of a trajectory in the order of its
turns. Tokens that were not sampled, such as observations between turns, do not count as steps: values and sums pass
over them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from roll.algorithms.aggregation import masked, place_tokens, select_tokens, token_index
from roll.algorithms.lazy_torch import Tensor, torch

if TYPE_CHECKING:
    from roll.algorithms.turns import Episodes, Turns

BLOCK = 64
"""Columns that `discounted_sum` adds up by one matrix product."""


def token_rewards(scores: Tensor, token_kl: Tensor | None, response_mask: Tensor) -> Tensor:
    """Rewards [B, T]: the score [B] on the last response token of each sample, minus the KL penalty of every token."""
    mask = response_mask.bool()
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, positions, -1).amax(dim=1, keepdim=True)
    given = torch.where(last >= 0, scores[:, None], 0.0)
    return _minus_kl(given.new_zeros(mask.shape).scatter_(1, last.clamp(min=0), given), token_kl, mask)


def turn_token_rewards(
    scores: Tensor, token_kl: Tensor | None, response_mask: Tensor, turns: Turns, episodes: Episodes
) -> Tensor:
    """Rewards [B, T] of trajectories: each turn's on its last token, minus the KL penalty of every token.

    What the score [B] of the trajectory has beyond the rewards of its turns, such as the change made by `reward_clip`
    or the reward of a turn without a token, is on its last token.
    """
    mask = response_mask.bool()
    columns = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    last = torch.full_like(turns.state_ids, -1)
    last.scatter_reduce_(1, turns.turn_index.clamp(min=0), torch.where(mask, columns, -1), "amax")
    given = torch.where(last >= 0, turns.turn_rewards.float(), 0.0)
    rewards = given.new_zeros(mask.shape).scatter_add_(1, last.clamp(min=0), given)
    live = episodes.of_row >= 0
    numbers = torch.arange(len(mask), device=mask.device)
    final = numbers.new_full((len(episodes.rows),), -1)
    final.scatter_reduce_(0, episodes.of_row[live], numbers[live], "amax")
    rest = episodes.per_episode(scores) - episodes.sum_samples(given.sum(-1))
    rewards[final, torch.where(mask, columns, -1).amax(-1)[final]] += rest
    return _minus_kl(rewards, token_kl, mask)


def _minus_kl(rewards: Tensor, token_kl: Tensor | None, mask: Tensor) -> Tensor:
    return rewards if token_kl is None else rewards - masked(token_kl, mask)


def response_returns(scores: Tensor, token_kl: Tensor | None, response_mask: Tensor, gamma: float) -> Tensor:
    """G_t [B, T] of responses whose score [B] is the reward of the last token."""
    if gamma == 1.0 and token_kl is None:
        return masked(scores[:, None], response_mask)
    return return_to_go(token_rewards(scores, token_kl, response_mask), response_mask, gamma)


def return_to_go(rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_{t+1} over the response tokens [B, T] of each sample."""
    return along_tokens(lambda table: discounted_sum(table, gamma), response_mask, rewards)


def generalized_advantages(
    rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lambd: float, sequences: Tensor | None = None
) -> Tensor:
    """A_t = delta_t + gamma lambd A_{t+1} with delta_t = r_t + gamma V_{t+1} - V_t over the response tokens [B, T].

    After the last token of a sequence V and A are 0. Source: Schulman et al. 2016 (arXiv 1506.02438) eq. 16.

    Args:
        rewards: r [B, T].
        values: V [B, T], index t for the tokens before t.
        response_mask: [B, T].
        gamma: discount.
        lambd: weight of later differences.
        sequences: [B] equal for the samples of one trajectory, -1 for padding; None: each sample is a sequence.
    """

    def advantages(rewards: Tensor, values: Tensor) -> Tensor:
        following = torch.nn.functional.pad(values[:, 1:], (0, 1))
        return discounted_sum(rewards + gamma * following - values, gamma * lambd)

    return along_tokens(advantages, response_mask, rewards, values, sequences=sequences)


def along_tokens(
    function: Callable[..., Tensor], response_mask: Tensor, *tables: Tensor, sequences: Tensor | None = None
) -> Tensor:
    """Applies a function of [N, L] tensors to the response tokens of each sequence, without what is between them.

    Args:
        function: takes the tables, one row for each sequence and 0 after its last token, and returns one like them.
        response_mask: [B, T].
        tables: [B, T] each.
        sequences: as for `generalized_advantages`.

    Returns:
        [B, T], 0 outside the mask.
    """
    mask = response_mask.bool()
    gaps = (mask[:, 1:] > mask[:, :-1]).sum(-1) + mask[:, 0] > 1
    if sequences is None and not bool(gaps.any()):
        return masked(function(*(masked(table, mask) for table in tables)), mask)
    index = token_index(mask)
    rows = index // mask.shape[1]
    of_token = rows if sequences is None else sequences[rows]
    of_token, order = of_token.sort(stable=True)
    index, counts = index[order], torch.bincount(of_token)
    position = torch.arange(len(index), device=mask.device) - (counts.cumsum(0) - counts)[of_token]
    shape = (len(counts), int(counts.max()) if len(counts) else 0)
    target = of_token * shape[1] + position
    compact = [place_tokens(select_tokens(table, index), target, shape) for table in tables]
    return place_tokens(select_tokens(function(*compact), target), index, mask.shape)


def discounted_sum(values: Tensor, factor: float) -> Tensor:
    """G_t = x_t + factor G_{t+1} along the rows [N, L].

    The columns of a block are summed by a matrix of powers, and the sums of the blocks in the same way, so that
    Python runs over levels of blocks and not over tokens.
    """
    if factor == 1.0:
        return values.flip(-1).cumsum(-1).flip(-1)
    count, length = values.shape
    size = min(BLOCK, length)
    if length == 0 or factor == 0.0:
        return values
    position = torch.arange(size, device=values.device, dtype=torch.float64)
    distance = position[:, None] - position
    powers = torch.where(distance >= 0, factor ** distance.clamp(min=0), 0.0).to(values.dtype)
    blocks = torch.nn.functional.pad(values, (0, -length % size)).view(count, -1, size)
    sums = blocks @ powers
    if blocks.shape[1] > 1:
        following = torch.nn.functional.pad(discounted_sum(sums[:, :, 0], factor**size)[:, 1:], (0, 1))
        sums = torch.addcmul(sums, following[:, :, None], (factor ** (size - position)).to(values.dtype))
    return sums.reshape(count, -1)[:, :length]

"""The optimal baseline of each token position."""

from __future__ import annotations

from roll.algorithms.aggregation import EPSILON
from roll.algorithms.estimators.base import DiscountOptions, RewardBatch, estimator, given
from roll.algorithms.lazy_torch import Tensor, torch
from roll.algorithms.returns import along_tokens, discounted_sum


@estimator("optimal_token_baseline", options=DiscountOptions, needs="squared_gradients", in_group=True)
def optimal_token_baseline(batch: RewardBatch, options: DiscountOptions) -> tuple[Tensor, Tensor]:
    """A_t = G_t - sum_j W_jt G_jt / sum_j W_jt over the group's responses j that have a token t.

    G is the discounted return to go. W_t = EPSILON + sum_{s <= t} w_s^2 (1 - 2 pi_s + sum pi_s^2), the squares of the
    gradients up to t with respect to the logits, where pi_s is the probability of the sampled token and w_s its
    correction weight. So the baseline of each token has the least variance, if gradients of logits stand for those of
    weights. Tokens of a trajectory are counted over all of its turns. A token that only the longest response has gets
    the baseline of the last position that two responses have. Source: Li et al. 2026, "The Optimal Token Baseline".
    """
    mask, groups, sequences = batch.response_mask, batch.episode_groups, batch.episodes.of_row

    def to_go(rewards: Tensor) -> Tensor:
        return discounted_sum(rewards, options.gamma)

    def minus_baseline(returns: Tensor, squares: Tensor, present: Tensor) -> Tensor:
        weights = present * (EPSILON + squares.cumsum(-1))
        baselines, equal = token_baselines(returns, weights, present, groups[: len(returns)])
        return torch.where(equal, 0.0, returns - baselines)

    returns = along_tokens(to_go, mask, batch.token_rewards().double(), sequences=sequences)
    inputs = (returns, given(batch.squared_gradients), mask.double())
    return along_tokens(minus_baseline, mask, *inputs, sequences=sequences).float(), returns.float()


def token_baselines(returns: Tensor, weights: Tensor, present: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted mean of a group's returns at each position, and whether all of them equal the response's own one.

    Args:
        returns: [E, L], token t of each response at column t.
        weights: [E, L], positive where present.
        present: [E, L] 1.0 for tokens that exist, which are the first of each row.
        groups: [E] group numbers from 0.

    Returns:
        Both [E, L]. A position that fewer than two responses of the group have takes those of the last one that two
        have; a group of one has its own returns.
    """

    def over_group(values: Tensor) -> Tensor:
        return values.new_zeros(size, values.shape[1]).index_add_(0, groups, values)

    size = int(groups.max()) + 1 if groups.numel() else 0
    index = groups[:, None].expand_as(returns)
    exists = present.bool()
    means = over_group(weights * returns) / over_group(weights).clamp(min=EPSILON)
    extreme = returns.new_full((size, returns.shape[1]), -torch.inf)
    highest = extreme.scatter_reduce(0, index, returns.masked_fill(~exists, -torch.inf), "amax")
    lowest = -extreme.scatter_reduce(0, index, (-returns).masked_fill(~exists, -torch.inf), "amax")
    last_shared = (over_group(present) >= 2).sum(-1) - 1
    position = torch.arange(returns.shape[1], device=returns.device)
    position = torch.minimum(position.expand(size, -1), last_shared.clamp(min=0)[:, None])
    means, highest, lowest = (table.gather(1, position)[groups] for table in (means, highest, lowest))
    equal = ((highest == lowest) & (returns == highest)) | (last_shared < 0)[groups][:, None]
    return means, equal

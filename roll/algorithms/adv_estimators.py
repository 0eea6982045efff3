"""Advantage estimators (`adv_estimator`): one function each, registered in ADV_ESTIMATORS.

Those that use the turns of a trajectory are in `roll.algorithms.turn_advantages`. In the formulas, R is the score of a
response or trajectory minus the KL penalty of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from roll.algorithms.aggregation import EPSILON, constant_group, group_mean, masked, normalize, whiten
from roll.algorithms.lazy_torch import Tensor, torch
from roll.algorithms.registry import Registry
from roll.algorithms.returns import (
    along_tokens,
    discounted_sum,
    generalized_advantages,
    response_returns,
    token_rewards,
    turn_token_rewards,
)
from roll.algorithms.turn_advantages import (
    Episodes,
    Turns,
    agentic_reinforce,
    episodes_of,
    gigpo,
    step_reinforce,
)

if TYPE_CHECKING:
    from roll.algorithms.advantages import AdvantageSettings


@dataclass(frozen=True)
class RewardBatch:
    """Input of an estimator, after `reward_clip` and `whiten_rewards`.

    Attributes:
        scores: R_i [B].
        token_kl: [B, T] the KL penalty of each token (coefficient times KL); None without `add_token_level_kl`.
        groups: [B] int64, equal for the samples of one prompt, or of trajectories from one start state.
        response_mask: [B, T] bool.
        turns: of trajectories; None for single-turn responses.
        values: [B, T] of a critic, index t for the tokens before t; None without one.
        baselines: [B] score of the greedy response to each sample's prompt, after the overlong penalty and
            `reward_clip`; None without greedy responses.
        teacher_kl: [B, T] log-prob of the policy minus that of the teacher for each sampled token; None without one.
        reward_parts: [B, R] score of each reward before its weight, without `reward_clip` and `whiten_rewards`; NaN
            where a reward does not score the sample. None if only their sum is known.
        overlong: [B] what the scores have lost by `overlong_buffer_len` and the penalties of lengths; None: nothing.
        squared_gradients: [B, T] square of the gradient of a token's log-prob with respect to the logits, times that of
            its weight in the loss; None where the probabilities of all tokens are not known.
    """

    scores: Tensor
    token_kl: Tensor | None
    groups: Tensor
    response_mask: Tensor
    turns: Turns | None = None
    values: Tensor | None = None
    baselines: Tensor | None = None
    teacher_kl: Tensor | None = None
    reward_parts: Tensor | None = None
    overlong: Tensor | None = None
    squared_gradients: Tensor | None = None

    @cached_property
    def episodes(self) -> Episodes:
        """The units that statistics over scores count: trajectories, or samples if there are no turns."""
        return episodes_of(self.response_mask, self.turns)

    @property
    def episode_rewards(self) -> Tensor:
        """R [E]: the score of each episode minus the KL penalty of its tokens; one without a token has a score too."""
        rewards = self.episodes.per_episode(self.scores)
        return rewards if self.token_kl is None else rewards - self.episode_kl

    @property
    def episode_kl(self) -> Tensor:
        """[E] KL penalty of all tokens of each episode."""
        if self.token_kl is None:
            return torch.zeros_like(self.episodes.per_episode(self.scores))
        return self.episodes.sum_samples(masked(self.token_kl, self.response_mask).sum(-1))

    @property
    def episode_groups(self) -> Tensor:
        """[E] group number of each episode."""
        return self.episodes.group_numbers(self.groups)

    def token_rewards(self) -> Tensor:
        """[B, T] the score at the last token, or the reward of each turn at its last one, minus the KL penalty."""
        if self.turns is None:
            return token_rewards(self.scores, self.token_kl, self.response_mask)
        return turn_token_rewards(self.scores, self.token_kl, self.response_mask, self.turns, self.episodes)


Estimator = Callable[[RewardBatch, "AdvantageSettings"], tuple[Tensor, Tensor]]
ADV_ESTIMATORS: Registry[Estimator] = Registry("adv_estimator")
"""f(batch, config) -> (advantages [B, T], returns [B, T])."""


@ADV_ESTIMATORS.register("grpo")
def grpo(batch: RewardBatch, config: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """A = (R - mean_group) / (std_group + EPSILON), the same for every token of a sample.

    `grpo_norm_by_std: false` leaves out the division (Dr. GRPO, arXiv 2503.20783). A group of one, or with equal R,
    has A = 0. Source: DeepSeekMath (arXiv 2402.03300) section 4.1.2.
    """
    return _by_response(batch, _centered("group" if config.grpo_norm_by_std else None))


@ADV_ESTIMATORS.register("rloo")
def rloo(batch: RewardBatch, config: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """A = n / (n - 1) (R - mean_group): R minus the mean of the other n - 1 responses to the prompt.

    The baseline does not depend on the response itself, so the gradient is unbiased. A group of one has A = 0. Source:
    Ahmadian et al. 2024 (arXiv 2402.14740), after Kool et al. 2019.
    """

    def minus_others(rewards: Tensor, groups: Tensor) -> Tensor:
        sizes = torch.bincount(groups)[groups].to(rewards.dtype)
        return normalize(rewards, groups, "group", None) * (sizes / (sizes - 1).clamp(min=1))

    return _by_response(batch, minus_others)


@ADV_ESTIMATORS.register("remax")
def remax(batch: RewardBatch, config: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """A = R - b, where b is the score of the greedy response (temperature 0) to the prompt.

    b does not depend on the response, so the gradient is unbiased, also for a group of one. The overlong penalty of its
    own length and `reward_clip` apply to b; the token KL does not, while R has the KL of the whole response (verl takes
    that of the tokens from t on). Source: Li et al. 2023 (arXiv 2310.10505) algorithm 1.

    Raises:
        ValueError: the batch has no greedy responses.
    """
    if batch.baselines is None:
        raise ValueError(
            "adv_estimator remax needs the score of a greedy response to each prompt, which this batch lacks; use "
            "rloo, grpo or reinforce"
        )
    baselines = batch.episodes.per_episode(batch.baselines)
    return _by_response(batch, lambda rewards, groups: rewards - baselines)


@ADV_ESTIMATORS.register("lite_ppo")
def lite_ppo(batch: RewardBatch, config: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """A = (R - mean_group) / (std_batch + EPSILON), to be used with `loss_agg_mode: token-mean`.

    With the std of the batch, prompts whose responses have almost equal scores do not get large advantages. Source:
    Liu et al. 2025, "Tricks or Traps?" (arXiv 2508.08221).
    """
    return _by_response(batch, _centered("batch"))


@ADV_ESTIMATORS.register("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(batch: RewardBatch, config: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """A = R - mean_group, whitened over the batch's response tokens.

    Source: REINFORCE++ (arXiv 2501.03262), its variant with a group baseline.
    """
    advantages, returns = _by_response(batch, _centered(None))
    return whiten(advantages, batch.response_mask), returns


@ADV_ESTIMATORS.register("opo")
def opo(batch: RewardBatch, config: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """A = R - sum_j T_j R_j / sum_j T_j over the group, where T is the number of response tokens.

    Where the gradient's square grows with length, this baseline has the least variance on-policy. Source: Hao et al.
    2025 (arXiv 2505.23585).
    """
    lengths = batch.episodes.sum_samples(batch.response_mask.sum(-1).to(batch.scores.dtype))

    def minus_weighted_mean(rewards: Tensor, groups: Tensor) -> Tensor:
        baseline: Tensor = group_mean(lengths * rewards, groups) / group_mean(lengths, groups).clamp(min=EPSILON)
        return masked(rewards - baseline, ~constant_group(rewards, groups))

    return _by_response(batch, minus_weighted_mean)


@ADV_ESTIMATORS.register("optimal_token_baseline")
def optimal_token_baseline(batch: RewardBatch, config: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """A_t = G_t - sum_j W_jt G_jt / sum_j W_jt over the group's responses j that have a token t.

    G is the discounted return to go. W_t = EPSILON + sum_{s <= t} w_s^2 (1 - 2 pi_s + sum pi_s^2), the squares of the
    gradients up to t with respect to the logits, where pi_s is the probability of the sampled token and w_s its
    correction weight. So the baseline of each token has the least variance, if gradients of logits stand for those of
    weights. Tokens of a trajectory are counted over all of its turns. A token that only the longest response has gets
    the baseline of the last position that two responses have. Source: Li et al. 2026, "The Optimal Token Baseline".

    Raises:
        ValueError: the batch has no sums of squared probabilities.
    """
    if batch.squared_gradients is None:
        raise ValueError(
            "adv_estimator optimal_token_baseline needs the log-probs and the sums of squared probabilities of the "
            "trainer, which this batch lacks; use opo, grpo or rloo"
        )
    mask, groups, sequences = batch.response_mask, batch.episode_groups, batch.episodes.of_row

    def to_go(rewards: Tensor) -> Tensor:
        return discounted_sum(rewards, config.gamma)

    def minus_baseline(returns: Tensor, squares: Tensor, present: Tensor) -> Tensor:
        weights = present * (EPSILON + squares.cumsum(-1))
        baselines, equal = token_baselines(returns, weights, present, groups[: len(returns)])
        return torch.where(equal, 0.0, returns - baselines)

    returns = along_tokens(to_go, mask, batch.token_rewards().double(), sequences=sequences)
    inputs = (returns, batch.squared_gradients, mask.double())
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


@ADV_ESTIMATORS.register("gpg")
def gpg(batch: RewardBatch, config: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """A = a (R - mean_group), where a is the number of groups over the number of groups with different R.

    Groups without a gradient thereby do not make those with one smaller. Meant for `pg_variant: vanilla`. Source: Chu
    et al. 2025 (arXiv 2504.02546) section 3.
    """

    def scaled(rewards: Tensor, groups: Tensor) -> Tensor:
        moving = groups[~constant_group(rewards, groups)].unique().numel()
        factor: float = groups.unique().numel() / max(moving, 1)
        return normalize(rewards, groups, "group", None) * factor

    return _by_response(batch, scaled)


@ADV_ESTIMATORS.register("pass_at_k")
def pass_at_k(batch: RewardBatch, config: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """A = (E[max | i] - E[max]) / std(max), over all sets of `pass_k` responses of the group, and all sets with i.

    Rewards the best of k tries instead of each. k = 1 is grpo with the biased std; a group smaller than k is taken
    whole. Source: Chen et al. 2025 (arXiv 2508.10751) section 3.3, here for any scores instead of 0 and 1.
    """
    return _by_response(batch, lambda rewards, groups: best_of_k(rewards, groups, config.pass_k))


def best_of_k(rewards: Tensor, groups: Tensor, k: int) -> Tensor:
    """The advantages of `pass_at_k` [E], exactly, from R [E] and group numbers [E].

    With R ascending in a group of n, C(j-1, k-1) of its C(n, k) sets have R_j as their maximum, and of the
    C(n-1, k-1) sets with i, C(i-1, k-1) have R_i and C(j-2, k-2) have R_j for j > i.
    """
    order = torch.argsort(rewards, stable=True)
    order = order[torch.argsort(groups[order], stable=True)]
    value, group = rewards[order].double(), groups[order]
    size = torch.bincount(group)
    first = (size.cumsum(0) - size)[group]
    count, rank = size[group].double(), (torch.arange(len(group), device=group.device) - first + 1).double()
    tries = count.clamp(max=k)
    is_max = _choose(rank - 1, tries - 1) / _choose(count, tries)
    mean = group_mean(count * is_max * value, group)
    std = group_mean(count * is_max * (value - mean) ** 2, group).sqrt()
    later = value * _choose(rank - 2, tries - 2)
    total = later.flip(0).cumsum(0).flip(0)
    after = torch.cat([total, total.new_zeros(1)])
    behind = after[1:] - after[first + size[group]]
    with_own = (value * _choose(rank - 1, tries - 1) + behind) / _choose(count - 1, tries - 1)
    flat = constant_group(rewards[order], group) | (std <= EPSILON)
    result = torch.where(flat, 0.0, (with_own - mean) / (std + EPSILON))
    return torch.empty_like(rewards).scatter_(0, order, result.to(rewards.dtype))


def _choose(n: Tensor, k: Tensor) -> Tensor:
    """Binomial coefficients C(n, k) in float64; 0 where k is negative or above n."""
    valid = (k >= 0) & (k <= n)
    safe_n, safe_k = torch.where(valid, n, 0.0), torch.where(valid, k, 0.0)
    log = torch.lgamma(safe_n + 1) - torch.lgamma(safe_k + 1) - torch.lgamma(safe_n - safe_k + 1)
    return torch.where(valid, log.exp(), 0.0)


@ADV_ESTIMATORS.register("gdpo")
def gdpo(batch: RewardBatch, config: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """A = sum_k w_k (r_k - mean_group) / (std_group + EPSILON) over the rewards k, whitened over the batch's samples.

    A reward with equal scores in a group, or of a single sample, adds 0 there. Penalties (the KL of the tokens,
    `overlong_buffer_len`, lengths) are subtracted minus their group mean and in their own unit, so that their
    coefficients keep a meaning. Samples without a token do not count in the whitening, and rewards that cancel out
    leave no rounding for it to enlarge: it is computed in float64. Source: Liu et al. 2026 (arXiv 2601.05242), GDPO.
    Like there and in TRL (`normalize_then_sum`) every sample counts once in the whitening; in verl every token does.

    Raises:
        ValueError: the batch has no scores of single rewards, or not one for each weight.
    """
    weights = config.reward_weights
    if batch.reward_parts is None or batch.reward_parts.shape[-1] != len(weights):
        found = 0 if batch.reward_parts is None else batch.reward_parts.shape[-1]
        raise ValueError(
            f"adv_estimator gdpo needs the score of each of {len(weights)} rewards, and this batch has {found}; use "
            "grpo or rloo, which read their sum"
        )
    episodes, groups = batch.episodes, batch.episode_groups
    penalty = batch.episode_kl
    if batch.overlong is not None:
        penalty = penalty + episodes.per_episode(batch.overlong)
    total = -normalize(penalty.double(), groups, "group", None)
    for scores, weight in zip(episodes.per_episode(batch.reward_parts).double().unbind(-1), weights, strict=True):
        scored = ~scores.isnan()
        total[scored] += weight * normalize(scores[scored], groups[scored], "group", "group")
    sampled = episodes.sum_samples(batch.response_mask.sum(-1)) > 0
    return _by_response(batch, lambda rewards, groups: whiten(total, sampled).to(rewards.dtype))


@ADV_ESTIMATORS.register("reinforce_plus_plus")
def reinforce_plus_plus(batch: RewardBatch, config: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """A_t = G_t, the return to go discounted by gamma, whitened over the batch's response tokens.

    It uses no groups: the baseline is the mean of the batch. With `add_token_level_kl` G_t contains the KL of the
    tokens from t on. Source: REINFORCE++ (arXiv 2501.03262).
    """
    mask = batch.response_mask
    returns = response_returns(batch.scores, batch.token_kl, mask, config.gamma)
    return whiten(returns, mask), returns


@ADV_ESTIMATORS.register("reinforce")
def reinforce(batch: RewardBatch, config: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """A_t = G_t, the return to go discounted by gamma, of scores normalized by `norm_mean_type` and `norm_std_type`.

    Source: Williams 1992.
    """
    mask, episodes = batch.response_mask, batch.episodes
    scores = normalize(
        episodes.per_episode(batch.scores), batch.episode_groups, config.norm_mean_type, config.norm_std_type
    )
    returns = response_returns(episodes.to_samples(scores), batch.token_kl, mask, config.gamma)
    return returns, returns


@ADV_ESTIMATORS.register("gae")
def gae(batch: RewardBatch, config: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """A_t = delta_t + gamma lambd A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t; the returns are A + V.

    r is the score at the last token, minus the KL of each token with `add_token_level_kl`; in trajectories each turn
    has its reward at its last token, and values and sums pass over the observations between turns. Source: Schulman
    et al. 2016 (arXiv 1506.02438).

    Raises:
        ValueError: the batch has no values.
    """
    if batch.values is None:
        raise ValueError("adv_estimator gae needs the values of a critic, which this batch lacks")
    mask, sequences = batch.response_mask, None if batch.turns is None else batch.episodes.of_row
    values = masked(batch.values, mask)
    advantages = generalized_advantages(batch.token_rewards(), values, mask, config.gamma, config.lambd, sequences)
    return advantages, advantages + values


@ADV_ESTIMATORS.register("opd")
def opd(batch: RewardBatch, config: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """A_t = -opd_kl_coef (log p_t - log teacher_t), whatever the scores are: on-policy distillation.

    Its policy gradient is that of the KL divergence from the policy to the teacher at each token, given the tokens
    before it. Source: Agarwal et al. 2024 (arXiv 2306.13649) with reverse KL, one sampled token at a time.

    Raises:
        ValueError: the batch has no log-probs of a teacher.
    """
    if batch.teacher_kl is None:
        raise ValueError("adv_estimator opd needs the log-probs of a teacher, which this batch lacks")
    advantages = -config.opd_kl_coef * batch.teacher_kl
    return advantages, advantages


ADV_ESTIMATORS.register("gigpo")(gigpo)
ADV_ESTIMATORS.register("step_reinforce")(step_reinforce)
ADV_ESTIMATORS.register("agentic_reinforce")(agentic_reinforce)


def _centered(std_type: str | None) -> Callable[[Tensor, Tensor], Tensor]:
    """f(R [E], groups [E]) [E]: R minus the mean of its group, divided by the std of `std_type` if given."""
    return lambda rewards, groups: normalize(rewards, groups, "group", std_type)


def _by_response(batch: RewardBatch, advantage: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Assigns f(R [E], groups [E]) of each episode to all its tokens; the returns are the undiscounted return to go."""
    mask = batch.response_mask
    per_sample = batch.episodes.to_samples(advantage(batch.episode_rewards, batch.episode_groups))
    return masked(per_sample[:, None], mask), response_returns(batch.scores, batch.token_kl, mask, 1.0)

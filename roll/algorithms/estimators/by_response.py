"""Estimators that give all tokens of a response one advantage. R is its score minus the KL penalty of its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from roll.algorithms.aggregation import EPSILON, constant_group, group_mean, masked, normalize, whiten
from roll.algorithms.estimators.base import RewardBatch, by_response, estimator, given
from roll.algorithms.lazy_torch import Tensor, torch
from roll.base.errors import Finding, error, warning
from roll.base.schema import option


@dataclass
class GRPOOptions:
    """The key of GRPO."""

    grpo_norm_by_std: bool = option(True, "Divide by the group's standard deviation; false is Dr. GRPO.")


@estimator("grpo", options=GRPOOptions, in_group=True, per_response=True)
def grpo(batch: RewardBatch, options: GRPOOptions) -> tuple[Tensor, Tensor]:
    """A = (R - mean_group) / (std_group + EPSILON), the same for every token of a sample.

    `grpo_norm_by_std: false` leaves out the division (Dr. GRPO, arXiv 2503.20783). A group of one, or with equal R,
    has A = 0. Source: DeepSeekMath (arXiv 2402.03300) section 4.1.2.
    """
    return by_response(batch, lambda r, groups: normalize(r, groups, groups if options.grpo_norm_by_std else None))


@estimator("rloo", in_group=True, per_response=True)
def rloo(batch: RewardBatch, options: object) -> tuple[Tensor, Tensor]:
    """A = n / (n - 1) (R - mean_group): R minus the mean of the other n - 1 responses to the prompt.

    The baseline does not depend on the response itself, so the gradient is unbiased. A group of one has A = 0. Source:
    Ahmadian et al. 2024 (arXiv 2402.14740), after Kool et al. 2019.
    """

    def minus_others(rewards: Tensor, groups: Tensor) -> Tensor:
        sizes = torch.bincount(groups)[groups].to(rewards.dtype)
        return normalize(rewards, groups, None) * (sizes / (sizes - 1).clamp(min=1))

    return by_response(batch, minus_others)


def _check_remax(_: object, config: Any) -> Iterator[Finding]:
    if config.whiten_rewards:
        yield error(
            "whiten_rewards",
            "true would scale the scores of samples but not those of greedy responses, which remax subtracts; set it "
            "to false, or use whiten_advantages",
        )


@estimator("remax", check=_check_remax, needs="baselines", per_response=True)
def remax(batch: RewardBatch, options: object) -> tuple[Tensor, Tensor]:
    """A = R - b, where b is the score of the greedy response (temperature 0) to the prompt.

    b does not depend on the response, so the gradient is unbiased, also for a group of one. The overlong penalty of its
    own length and `reward_clip` apply to b; the token KL does not, while R has the KL of the whole response (verl takes
    that of the tokens from t on). Source: Li et al. 2023 (arXiv 2310.10505) algorithm 1.
    """
    baselines = batch.episodes.per_episode(given(batch.baselines))
    return by_response(batch, lambda rewards, groups: rewards - baselines)


def _check_lite_ppo(_: object, config: Any) -> Iterator[Finding]:
    if config.loss_agg_mode != "token-mean":
        yield warning("loss_agg_mode", f"{config.loss_agg_mode} is not the aggregation of lite_ppo; use token-mean")


@estimator("lite_ppo", check=_check_lite_ppo, in_group=True, per_response=True)
def lite_ppo(batch: RewardBatch, options: object) -> tuple[Tensor, Tensor]:
    """A = (R - mean_group) / (std_batch + EPSILON), to be used with `loss_agg_mode: token-mean`.

    With the std of the batch, prompts whose responses have almost equal scores do not get large advantages. Source:
    Liu et al. 2025, "Tricks or Traps?" (arXiv 2508.08221).
    """
    return by_response(batch, lambda rewards, groups: normalize(rewards, groups, torch.zeros_like(groups)))


@estimator("reinforce_plus_plus_baseline", whitens=True, in_group=True, per_response=True)
def reinforce_plus_plus_baseline(batch: RewardBatch, options: object) -> tuple[Tensor, Tensor]:
    """A = R - mean_group, whitened over the batch's response tokens.

    Source: REINFORCE++ (arXiv 2501.03262), its variant with a group baseline.
    """
    advantages, returns = by_response(batch, lambda rewards, groups: normalize(rewards, groups, None))
    return whiten(advantages, batch.response_mask), returns


@estimator("opo", in_group=True, per_response=True)
def opo(batch: RewardBatch, options: object) -> tuple[Tensor, Tensor]:
    """A = R - sum_j T_j R_j / sum_j T_j over the group, where T is the number of response tokens.

    Where the gradient's square grows with length, this baseline has the least variance on-policy. Source: Hao et al.
    2025 (arXiv 2505.23585).
    """
    lengths = batch.episodes.sum_samples(batch.response_mask.sum(-1).to(batch.scores.dtype))

    def minus_weighted_mean(rewards: Tensor, groups: Tensor) -> Tensor:
        baseline: Tensor = group_mean(lengths * rewards, groups) / group_mean(lengths, groups).clamp(min=EPSILON)
        return masked(rewards - baseline, ~constant_group(rewards, groups))

    return by_response(batch, minus_weighted_mean)


@estimator("gpg", in_group=True, per_response=True)
def gpg(batch: RewardBatch, options: object) -> tuple[Tensor, Tensor]:
    """A = a (R - mean_group), where a is the number of groups over the number of groups with different R.

    Groups without a gradient thereby do not make those with one smaller. Meant for `pg_variant: vanilla`. Source: Chu
    et al. 2025 (arXiv 2504.02546) section 3.
    """

    def scaled(rewards: Tensor, groups: Tensor) -> Tensor:
        moving = groups[~constant_group(rewards, groups)].unique().numel()
        factor: float = groups.unique().numel() / max(moving, 1)
        return normalize(rewards, groups, None) * factor

    return by_response(batch, scaled)

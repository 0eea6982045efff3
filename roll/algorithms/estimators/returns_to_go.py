"""REINFORCE and its kin: advantages from the return to go of each token, without a group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from roll.algorithms.aggregation import masked, whiten
from roll.algorithms.estimators.base import DiscountOptions, RewardBatch, estimator, given
from roll.algorithms.lazy_torch import Tensor
from roll.algorithms.returns import generalized_advantages, response_returns
from roll.base.errors import Finding, error, warning
from roll.base.schema import option

RUNNING, RUNNING_TAG = "running", "running_tag"
"""Values of `norm_mean_type` and `norm_std_type` for statistics over the run: of all scores, or of those of a tag."""

RUNNING_TYPES = (RUNNING, RUNNING_TAG)


@estimator("reinforce", options=DiscountOptions, norm_types=("batch", "group", "tag", *RUNNING_TYPES))
def reinforce(batch: RewardBatch, options: DiscountOptions) -> tuple[Tensor, Tensor]:
    """A_t = G_t, the return to go discounted by gamma, of scores normalized by `norm_mean_type` and `norm_std_type`.

    Source: Williams 1992.
    """
    returns = response_returns(batch.scores, batch.token_kl, batch.response_mask, options.gamma)
    return returns, returns


@estimator("reinforce_plus_plus", options=DiscountOptions, whitens=True)
def reinforce_plus_plus(batch: RewardBatch, options: DiscountOptions) -> tuple[Tensor, Tensor]:
    """A_t = G_t, the return to go discounted by gamma, whitened over the batch's response tokens.

    It uses no groups: the baseline is the mean of the batch. With `add_token_level_kl` G_t contains the KL of the
    tokens from t on. Source: REINFORCE++ (arXiv 2501.03262).
    """
    mask = batch.response_mask
    returns = response_returns(batch.scores, batch.token_kl, mask, options.gamma)
    return whiten(returns, mask), returns


@dataclass
class GAEOptions(DiscountOptions):
    """The keys of GAE."""

    lambd: float = option(
        0.95,
        "GAE's weight of later temporal differences: 1 is the return minus the value, 0 trusts the critic after one "
        "token.",
        ge=0,
        le=1,
    )


def _check_gae(_: GAEOptions, config: Any) -> Iterator[Finding]:
    if config.whiten_rewards and config.pipeline == "agentic":
        yield error(
            "whiten_rewards",
            "true would scale the score of a trajectory but not the rewards of its turns, which gae adds up; set it to "
            "false, or use whiten_advantages",
        )
    if config.critic_warmup >= config.max_steps:
        yield warning(
            "critic_warmup",
            f"{config.critic_warmup} is not below max_steps {config.max_steps}: only the critic is trained",
        )


@estimator("gae", options=GAEOptions, check=_check_gae, needs="values", norm_types=RUNNING_TYPES)
def gae(batch: RewardBatch, options: GAEOptions) -> tuple[Tensor, Tensor]:
    """A_t = delta_t + gamma lambd A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t; the returns are A + V.

    r is the score at the last token, minus the KL of each token with `add_token_level_kl`; in trajectories each turn
    has its reward at its last token, and values and sums pass over the observations between turns. Source: Schulman
    et al. 2016 (arXiv 1506.02438).
    """
    mask, sequences = batch.response_mask, None if batch.turns is None else batch.episodes.of_row
    values = masked(given(batch.values), mask)
    advantages = generalized_advantages(batch.token_rewards(), values, mask, options.gamma, options.lambd, sequences)
    return advantages, advantages + values


@estimator("opd", needs="teacher_kl")
def opd(batch: RewardBatch, options: Any) -> tuple[Tensor, Tensor]:
    """A_t = -opd_kl_coef (log p_t - log teacher_t), whatever the scores are: on-policy distillation.

    Its policy gradient is that of the KL divergence from the policy to the teacher at each token, given the tokens
    before it. Source: Agarwal et al. 2024 (arXiv 2306.13649) with reverse KL, one sampled token at a time.
    """
    advantages = -options.opd_kl_coef * given(batch.teacher_kl)
    return advantages, advantages

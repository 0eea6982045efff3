"""What advantages need to know of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from roll.algorithms.aggregation import (
    masked,
    masked_max,
    masked_mean,
    masked_sum,
    normalize,
    whiten,
    zero_spread,
)
from roll.algorithms.kl import kl_divergence
from roll.algorithms.registry import Registry
from roll.algorithms.turn_advantages import (
    Episodes,
    Turns,
    agentic_reinforce,
    check_turns,
    episodes_of,
    gigpo,
    step_reinforce,
)
from roll.configs.agentic_learning import RewardNormalization, keys_of
from roll.configs.pipeline import RLConfig


@dataclass(frozen=True)
class AdvantageConfig:
    """Settings of the advantages, under the names and meanings of the YAML keys."""

    adv_estimator: str = "grpo"
    grpo_norm_by_std: bool = True
    norm_mean_type: str | None = None
    norm_std_type: str | None = None
    gamma: float = 1.0
    reward_clip: float | None = None
    advantage_clip: float | None = None
    whiten_rewards: bool = False
    whiten_advantages: bool = False
    add_token_level_kl: bool = False
    kl_penalty: str = "k3"
    reward_normalization: RewardNormalization = field(default_factory=RewardNormalization)
    episode_reward_weight: float = 1.0
    step_reward_weight: float = 1.0
    step_reward_gamma: float = 0.95

    @classmethod
    def from_config(cls, config: RLConfig) -> AdvantageConfig:
        """The settings of a run; those of turns are the defaults where it has none."""
        return cls(**{name: getattr(config, name) for name in keys_of(cls, config)})


@dataclass(frozen=True)
class Shaped:
    """What an estimator sees, after the scores were clipped and whitened.

    Attributes:
        scores: R_i [B].
        token_kl: [B, T] the penalty of each token (coefficient times KL), zeros without `add_token_level_kl`.
        groups: [B] int64, equal for the samples of one prompt, or of trajectories from one start.
        response_mask: [B, T] bool.
        turns: where the samples are trajectories; None otherwise.
    """

    scores: Tensor
    token_kl: Tensor
    groups: Tensor
    response_mask: Tensor
    turns: Turns | None = None

    @cached_property
    def episodes(self) -> Episodes:
        """What statistics over scores count once: trajectories, or the samples where there are no turns."""
        return episodes_of(self.response_mask, self.turns)

    @property
    def episode_rewards(self) -> Tensor:
        """R [E]: the score of each episode less the KL penalty of its tokens."""
        if self.turns is None:
            return token_rewards(self.scores, self.token_kl, self.response_mask).sum(-1)
        penalty = masked(self.token_kl, self.response_mask).sum(-1)
        return self.episodes.once(self.scores) - self.episodes.total(penalty)

    @property
    def episode_groups(self) -> Tensor:
        """[E] numbers of the episodes' groups."""
        return self.episodes.numbers(self.groups)


Estimator = Callable[[Shaped, AdvantageConfig], tuple[Tensor, Tensor]]
ADV_ESTIMATORS: Registry[Estimator] = Registry("adv_estimator")
"""f(shaped, config) -> (advantages [B, T], returns [B, T])."""


def token_rewards(scores: Tensor, token_kl: Tensor, response_mask: Tensor) -> Tensor:
    """Rewards [B, T]: the score [B] on the last response token of each sample, minus the KL penalty of every token."""
    mask = response_mask.bool()
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, positions, -1).amax(dim=1, keepdim=True)
    return torch.where(mask & (positions == last), scores[:, None], 0.0) - masked(token_kl, mask)


def return_to_go(rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_{t+1} over the response tokens [B, T]; gaps in the mask are stepped over, not discounted."""
    if gamma == 1.0:
        return masked(masked(rewards, response_mask).flip(-1).cumsum(-1).flip(-1), response_mask)
    returns = torch.zeros_like(rewards)
    following = rewards.new_zeros(rewards.shape[0])
    for t in range(rewards.shape[1] - 1, -1, -1):
        here = response_mask[:, t].bool()
        following = torch.where(here, rewards[:, t] + gamma * following, following)
        returns[:, t] = torch.where(here, following, 0.0)
    return returns


@ADV_ESTIMATORS.register("grpo")
def grpo(shaped: Shaped, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """A = (R - mean_group) / (std_group + EPSILON), the same for every token of a sample.

    `grpo_norm_by_std: false` leaves the division out (Dr. GRPO, arXiv 2503.20783). Source: DeepSeekMath, arXiv
    2402.03300 section 4.1. A group of one or of equal R has A = 0.
    """
    return _by_response(shaped, _centred("group" if config.grpo_norm_by_std else None))


@ADV_ESTIMATORS.register("rloo")
def rloo(shaped: Shaped, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """A = n / (n - 1) (R - mean_group): R less the mean of the other n - 1 responses to the prompt.

    The baseline does not depend on the response it is taken from, so the gradient is unbiased. Source: Ahmadian et al.
    2024 (arXiv 2402.14740), after Kool et al. 2019. A group of one has A = 0.
    """

    def beside_the_others(rewards: Tensor, groups: Tensor) -> Tensor:
        sizes = torch.bincount(groups)[groups].to(rewards.dtype)
        return normalize(rewards, groups, "group", None) * (sizes / (sizes - 1).clamp(min=1))

    return _by_response(shaped, beside_the_others)


@ADV_ESTIMATORS.register("lite_ppo")
def lite_ppo(shaped: Shaped, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """A = (R - mean_group) / (std_batch + EPSILON), to be used with `loss_agg_mode: token-mean`.

    The deviation of the batch does not blow up the advantages of prompts whose responses hardly differ. Source: Liu et
    al. 2025, "Tricks or Traps?" (arXiv 2508.08221).
    """
    return _by_response(shaped, _centred("batch"))


@ADV_ESTIMATORS.register("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(shaped: Shaped, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """A = R - mean_group, whitened over the batch's response tokens.

    Source: REINFORCE++ (arXiv 2501.03262), its variant with a group baseline.
    """
    advantages, returns = _by_response(shaped, _centred(None))
    return whiten(advantages, shaped.response_mask), returns


@ADV_ESTIMATORS.register("reinforce_plus_plus")
def reinforce_plus_plus(shaped: Shaped, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """A_t = G_t, the return to go discounted by gamma, whitened over the batch's response tokens.

    There are no groups: the baseline is the batch. With `add_token_level_kl` the KL of the tokens from t on is in G_t.
    Source: REINFORCE++ (arXiv 2501.03262).
    """
    mask = shaped.response_mask
    returns = return_to_go(token_rewards(shaped.scores, shaped.token_kl, mask), mask, config.gamma)
    return whiten(returns, mask), returns


@ADV_ESTIMATORS.register("reinforce")
def reinforce(shaped: Shaped, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """A_t = G_t, the return to go discounted by gamma, of scores normalised as norm_mean_type and norm_std_type say."""
    mask = shaped.response_mask
    episodes = shaped.episodes
    scores = normalize(episodes.once(shaped.scores), shaped.episode_groups, config.norm_mean_type, config.norm_std_type)
    returns = return_to_go(token_rewards(episodes.spread(scores), shaped.token_kl, mask), mask, config.gamma)
    return returns, returns


def _centred(std_type: str | None) -> Callable[[Tensor, Tensor], Tensor]:
    """f(R [E], groups [E]): R less the group's mean, divided by a deviation or not."""
    return lambda rewards, groups: normalize(rewards, groups, "group", std_type)


def _by_response(shaped: Shaped, advantage: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """f(R [E], groups [E]) of each episode on every token of it; and the undiscounted return to go."""
    mask = shaped.response_mask
    rewards = token_rewards(shaped.scores, shaped.token_kl, mask)
    worth = shaped.episodes.spread(advantage(shaped.episode_rewards, shaped.episode_groups))
    return masked(worth[:, None].expand_as(rewards), mask), return_to_go(rewards, mask, 1.0)


ADV_ESTIMATORS.register("gigpo")(gigpo)
ADV_ESTIMATORS.register("step_reinforce")(step_reinforce)
ADV_ESTIMATORS.register("agentic_reinforce")(agentic_reinforce)


@dataclass(frozen=True)
class Advantages:
    """The result.

    Attributes:
        advantages: [B, T] float32, 0 outside the response mask.
        returns: [B, T] float32, what a critic would learn: the return to go before any normalisation of advantages.
        metrics: ready to log.
    """

    advantages: Tensor
    returns: Tensor
    metrics: dict[str, float]


def compute_advantages(
    scores: Tensor,
    groups: Tensor,
    response_mask: Tensor,
    config: AdvantageConfig,
    *,
    log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    kl_coef: float = 0.0,
    turns: Turns | None = None,
) -> Advantages:
    """Advantages and returns of one global batch.

    In this order: reward_clip, whiten_rewards, token KL, the estimator, whiten_advantages, advantage_clip.

    Args:
        scores: [B] raw rewards.
        groups: [B] int64 group numbers; `roll.algorithms.aggregation.group_index` makes them from prompt ids.
        response_mask: [B, T].
        config: names the estimator and holds its knobs.
        log_probs: [B, T] of the policy; needed with `add_token_level_kl`.
        ref_log_probs: [B, T] of the reference; needed with `add_token_level_kl`.
        kl_coef: weight of the token KL, from a KL controller.
        turns: where the samples are trajectories or turns of them; statistics over scores then count every trajectory
            once, and samples without response tokens not at all.

    Raises:
        ValueError: a score is not finite, token KL lacks its log-probs, or the turns are missing where the estimator
            needs them or contradict the rest.
    """
    if not bool(torch.isfinite(scores).all()):
        bad = [index for index, good in enumerate(torch.isfinite(scores).tolist()) if not good]
        raise ValueError(f"scores of samples {bad[:8]} are not finite; a failed reward must be dropped, not scored")
    mask, scores = response_mask.bool(), scores.float()
    kl = _reference_kl(config, mask, log_probs, ref_log_probs)
    if turns is not None:
        check_turns(turns, scores, groups, mask)
    scores = _shape_scores(scores, episodes_of(mask, turns), config)
    shaped = Shaped(scores, kl_coef * kl, groups, mask, turns)
    advantages, returns = ADV_ESTIMATORS[config.adv_estimator](shaped, config)
    if config.whiten_advantages:
        advantages = whiten(advantages, mask)
    if config.advantage_clip is not None:
        advantages = advantages.clamp(-config.advantage_clip, config.advantage_clip)
    metrics = _metrics(advantages, returns, shaped)
    if config.add_token_level_kl:
        metrics |= {"advantage/token_kl": float(masked_mean(kl, mask)), "advantage/kl_coef": kl_coef}
    return Advantages(advantages, returns, metrics)


def _reference_kl(
    config: AdvantageConfig, mask: Tensor, log_probs: Tensor | None, ref_log_probs: Tensor | None
) -> Tensor:
    if not config.add_token_level_kl:
        return torch.zeros(mask.shape, device=mask.device)
    if log_probs is None or ref_log_probs is None:
        raise ValueError("add_token_level_kl: true needs the log-probs of the policy and of the reference")
    return masked(kl_divergence(log_probs, ref_log_probs, config.kl_penalty).detach().float(), mask)


def _shape_scores(scores: Tensor, episodes: Episodes, config: AdvantageConfig) -> Tensor:
    if config.reward_clip is not None:
        scores = scores.clamp(-config.reward_clip, config.reward_clip)
    if config.whiten_rewards:
        once = episodes.once(scores)
        scores = episodes.spread(whiten(once, torch.ones_like(once, dtype=torch.bool)))
    return scores


def _metrics(advantages: Tensor, returns: Tensor, shaped: Shaped) -> dict[str, float]:
    mask, groups = shaped.response_mask, shaped.episode_groups
    mean = masked_mean(advantages, mask)
    flat = groups[zero_spread(shaped.episodes.once(shaped.scores), groups)].unique().numel() if len(groups) else 0
    return {
        "advantage/mean": float(mean),
        "advantage/std": float((masked_sum((advantages - mean) ** 2, mask) / mask.sum().clamp(min=1)).sqrt()),
        "advantage/max": float(masked_max(advantages, mask)),
        "advantage/min": -float(masked_max(-advantages, mask)),
        "advantage/return_mean": float(masked_mean(returns, mask)),
        "advantage/zero_spread_groups": float(flat),
        "advantage/zero_spread_group_fraction": flat / max(groups.unique().numel(), 1),
    }

"""From scores to advantages, computed over the global batch.

`compute_advantages` shapes the scores (`roll.algorithms.shaping`), calls the estimator
(`roll.algorithms.estimators`), and whitens and clips its advantages.

R is the sum of a response's token rewards: its score, minus the KL penalty of its tokens if there is one. For
trajectories R is that of the trajectory, which counts once in all statistics even if it is split into several samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TypedDict, Unpack

from roll.algorithms.aggregation import constant_group, masked, masked_mean, select_tokens, token_index, whiten
from roll.algorithms.estimators import RewardBatch
from roll.algorithms.kl import kl_divergence
from roll.algorithms.lazy_torch import Tensor, torch
from roll.algorithms.options.advantage_options import AdvantageOptions, TurnOptions
from roll.algorithms.options.shaping_options import SampleMaskOptions
from roll.algorithms.registry import UserOptions
from roll.algorithms.shaping import (
    RunStatistics,
    apply_norm,
    clip_scores,
    length_penalties,
    overlong_penalty,
    sample_weights,
    shape_scores,
    token_penalty,
)
from roll.algorithms.turns import Turns, check_turns, episodes_of


@dataclass
class AdvantageSettings(UserOptions, AdvantageOptions, TurnOptions):
    """Settings of the advantages, `RLConfig.advantages`: keys of turns have their defaults without turns.

    `reward_weights` are those of `rewards` in their order, for estimators that read the score of each reward.
    """

    response_length: int | None = None
    reward_weights: tuple[float, ...] = ()


@dataclass(frozen=True)
class GreedyResponses:
    """The greedy response to the prompt of each sample; equal for the samples of one prompt, unused for padding.

    Attributes:
        greedy_scores: [B] raw rewards.
        greedy_lengths: [B] int64, response tokens.
    """

    greedy_scores: Tensor
    greedy_lengths: Tensor


GREEDY_KEYS = tuple(item.name for item in fields(GreedyResponses))
"""Names of the batch tensors that `read_greedy` reads."""


REWARD_PARTS = "reward_parts"
"""Name of the batch tensor [B, R] with the score of each of R rewards, NaN where a reward does not score a sample."""

SUM_PI_SQUARED = "sum_pi_squared"
"""Name of the batch tensor [B, T] with the sum of the squared probabilities of all tokens at the position of t."""


def read_greedy(batch: Mapping[str, Tensor]) -> GreedyResponses | None:
    """The greedy responses of a batch; None if it has none."""
    if GREEDY_KEYS[0] not in set(batch.keys()):
        return None
    return GreedyResponses(**{name: batch[name] for name in GREEDY_KEYS})


@dataclass(frozen=True)
class Advantages:
    """Result of `compute_advantages`.

    Attributes:
        advantages: [B, T] float32, 0 outside the response mask.
        returns: [B, T] float32, the return to go before any normalization of advantages; the target of a critic.
        metrics: to log.
        statistics: of the scores of the run including this batch, where they are normalised by them.
    """

    advantages: Tensor
    returns: Tensor
    metrics: dict[str, float]
    statistics: RunStatistics = field(default_factory=RunStatistics)


class AdvantageInputs(TypedDict, total=False):
    """What `compute_advantages` takes for some keys; everything is None by default.

    Attributes:
        log_probs: [B, T] of the policy; needed with `add_token_level_kl`, a teacher, and
            `adv_estimator: optimal_token_baseline`.
        ref_log_probs: [B, T] of the reference or teacher; needed with the same.
        kl_coef: weight of the token KL, from a KL controller; 0 by default.
        turns: of samples that are trajectories or turns of them. Statistics over scores then count every trajectory
            once and ignore samples without response tokens.
        learned: [B] bool, samples that stay in the loss (see `learned_samples`). The others count in statistics over
            scores; `whiten_advantages` and the advantages leave them out.
        values: [B, T] of a critic.
        greedy: of each sample's prompt; `whiten_rewards` does not apply to them.
        reward_parts: [B, R] score of each reward before its weight, NaN where one does not score the sample;
            `reward_clip` and `whiten_rewards` do not apply to them.
        sum_pi_squared: [B, T], the sum of the squared probabilities of all tokens under the policy of `log_probs`.
        correction_weights: [B, T] factors of the loss of each token, for `adv_estimator: optimal_token_baseline`;
            None: all are 1.
        statistics: of the scores of the run before this batch, for `running` and `running_tag`; None: this is the
            first one.
        tag_names: [B] name of the tag of each sample, needed for `running_tag`: the numbers of `turns` are those of
            this batch alone.
    """

    log_probs: Tensor | None
    ref_log_probs: Tensor | None
    kl_coef: float
    turns: Turns | None
    learned: Tensor | None
    values: Tensor | None
    greedy: GreedyResponses | None
    reward_parts: Tensor | None
    sum_pi_squared: Tensor | None
    correction_weights: Tensor | None
    statistics: RunStatistics | None
    tag_names: Sequence[str] | None


def compute_advantages(
    scores: Tensor,
    groups: Tensor,
    response_mask: Tensor,
    config: AdvantageSettings,
    **inputs: Unpack[AdvantageInputs],
) -> Advantages:
    """Advantages and returns of one global batch.

    Applies, in this order: length penalties, reward_clip, whiten_rewards, norm_mean_type and norm_std_type, token KL,
    the estimator, the teacher of `use_opd`, whiten_advantages, difficulty_loss_weight and length_loss_weight,
    advantage_clip.

    `scores` [B] are raw rewards, `groups` [B] int64 numbers of groups, as `group_ids` of `roll.rollout.rollout_batch`.

    Raises:
        ValueError: a score is not finite, there is no token, the turns are inconsistent with the rest of the batch, or
            something is missing that the settings need.
    """
    _check_scores(scores, response_mask)
    mask, raw, learned = response_mask.bool(), scores.float(), inputs.get("learned")
    turns, episodes = inputs.get("turns"), episodes_of(mask, inputs.get("turns"))
    if turns is not None:
        check_turns(turns, raw, groups, mask)
    lengths = mask.sum(-1)
    penalty, lost = length_penalties(raw, lengths, groups, episodes, config)
    shaped = shape_scores(raw - penalty, episodes, config)
    tags, before = None if turns is None else turns.tag_ids, inputs.get("statistics") or RunStatistics()
    shaped, statistics, normalised = apply_norm(shaped, groups, tags, episodes, config, before, inputs.get("tag_names"))
    kl = _reference_kl(config, mask, inputs.get("log_probs"), inputs.get("ref_log_probs"))
    batch = _reward_batch(shaped, groups, mask, kl, penalty, config, inputs)
    advantages, returns = config.estimator(batch, config.options_of(config.estimator))
    if config.use_opd and batch.teacher_kl is not None:
        advantages = advantages - config.opd_kl_coef * batch.teacher_kl
    if learned is not None:
        mask = mask & learned[:, None]
        advantages, returns = masked(advantages, mask), masked(returns, mask)
    if config.whiten_advantages:
        advantages = whiten(advantages, mask)
    weights, weighted = sample_weights(raw, groups, lengths, learned, episodes, config)
    if weights is not None:
        advantages = advantages * weights[:, None]
    if config.advantage_clip is not None:
        advantages = advantages.clamp(-config.advantage_clip, config.advantage_clip)
    metrics = _metrics(advantages, returns, mask, batch, config) | lost | normalised | weighted
    if kl is not None:
        metrics |= {"advantage/token_kl": float(masked_mean(kl, mask)), "advantage/kl_coef": inputs.get("kl_coef", 0.0)}
    if batch.teacher_kl is not None:
        metrics["advantage/teacher_kl"] = float(masked_mean(batch.teacher_kl, mask))
    return Advantages(advantages, returns, metrics, statistics)


def _check_scores(scores: Tensor, response_mask: Tensor) -> None:
    if not bool(torch.isfinite(scores).all()):
        bad = [index for index, good in enumerate(torch.isfinite(scores).tolist()) if not good]
        raise ValueError(f"scores of samples {bad[:8]} are not finite; drop a sample whose reward failed")
    if response_mask.shape[1] == 0:
        raise ValueError(f"response_mask of shape {list(response_mask.shape)} has no token; nothing was generated")


def _reward_batch(
    scores: Tensor,
    groups: Tensor,
    mask: Tensor,
    kl: Tensor | None,
    penalty: Tensor,
    config: AdvantageSettings,
    inputs: AdvantageInputs,
) -> RewardBatch:
    log_probs, greedy = inputs.get("log_probs"), inputs.get("greedy")
    baselines = None
    if greedy is not None:
        own = overlong_penalty(greedy.greedy_lengths, config) + token_penalty(greedy.greedy_lengths, config)
        baselines = clip_scores(greedy.greedy_scores.float() - own, config)
    return RewardBatch(
        scores,
        None if kl is None else inputs.get("kl_coef", 0.0) * kl,
        groups,
        mask,
        turns=inputs.get("turns"),
        values=inputs.get("values"),
        baselines=baselines,
        teacher_kl=_teacher_kl(config, mask, log_probs, inputs.get("ref_log_probs")),
        reward_parts=inputs.get("reward_parts"),
        reward_weights=config.reward_weights,
        overlong=penalty,
        squared_gradients=_squared_gradients(
            mask, log_probs, inputs.get("sum_pi_squared"), inputs.get("correction_weights")
        ),
    )


def learned_samples(
    scores: Tensor, groups: Tensor, trajectories: Tensor, truncated: Tensor, options: SampleMaskOptions
) -> Tensor:
    """Samples that stay in the loss [B] bool, after `max_len_mask` and `difficulty_mask`.

    A group stays if the mean score of its trajectories lies strictly between the two thresholds.

    Args:
        scores: [B] raw rewards, equal for the samples of one trajectory.
        groups: [B] int64 group numbers.
        trajectories: [B] int64 trajectory numbers; every trajectory counts once.
        truncated: [B] bool, whether the trajectory was cut at its length.
        options: which masks are on, and their thresholds.
    """
    learned = torch.ones_like(truncated, dtype=torch.bool)
    if options.max_len_mask:
        learned &= ~truncated
    if options.difficulty_mask:
        counted = torch.cat([torch.ones_like(learned[:1]), trajectories[1:] != trajectories[:-1]]).to(scores.dtype)
        size = int(groups.max()) + 1
        sums = scores.new_zeros(size).index_add_(0, groups, scores * counted)
        counts = scores.new_zeros(size).index_add_(0, groups, counted)
        mean = (sums / counts.clamp(min=1))[groups]
        learned &= (mean > options.difficulty_low_threshold) & (mean < options.difficulty_high_threshold)
    return learned


def _reference_kl(
    config: AdvantageSettings, mask: Tensor, log_probs: Tensor | None, ref_log_probs: Tensor | None
) -> Tensor | None:
    if not config.add_token_level_kl:
        return None
    if log_probs is None or ref_log_probs is None:
        raise ValueError("add_token_level_kl: true needs the log-probs of the policy and of the reference")
    return masked(kl_divergence(log_probs, ref_log_probs, config.kl_penalty).detach().float(), mask)


def _teacher_kl(
    config: AdvantageSettings, mask: Tensor, log_probs: Tensor | None, teacher: Tensor | None
) -> Tensor | None:
    """The log ratio itself: other estimators of the KL divergence are no advantages, their gradient is another."""
    if not config.uses_teacher:
        return None
    if log_probs is None or teacher is None:
        raise ValueError("a teacher (use_opd, adv_estimator opd) needs its log-probs and those of the policy")
    return masked((log_probs - teacher).detach().float(), mask)


def _squared_gradients(
    mask: Tensor, log_probs: Tensor | None, sum_pi_squared: Tensor | None, weights: Tensor | None
) -> Tensor | None:
    """The square of the gradient of w log pi with respect to the logits [B, T]: w^2 (1 - 2 pi + sum pi^2)."""
    if log_probs is None or sum_pi_squared is None:
        return None
    squares = 1 - 2 * masked(log_probs, mask).double().exp() + sum_pi_squared.double()
    if weights is not None:
        squares = squares * weights.double() ** 2
    return masked(squares.clamp(min=0), mask)


def _constant_episodes(batch: RewardBatch, config: AdvantageSettings) -> Tensor:
    """Whether the episodes of a group have equal scores, [E] bool; with gdpo, equal scores of each reward."""
    scores = [batch.scores]
    if config.uses_reward_parts and batch.reward_parts is not None:
        parts = zip(batch.reward_parts.nan_to_num().unbind(-1), batch.reward_weights, strict=True)
        scores = [part for part, weight in parts if weight]
        scores += [] if batch.overlong is None else [batch.overlong]
    groups = batch.episode_groups
    return torch.stack([constant_group(batch.episodes.per_episode(each), groups) for each in scores]).all(0)


def _metrics(
    advantages: Tensor, returns: Tensor, mask: Tensor, batch: RewardBatch, config: AdvantageSettings
) -> dict[str, float]:
    groups, index = batch.episode_groups, token_index(mask)
    kept, kept_returns = (select_tokens(x, index) if len(index) else x.new_zeros(1) for x in (advantages, returns))
    low, high = torch.aminmax(kept)
    constant = groups[_constant_episodes(batch, config)] if len(groups) else groups
    without_variance, total = len(set(constant.tolist())), len(set(groups.tolist()))
    return {
        "advantage/mean": float(kept.mean()),
        "advantage/std": float(kept.std(correction=0)),
        "advantage/max": float(high),
        "advantage/min": float(low),
        "advantage/return_mean": float(kept_returns.mean()),
        "advantage/zero_variance_groups": float(without_variance),
        "advantage/zero_variance_group_fraction": without_variance / max(total, 1),
    }

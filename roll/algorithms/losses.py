"""Losses of a training step by name, as `MegatronTrainStrategy.train_step` calls them for every micro-batch.

The learner of a pipeline names its loss in `meta_info["loss"]` of the batch; that of RL names `policy`, which computes
the `pg_variant` of `roll.algorithms.policy_loss`.

A loss is `loss(log_probs, entropy, micro, scale, config) -> (0-d loss, metrics)`: log pi [b, T] with gradient, the
entropy [b, T] or None, the tensors of a micro-batch, the counts over the global batch, and its settings. A critic or
reward model gives its values and no entropy. Every term is divided by the counts, so the losses of all micro-batches
on all data-parallel ranks sum to the loss of the batch. A metric whose name ends in `_max` is reduced by max, every
other one by sum. In a batch of P pairs, rows 2 i and 2 i + 1 are the better and the worse response; a last row without
a partner is ignored, and `scale.sequences` is twice the pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from roll.algorithms.aggregation import SAMPLE_WEIGHTS, LossScale, aggregate, masked, masked_max, masked_mean
from roll.algorithms.correction import Correction, off_policy_correction, off_policy_sequences, partial_sums
from roll.algorithms.distillation import teacher_divergence
from roll.algorithms.kl import k3, kl_divergence
from roll.algorithms.options.policy_options import PolicySettings, losses_of
from roll.algorithms.options.preference_options import DPOOptions, RewardModelOptions
from roll.algorithms.policy_loss import POLICY_LOSSES, PolicyTokens, TokenLosses
from roll.algorithms.registry import Registry

Loss = Callable[[Tensor, Tensor | None, Mapping[str, Tensor], LossScale, Any], tuple[Tensor, dict[str, Tensor]]]
LOSSES: Registry[Loss] = Registry("loss")


@LOSSES.register("sft")
def sft(
    log_probs: Tensor, entropy: Tensor | None, micro: Mapping[str, Tensor], scale: LossScale, config: None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean negative log-likelihood of the answer tokens, those of `response_mask`: -sum log pi / N_tok."""
    mask = micro["response_mask"]
    metrics = {} if entropy is None else {"entropy": _token_mean(entropy, mask, scale)}
    return aggregate(-log_probs, mask, "token-mean", scale), metrics


@LOSSES.register("gradient")
def given_gradient(
    log_probs: Tensor, entropy: Tensor | None, micro: Mapping[str, Tensor], scale: LossScale, config: None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum of g log pi over the tokens of `response_mask`; g is `gradients` [b, T], of a loss computed elsewhere."""
    mask = micro["response_mask"]
    metrics = {} if entropy is None else {"entropy": _token_mean(entropy, mask, scale)}
    return (masked(micro["gradients"], mask) * masked(log_probs, mask)).sum(), metrics


@LOSSES.register("policy")
def policy(
    log_probs: Tensor, entropy: Tensor | None, micro: Mapping[str, Tensor], scale: LossScale, config: PolicySettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss pg + kl_loss_coef KL(pi || ref) - entropy_loss_coef H, each term aggregated by `loss_agg_mode`.

    With `opd_top_k`, opd_kl_coef times the divergence to a teacher over its most likely tokens is added. Correction
    weights multiply pg. Rejected tokens have no term at all and no part in the ratio of their response or turn, but
    still count in the denominators unless `renormalize` is set (then `scale` must count only the kept tokens).

    `micro` has `response_mask`, `advantages` and the base of the ratio [b, T], see `pg_ratio_base`; with their keys
    `ref_log_probs`, SAMPLE_WEIGHTS [b], the tensors of `roll.algorithms.distillation`, `scores` [b], `turn_index`, and
    `correction_weights` with `correction_kept`, or the `behavior_log_probs` from which these are computed here.
    """
    mask = micro["response_mask"]
    log_probs = masked(log_probs, mask)
    correction = _correction(log_probs, micro, config)
    tokens, dropped = _tokens(log_probs, micro, config, mask if correction is None else correction.kept)
    terms = token_losses(tokens, config, micro.get("turn_index", None))
    counted = tokens.mask if config.correction.renormalize else mask
    weights_of_samples = micro.get(SAMPLE_WEIGHTS, None)

    def term(values: Tensor) -> Tensor:
        return aggregate(masked(values, tokens.mask), counted, config.loss_agg_mode, scale, weights_of_samples)

    losses = terms.loss.to(log_probs.dtype)
    loss = term(losses if correction is None else losses * correction.weights)
    metrics = {"pg_loss": loss.detach()} | _ratio_metrics(tokens, terms, mask, counted, scale, config)
    if dropped is not None:
        metrics["opsm_fraction"] = _token_mean(dropped.to(log_probs.dtype), mask, scale)
    if config.bypass:
        weights = correction.weights if correction is not None and config.correction.weighted else None
        kept = None if correction is None else correction.kept
        metrics |= partial_sums(log_probs, micro["behavior_log_probs"], mask, scale, weights, kept)
    if config.use_kl_loss:
        kl = term(kl_divergence(log_probs, masked(micro["ref_log_probs"], mask), config.kl_loss_type))
        loss, metrics["kl_loss"] = loss + config.kl_loss_coef * kl, kl.detach()
    if config.opd_top_k is not None:
        divergence, mass = teacher_divergence(micro, config)
        distance = term(divergence)
        loss = loss + config.opd_kl_coef * distance
        metrics |= {"opd_loss": distance.detach(), "teacher_top_k_mass": _token_mean(mass, counted, scale)}
    if entropy is not None:
        metrics["entropy"] = _token_mean(entropy, counted, scale)
    if config.entropy_loss_coef:
        if entropy is None:
            raise ValueError(f"entropy_loss_coef: {config.entropy_loss_coef} needs the entropy of the logits; got None")
        loss = loss - config.entropy_loss_coef * term(entropy)
    return loss, metrics


def _tokens(
    log_probs: Tensor, micro: Mapping[str, Tensor], config: PolicySettings, kept: Tensor
) -> tuple[PolicyTokens, Tensor | None]:
    """What the losses read, and the tokens that `opsm_delta` leaves out."""
    mask, dropped = micro["response_mask"], None
    own = config.first_step and config.base_key == "old_log_probs"
    base, advantages = (
        masked(log_probs.detach() if own else micro[config.base_key], mask),
        masked(micro["advantages"], mask),
    )
    if config.correction.opsm_delta is not None:
        behavior = micro["behavior_log_probs"]
        dropped = off_policy_sequences(log_probs, behavior, advantages, mask, config.correction.opsm_delta)
        kept = kept & ~dropped
    scores, chosen = micro.get("scores", None), micro.get("high_covariance", None)
    return PolicyTokens(log_probs, base, advantages, kept, scores, chosen), dropped


def _ratio_metrics(
    tokens: PolicyTokens, terms: TokenLosses, mask: Tensor, counted: Tensor, scale: LossScale, config: PolicySettings
) -> dict[str, Tensor]:
    """Of the ratio, the share of clipped tokens, and the distance to the base."""
    current = tokens.log_probs.detach()
    ratio = torch.where(tokens.mask.bool(), terms.ratio, replace(tokens, log_probs=current, mask=mask).ratio)
    log_ratio = masked(current - tokens.base, counted)
    metrics = {
        "ratio_mean": _token_mean(ratio, counted, scale),
        "ratio_max": masked_max(ratio, counted),
        "ratio_deviation_max": masked_max((ratio - 1).abs(), counted),
        "clip_fraction": _token_mean(terms.clipped.to(current.dtype), counted, scale),
        "policy_kl": _token_mean(k3(log_ratio), counted, scale),
        "log_ratio_abs_mean": _token_mean(log_ratio.abs(), counted, scale),
        "log_ratio_abs_max": masked_max(log_ratio.abs(), counted),
    }
    if config.p99_logprob_mismatch is not None:
        beyond = ~(log_ratio.abs() <= config.p99_logprob_mismatch)
        metrics["log_ratio_beyond_p99"] = _token_mean(beyond.to(current.dtype), counted, scale)
    return metrics


def token_losses(tokens: PolicyTokens, config: PolicySettings, turn_index: Tensor | None = None) -> TokenLosses:
    """The losses of `pg_variant` with the ratio of `ratio_type`; of a mixture, the sum with its weights.

    The ratio of a mixture is that of its first loss that reads one, and a token counts as clipped if one loss clips it.

    With `ratio_type: segment` it needs the turn of each token, `turn_index` [b, T].
    """
    parts: list[tuple[float, bool, TokenLosses]] = []
    for name, weight in losses_of(config.pg_variant).items():
        one = POLICY_LOSSES[name]
        ratio_type = config.ratio_type if one.reads_ratio_type else "token"
        of_loss = one(tokens.with_ratio_of(ratio_type, turn_index), config.options_of(one))
        parts.append((weight, one.reads_ratio, of_loss))
    shown = next((terms for _, reads, terms in parts if reads), parts[0][2])
    loss, clipped = parts[0][0] * parts[0][2].loss, parts[0][2].clipped
    for weight, _, terms in parts[1:]:
        loss, clipped = loss + weight * terms.loss, clipped | terms.clipped
    return TokenLosses(loss, shown.ratio, clipped)


@dataclass(frozen=True)
class ValueLossConfig:
    """Settings of the value loss, under the names of their keys."""

    value_clip: float | None = None
    loss_agg_mode: str = "seq-mean-token-mean"


@LOSSES.register("value")
def value(
    values: Tensor, entropy: Tensor | None, micro: Mapping[str, Tensor], scale: LossScale, config: ValueLossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a critic, (V - R)^2 / 2, aggregated by `loss_agg_mode`.

    With `value_clip` c it is max((V - R)^2, (clip(V, W - c, W + c) - R)^2) / 2, where W are the values at the start
    of the step: a value further than c from W has no gradient, unless it moves away from R. Source: Schulman et al.,
    the implementation of PPO (arXiv 1707.06347).

    `micro` has `response_mask`, `returns` R and `values` W [b, T].
    """
    mask = micro["response_mask"]
    values, returns, old = (masked(x, mask) for x in (values, micro["returns"], micro["values"]))
    losses = (values - returns) ** 2
    clipped = torch.zeros_like(mask, dtype=values.dtype)
    if config.value_clip is not None:
        bounded = (old + (values - old).clamp(-config.value_clip, config.value_clip) - returns) ** 2
        clipped = (bounded > losses).to(values.dtype)
        losses = torch.maximum(losses, bounded)
    metrics = {
        "clip_fraction": _token_mean(clipped, mask, scale),
        "value_mean": _token_mean(values, mask, scale),
    }
    return 0.5 * aggregate(losses, mask, config.loss_agg_mode, scale, micro.get(SAMPLE_WEIGHTS, None)), metrics


@LOSSES.register("dpo")
def dpo(
    log_probs: Tensor, entropy: Tensor | None, micro: Mapping[str, Tensor], scale: LossScale, config: DPOOptions
) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean over pairs of f(m), where m is how much more the better response gained than the worse one.

    A response gains s = sum_t log pi - log ref, or the mean with `length_normalized`; m = s_better - s_worse. f is
    -(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m) with e = `label_smoothing` (`sigmoid`; DPO, arXiv 2305.18290,
    and its conservative form), max(0, 1 - beta m) (`hinge`; SLiC, arXiv 2305.10425), or (m - 1 / (2 beta))^2 (`ipo`;
    arXiv 2310.12036).

    `kto_pair` (KTO, arXiv 2402.01306, for pairs, as TRL had it) does not read m. With K = `pair_kl`, it is the mean
    over both responses of a pair of 1 - sigmoid(beta (s_better - K)) and 1 - sigmoid(beta (K - s_worse)).

    `sft_loss_coef` adds the negative log-likelihood of a token of the better responses (RPO, arXiv
    2404.19733).

    `micro` has `response_mask`, `ref_log_probs` [2 P, T]; with `kto_pair` also `pair_kl` [2 P]. The metrics `margin`
    (beta m), `chosen_reward` and `rejected_reward` (beta s) are means over pairs.
    """
    pairs, mask = max(scale.sequences / 2, 1.0), micro["response_mask"]
    better, worse = _better_and_worse(_gains(log_probs, micro, config))
    margin, beta, smoothing = better - worse, config.beta, config.label_smoothing
    if config.dpo_loss_type == "hinge":
        losses = (1 - beta * margin).clamp(min=0)
    elif config.dpo_loss_type == "ipo":
        losses = (margin - 1 / (2 * beta)) ** 2
    elif config.dpo_loss_type == "kto_pair":
        kl_of_worse, kl_of_better = _better_and_worse(micro["pair_kl"])
        losses = 1 - (F.sigmoid(beta * (better - kl_of_worse)) + F.sigmoid(beta * (kl_of_better - worse))) / 2
    else:
        losses = -(1 - smoothing) * F.logsigmoid(beta * margin) - smoothing * F.logsigmoid(-beta * margin)
    loss = losses.sum() / pairs
    metrics = _pair_metrics(beta * better.detach(), beta * worse.detach(), pairs)
    if config.sft_loss_coef:
        likelihood = _better_and_worse(masked_mean(log_probs, mask, dim=-1))[0].sum() / pairs
        loss, metrics["chosen_log_prob"] = loss - config.sft_loss_coef * likelihood, likelihood.detach()
    if entropy is not None:
        metrics["entropy"] = _token_mean(entropy, mask, scale)
    return loss, metrics


def pair_kl(log_probs: Tensor, batch: Mapping[str, Tensor], config: DPOOptions) -> Tensor:
    """The estimate of the KL divergence to the reference with which `kto_pair` compares each row, [2 P].

    For a better response it is the mean gain of the worse responses, for a worse one that of the better ones, each at
    least 0 (arXiv 2402.01306, as in TRL's `kto_pair`). It has no gradient.

    `log_probs` [2 P, T] are for all pairs of an optimizer step: the means are over these rows.
    """
    better, worse = (gains.mean().clamp(min=0) for gains in _better_and_worse(_gains(log_probs, batch, config)))
    return torch.stack([worse, better]).detach().repeat(len(log_probs) // 2)


def _gains(log_probs: Tensor, batch: Mapping[str, Tensor], config: DPOOptions) -> Tensor:
    """How much more likely each response is than under the reference, s [B]: in total, or per token."""
    mask = batch["response_mask"]
    log_ratio = masked(log_probs - batch["ref_log_probs"], mask)
    return masked_mean(log_ratio, mask, dim=-1) if config.length_normalized else log_ratio.sum(-1)


@LOSSES.register("bradley_terry")
def bradley_terry(
    values: Tensor, entropy: Tensor | None, micro: Mapping[str, Tensor], scale: LossScale, config: RewardModelOptions
) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean over pairs of -log sigmoid(r_better - r_worse), the likelihood of Bradley and Terry (1952).

    As the loss of a reward model: arXiv 2203.02155, equation 1. `center_rewards_coefficient` times the mean of
    (r_better + r_worse)^2 is added (arXiv 2312.09244, equation 2).

    `response_mask` [2 P, T] is set on the one token of a row whose value is its reward r.
    """
    pairs = max(scale.sequences / 2, 1.0)
    better, worse = _better_and_worse(masked(values, micro["response_mask"]).sum(-1))
    losses = -F.logsigmoid(better - worse)
    if config.center_rewards_coefficient:
        losses = losses + config.center_rewards_coefficient * (better + worse) ** 2
    return losses.sum() / pairs, _pair_metrics(better.detach(), worse.detach(), pairs)


def _better_and_worse(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The values [P] of both rows of each pair, from [2 P] in the order of `bradley_terry`."""
    return rows[0 : len(rows) // 2 * 2 : 2], rows[1::2]


def _pair_metrics(better: Tensor, worse: Tensor, pairs: float) -> dict[str, Tensor]:
    """Sums over the rewards [P] of a micro-batch, divided by the pairs of the global batch."""
    return {
        "accuracy": (better > worse).sum().to(better.dtype) / pairs,
        "margin": (better - worse).sum() / pairs,
        "chosen_reward": better.sum() / pairs,
        "rejected_reward": worse.sum() / pairs,
    }


def _correction(log_probs: Tensor, micro: Mapping[str, Tensor], config: PolicySettings) -> Correction | None:
    """The correction in use, if any: from the driver, or computed here against the current policy."""
    if not config.correction.active:
        return None
    if config.corrects_in_loss:
        behavior, mask, turns = micro["behavior_log_probs"], micro["response_mask"], micro.get("turn_index", None)
        return off_policy_correction(log_probs, behavior, mask, config.correction, turns)
    return Correction(micro["correction_weights"], micro["correction_kept"])


def _token_mean(values: Tensor, mask: Tensor, scale: LossScale) -> Tensor:
    return aggregate(values.detach(), mask, "token-mean", scale)

"""Losses of a training step by name, as `train_step` calls them for every micro-batch.

The contract: `loss(log_probs, entropy, micro, scale, config) -> (loss, metrics)`. Every term is divided by counts over
the global batch, so the losses of all micro-batches on all data ranks sum to the loss of the batch. Metrics follow
one rule: a name ending in `_max` is reduced by max, every other by sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from roll.algorithms.aggregation import LossScale, aggregate
from roll.algorithms.kl import k3, kl_divergence
from roll.algorithms.masking import masked, masked_max
from roll.algorithms.policy_config import PolicyLossConfig
from roll.algorithms.policy_losses import PG_VARIANTS
from roll.algorithms.registry import Registry

__all__ = ["LOSSES", "LossScale", "PolicyLossConfig", "policy", "sft"]

Loss = Callable[[Tensor, Tensor | None, Mapping[str, Tensor], LossScale, Any], tuple[Tensor, dict[str, Tensor]]]
LOSSES: Registry[Loss] = Registry("loss")


@LOSSES.register("sft")
def sft(
    log_probs: Tensor, entropy: Tensor | None, micro: Mapping[str, Tensor], scale: LossScale, config: Any = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean negative log-likelihood of the answer tokens: -sum log pi / N_tok.

    Args:
        log_probs: [b, T] with gradient.
        entropy: [b, T] or None; reported.
        micro: `response_mask` [b, T], set on the tokens to learn.
        scale: counts over the global batch.
        config: has no settings; takes None.

    Returns:
        The 0-d loss, and `entropy` (mean over tokens) where it was given.
    """
    mask = micro["response_mask"]
    metrics = {} if entropy is None else {"entropy": _token_mean(entropy, mask, scale)}
    return aggregate(-log_probs, mask, "token-mean", scale), metrics


@LOSSES.register("policy")
def policy(
    log_probs: Tensor, entropy: Tensor | None, micro: Mapping[str, Tensor], scale: LossScale, config: PolicyLossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss pg + kl_loss_coef KL(pi || ref) - entropy_loss_coef H, each term aggregated by `loss_agg_mode`.

    Args:
        log_probs: log pi [b, T] with gradient, of logits divided by the sampling temperature.
        entropy: [b, T]; with gradient when `entropy_loss_coef` is not 0; otherwise only reported, and may be None.
        micro: `response_mask`, `old_log_probs` (the base of the ratio), `advantages` [b, T]; `ref_log_probs` [b, T]
            with `use_kl_loss`; `scores` [b] for the variants that ask for them.
        scale: counts over the global batch.
        config: names the variant and holds the coefficients.

    Returns:
        The 0-d loss, and the metrics `pg_loss`, `kl_loss` (aggregated like the loss, before its coefficient), `entropy`
        (mean over tokens), `ratio_mean`, `ratio_max`, `clip_fraction` (of tokens), `policy_kl` (k3 of log pi - log
        base: how far this update is from the policy it is corrected against).

    Raises:
        ValueError: an entropy bonus is asked for and no entropy is given.
        KeyError: the variant is unknown, or `micro` lacks a tensor.
    """
    mask = micro["response_mask"]
    log_probs, base, advantages = (masked(x, mask) for x in (log_probs, micro["old_log_probs"], micro["advantages"]))
    terms = PG_VARIANTS[config.pg_variant](log_probs, base, advantages, mask, micro.get("scores"), config)
    loss = aggregate(terms.loss, mask, config.loss_agg_mode, scale)
    metrics = {
        "pg_loss": loss.detach(),
        "ratio_mean": _token_mean(terms.ratio, mask, scale),
        "ratio_max": masked_max(terms.ratio, mask),
        "clip_fraction": _token_mean(terms.clipped.to(log_probs.dtype), mask, scale),
        "policy_kl": _token_mean(k3(log_probs.detach() - base), mask, scale),
    }
    if config.use_kl_loss:
        divergence = kl_divergence(log_probs, masked(micro["ref_log_probs"], mask), config.kl_penalty)
        kl = aggregate(divergence, mask, config.loss_agg_mode, scale)
        loss = loss + config.kl_loss_coef * kl
        metrics["kl_loss"] = kl.detach()
    if entropy is not None:
        metrics["entropy"] = _token_mean(entropy, mask, scale)
    if config.entropy_loss_coef:
        if entropy is None:
            raise ValueError(f"entropy_loss_coef: {config.entropy_loss_coef} needs the entropy of the logits; got None")
        loss = loss - config.entropy_loss_coef * aggregate(entropy, mask, config.loss_agg_mode, scale)
    return loss, metrics


def _token_mean(values: Tensor, mask: Tensor, scale: LossScale) -> Tensor:
    return aggregate(values.detach(), mask, "token-mean", scale)

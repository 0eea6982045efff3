"""What all policy losses share: the tokens they read, the losses they give, and how one is registered.

A loss gets whole samples (b samples of T padded tokens), so that it can compute sequence-level ratios, and returns
values per token. The `policy` loss in `roll.algorithms.losses` applies the correction weights and the mask and
aggregates the result; values outside the response mask are ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from roll.algorithms.aggregation import masked, unit_mean
from roll.algorithms.kl import LOG_RATIO_CLAMP
from roll.algorithms.lazy_torch import Tensor, torch
from roll.algorithms.registry import Algorithm, Registry


@dataclass(frozen=True)
class TokenLosses:
    """Result of a policy loss, each [b, T].

    Attributes:
        loss: loss of each token, with gradient.
        ratio: pi / base as the loss uses it, before clipping, detached; for metrics.
        clipped: bool, tokens whose loss is clipped, so that their gradient is zero or bounded; for metrics.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


@dataclass(frozen=True)
class PolicyTokens:
    """What a policy loss reads of b samples of T padded tokens; values outside the mask are ignored.

    Attributes:
        log_probs: log pi [b, T], with gradient.
        base: log base [b, T], the denominator of the ratio.
        advantages: [b, T].
        mask: [b, T] tokens that have a loss.
        scores: [b] raw scores; None where the batch has none.
        high_covariance: [b, T] bool, the tokens that the loss chose from the batch; None if it chooses none.
    """

    log_probs: Tensor
    base: Tensor
    advantages: Tensor
    mask: Tensor
    scores: Tensor | None = None
    high_covariance: Tensor | None = None

    @cached_property
    def log_ratio(self) -> Tensor:
        """The log ratio log pi - log base [b, T], 0 outside the mask."""
        return masked(self.log_probs - self.base, self.mask)

    @cached_property
    def ratio(self) -> Tensor:
        """The ratio r = exp(clamp(log pi - log base, +-LOG_RATIO_CLAMP)) [b, T], exactly 1 outside the mask."""
        return clamped_exp(self.log_ratio)

    def with_ratio_of(self, ratio_type: str, turn_index: Tensor | None = None) -> PolicyTokens:
        """The tokens with the ratio of their turn or sample, see `sequence_ratio_base`."""
        base = sequence_ratio_base(self.log_probs, self.base, self.mask, ratio_type, turn_index)
        return replace(self, base=base)


LossFormula = Callable[[PolicyTokens, Any], TokenLosses]


@dataclass(frozen=True)
class PolicyLoss(Algorithm):
    """A policy loss: f(tokens, options) -> the loss of each token. The defaults are the traits of PPO.

    Attributes:
        ratio_base: what `pg_ratio_base: auto` is: `behavior` where the ratio is the distance to the policy that
            sampled, `proximal` where it must be the size of an update, `auto` where `old_log_probs_source` decides.
        multiplies_ratio: whether the gradient of a token is a multiple of its ratio, so that a weight for the same
            ratio would count it twice.
        reads_ratio: whether the loss depends on the ratio at all; if not, it does not correct for stale samples.
        reads_ratio_type: whether the loss takes the ratio of a token, which `ratio_type` can replace.
        needs_weights: whether the weights of `correction` are part of the loss, so that they are on by default.
        choose: f(log p, advantages, response_mask, options, seed) -> [B, T] bool, tokens that the loss treats
            differently, chosen from the whole batch; None if there are none.
    """

    ratio_base: Literal["behavior", "proximal", "auto"] = "auto"
    multiplies_ratio: bool = True
    reads_ratio: bool = True
    reads_ratio_type: bool = True
    needs_weights: bool = False
    choose: Callable[[Tensor, Tensor, Tensor, Any, int], Tensor] | None = None

    def __call__(self, tokens: PolicyTokens, options: Any) -> TokenLosses:
        result: TokenLosses = self.formula(tokens, options)
        return result


POLICY_LOSSES: Registry[PolicyLoss] = Registry("pg_variant")


def policy_loss(name: str, **declared: Any) -> Callable[[LossFormula], PolicyLoss]:
    """Decorator that registers a formula as the `pg_variant` of this name; `declared` are attributes of PolicyLoss."""
    return lambda formula: POLICY_LOSSES.register(name)(PolicyLoss(name, formula, **declared))


def clamped_exp(log_ratio: Tensor) -> Tensor:
    """exp(clamp(x, +-LOG_RATIO_CLAMP)), finite for any x."""
    return log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()


def none_of(tokens: Tensor) -> Tensor:
    """A mask like `tokens` that is set nowhere."""
    return torch.zeros_like(tokens, dtype=torch.bool)


@dataclass(frozen=True)
class Clip:
    """Bounds of a ratio, [1 - low, 1 + high]; with `dual`, the loss is at most dual |A| where A < 0."""

    low: float
    high: float
    dual: float | None = None


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: Clip) -> TokenLosses:
    """PPO's loss for a given ratio [b, T]; see `ppo`."""
    unclipped = -ratio * advantages
    bounded = -ratio.clamp(1 - clip.low, 1 + clip.high) * advantages
    loss, clipped = torch.maximum(unclipped, bounded), bounded > unclipped
    if clip.dual is not None:
        ceiling = -clip.dual * advantages
        capped = (advantages < 0) & (loss > ceiling)
        loss, clipped = torch.where(capped, ceiling, loss), clipped | capped
    return TokenLosses(loss, ratio.detach(), clipped)


def sequence_ratio_base(
    log_probs: Tensor, base_log_probs: Tensor, response_mask: Tensor, ratio_type: str, turn_index: Tensor | None = None
) -> Tensor:
    """Replaces log base so that log pi minus it is the log ratio of the token's turn or sample (`ratio_type`).

    For `segment` and `sequence` it is sg[log pi_t] - m, where m is the mean of sg[log pi - log base] over the response
    tokens of the token's turn or sample. All tokens then have the log ratio m, and the gradient flows through each
    token's own log pi_t, unless m is beyond LOG_RATIO_CLAMP. Source: GSPO (arXiv 2507.18071) section 4.3,
    GSPO-token.

    Args:
        log_probs: log pi [b, T].
        base_log_probs: log base [b, T].
        response_mask: [b, T].
        ratio_type: token, segment (a turn) or sequence (a sample).
        turn_index: [b, T] the turn of each response token; needed for segment.

    Returns:
        [b, T]: `base_log_probs` unchanged for token; otherwise float64 without gradient, because in float32 the
        difference to log pi would lose digits of m.

    Raises:
        ValueError: segment without `turn_index`.
    """
    if ratio_type == "token":
        return base_log_probs
    if ratio_type == "sequence":
        units = torch.zeros_like(response_mask, dtype=torch.int64)
    elif turn_index is not None:
        units = turn_index.clamp(min=0)
    else:
        raise ValueError("ratio_type: segment needs the tensor turn_index [b, T] in the batch; got none")
    current = log_probs.detach().double()
    mean = unit_mean(current - base_log_probs, response_mask, units)
    return current - mean

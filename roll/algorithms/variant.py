"""What a policy loss is made of: the registry of variants, what they return, and the ratios they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from roll.algorithms.kl import LOG_RATIO_CLAMP
from roll.algorithms.masking import masked
from roll.algorithms.policy_config import PolicyLossConfig
from roll.algorithms.registry import Registry


@dataclass(frozen=True)
class TokenLosses:
    """What a variant returns, each [b, T].

    Attributes:
        loss: loss of each token, with gradient.
        ratio: pi / base as the variant uses it before any clipping, detached; reported.
        clipped: tokens whose loss a clip bounds, so that they pass no gradient or a bounded one; reported.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


PolicyLoss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, PolicyLossConfig], TokenLosses]
PG_VARIANTS: Registry[PolicyLoss] = Registry("pg_variant")
"""f(log_probs [b, T] with grad, base_log_probs [b, T], advantages [b, T], response_mask [b, T], scores [b], config)."""


def policy_ratio(log_probs: Tensor, base_log_probs: Tensor, response_mask: Tensor) -> Tensor:
    """The ratio r = exp(clamp(log pi - log base, +-LOG_RATIO_CLAMP)) [b, T], exactly 1 outside the mask."""
    return bounded_exp(masked(log_probs - base_log_probs, response_mask))


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp(clamp(x, +-LOG_RATIO_CLAMP)): finite whatever x is."""
    return log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()

"""Estimators of the KL divergence between the policy and a reference from sampled log-probs, and its coefficient.

Source of the estimators: Schulman, "Approximating KL divergence", 2020 (http://joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from roll.algorithms.lazy_torch import Tensor, torch
from roll.algorithms.registry import Registry

KL_CLAMP = 10.0
"""Bound of k3, which grows exponentially: without it a single token could dominate the batch."""

LOG_RATIO_CLAMP = 20.0
"""Bound of a log ratio before exponentiation: e^20 is beyond every clip, but finite in fp32, as is its gradient."""

KL_ESTIMATORS: Registry[Callable[[Tensor], Tensor]] = Registry("KL estimator")
"""f(log pi - log ref), any shape."""


@KL_ESTIMATORS.register("k1")
def k1(log_ratio: Tensor) -> Tensor:
    """The log ratio itself: unbiased, can be negative."""
    return log_ratio


@KL_ESTIMATORS.register("k2")
def k2(log_ratio: Tensor) -> Tensor:
    """(log pi - log ref)^2 / 2: never negative, biased; on-policy its gradient is that of the KL."""
    return 0.5 * log_ratio**2


@KL_ESTIMATORS.register("k3")
def k3(log_ratio: Tensor) -> Tensor:
    """e^-k1 - 1 + k1, clamped to +- KL_CLAMP: unbiased (before the clamp) and never negative."""
    safe = log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return (torch.expm1(-safe) + safe).clamp(-KL_CLAMP, KL_CLAMP)


@KL_ESTIMATORS.register("abs")
def absolute(log_ratio: Tensor) -> Tensor:
    """|log pi - log ref|."""
    return log_ratio.abs()


def kl_divergence(log_probs: Tensor, ref_log_probs: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(pi || ref), shaped like its inputs, differentiable in `log_probs`.

    `estimator` is a name of KL_ESTIMATORS (`kl_penalty` in the reward, `kl_loss_type` in the loss).
    """
    return KL_ESTIMATORS[estimator](log_probs - ref_log_probs)


KL_ERROR_CLIP = 0.2
"""Bound of the relative KL error in one update, so that one unusual batch cannot change the coefficient by much."""


@dataclass
class KLController:
    """The weight of the KL in the token reward; with a target it rises while the KL is above it, and falls below it.

    c <- c (1 + clip(KL / target - 1, +-KL_ERROR_CLIP) samples / horizon), never below 0. Source: Ziegler et al. 2019
    (arXiv 1909.08593) section 2.2.

    Attributes:
        coefficient: current value; the first is `init_kl_coef`.
        target: of the mean KL per token, in nats (`target_kl`); None: the coefficient is constant.
        horizon: samples over which the coefficient changes (`kl_horizon`).
    """

    coefficient: float
    target: float | None = None
    horizon: int = 1

    def update(self, kl: float, samples: int) -> None:
        """Updates the coefficient after a batch of `samples` whose mean KL per token was `kl`."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -KL_ERROR_CLIP), KL_ERROR_CLIP)
            self.coefficient = max(self.coefficient * (1 + error * samples / self.horizon), 0.0)

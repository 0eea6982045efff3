"""Losses that treat tokens differently whose log-prob and advantage vary together, which make the entropy fall.

Source: Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning" (arXiv 2505.22617).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from roll.algorithms.aggregation import masked, masked_mean
from roll.algorithms.lazy_torch import Tensor, torch
from roll.algorithms.policy_loss.base import PolicyTokens, TokenLosses, none_of, policy_loss
from roll.algorithms.policy_loss.ppo import PPOOptions, ppo
from roll.base.errors import Finding, warning
from roll.base.schema import check_order, option


def token_covariances(log_probs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    """(log p - its mean) x (A - its mean) [B, T] in float64, with means over the batch's response tokens; eq. 10.

    Args:
        log_probs: log p [B, T].
        advantages: [B, T].
        response_mask: [B, T].

    Returns:
        [B, T], 0 outside the mask. Their mean is the covariance of the batch.
    """
    values = [masked(x, response_mask).double() for x in (log_probs, advantages)]
    first, second = (x - masked_mean(x, response_mask) for x in values)
    return masked(first * second, response_mask)


@dataclass
class ClipCovOptions(PPOOptions):
    """The keys of Clip-Cov."""

    clip_cov_ratio: float = option(2e-4, "Share of the response tokens that lose their gradient.", gt=0, le=1)
    clip_cov_lower: float = option(
        1.0, "Smallest covariance of log-prob and advantage of tokens that may lose their gradient."
    )
    clip_cov_upper: float = option(5.0, "Largest covariance of log-prob and advantage of these tokens.")


def _check(options: ClipCovOptions, _: object) -> Iterator[Finding]:
    yield from check_order("clip_cov_lower", options.clip_cov_lower, options.clip_cov_upper)


def _between_bounds(log_probs: Tensor, advantages: Tensor, mask: Tensor, options: ClipCovOptions, seed: int) -> Tensor:
    """N x `clip_cov_ratio` of the N response tokens, at least one, at random from those between both bounds."""
    covariances = token_covariances(log_probs, advantages, mask)
    candidates = mask & (covariances >= options.clip_cov_lower) & (covariances <= options.clip_cov_upper)
    order = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return _largest(order, candidates, max(1, int(int(mask.sum()) * options.clip_cov_ratio)))


@policy_loss("clip_cov", options=ClipCovOptions, check=_check, choose=_between_bounds)
def clip_cov(tokens: PolicyTokens, options: ClipCovOptions) -> TokenLosses:
    """`ppo`, without a gradient of some tokens of high covariance, (log p - mean) (A - mean) over the batch.

    Source: arXiv 2505.22617 section 4.2, Clip-Cov.
    """
    if tokens.high_covariance is None:
        return ppo(tokens, options)
    terms = ppo(replace(tokens, advantages=tokens.advantages.masked_fill(tokens.high_covariance, 0.0)), options)
    return replace(terms, clipped=terms.clipped | tokens.high_covariance)


@dataclass
class KLCovOptions:
    """The keys of KL-Cov."""

    kl_cov_ratio: float = option(
        2e-4, "Share of the response tokens, those of the highest covariance, that get a KL penalty.", gt=0, le=1
    )
    kl_cov_coef: float = option(1.0, "Weight of the KL penalty of these tokens.", gt=0, usual=(1e-6, 1e4))


def _highest(log_probs: Tensor, advantages: Tensor, mask: Tensor, options: KLCovOptions, seed: int) -> Tensor:
    """The N x `kl_cov_ratio` of the N response tokens with the highest covariance, at least one."""
    covariances = token_covariances(log_probs, advantages, mask)
    return _largest(covariances, mask, max(1, int(int(mask.sum()) * options.kl_cov_ratio)))


def _check_steps(_: KLCovOptions, config: Any) -> Iterator[Finding]:
    if config.optimizer_steps_per_batch == 1 and config.async_generation_ratio == 0:
        yield warning(
            "actor_train.pg_variant",
            "kl_cov has no effect with one optimizer step for each batch: its KL has no gradient before the second; "
            "use ppo_epochs 2 or smaller optimizer steps",
        )


@policy_loss("kl_cov", options=KLCovOptions, check=_check_steps, choose=_highest)
def kl_cov(tokens: PolicyTokens, options: KLCovOptions) -> TokenLosses:
    """-r A + `kl_cov_coef` |log pi - log base|, the second term for the tokens of highest covariance only.

    The penalty has no gradient where pi is the base, so it needs several optimizer steps for each batch, or stale
    samples. Source: arXiv 2505.22617 section 4.2, KL-Cov.
    """
    loss, chosen = -tokens.ratio * tokens.advantages, tokens.high_covariance
    if chosen is None:
        chosen = none_of(tokens.ratio)
    penalty = options.kl_cov_coef * masked(tokens.log_ratio.abs(), chosen)
    return TokenLosses(loss + penalty, tokens.ratio.detach(), chosen)


def _largest(values: Tensor, mask: Tensor, count: int) -> Tensor:
    """The `count` largest values within the mask, or all of it, as a mask."""
    candidates = values.masked_fill(~mask, -torch.inf).flatten()
    chosen = torch.zeros_like(mask).flatten()
    chosen[candidates.topk(min(count, int(mask.sum()))).indices] = True
    return chosen.view_as(mask)

"""What the policy loss needs to know, typed and picklable: it travels from the driver to every training rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from roll.algorithms.aggregation import masked, masked_sum
from roll.algorithms.kl import LOG_RATIO_CLAMP
from roll.algorithms.registry import Registry
from roll.configs.agentic_learning import keys_of
from roll.configs.pipeline import RLConfig
from roll.configs.policy import CorrectionOptions, proximal_source, ratio_base


@dataclass(frozen=True)
class PolicyLossConfig:
    """Settings of the `policy` loss, under the names and meanings of the YAML keys, none of them `auto`."""

    pg_variant: str = "ppo"
    pg_ratio_base: str = "proximal"
    old_log_probs_source: str = "recompute"
    ratio_type: str = "token"
    correction: CorrectionOptions = field(default_factory=CorrectionOptions)
    pg_clip_low: float = 0.2
    pg_clip_high: float = 0.2
    dual_clip_loss: bool = False
    dual_clip_c: float = 3.0
    gspo_clip_low: float = 3e-4
    gspo_clip_high: float = 4e-4
    tis_lower_bound: float = 0.0
    tis_upper_bound: float = 1.0
    topr_positive_weight: float = 1.0
    topr_negative_weight: float = 1.0
    topr_level: str = "token"
    cispo_epsilon_low: float = 0.1
    cispo_epsilon_high: float = 0.1
    cispo_use_unified_mask: bool = False
    kimi15_tau: float = 0.1
    loss_agg_mode: str = "seq-mean-token-mean"
    entropy_loss_coef: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.0
    kl_penalty: str = "k3"

    @classmethod
    def from_config(cls, config: RLConfig) -> PolicyLossConfig:
        """The settings of a run; `pg_variant` is actor_train's, all others stand at the top level.

        A run without turns has no `ratio_type`; its ratios are those of tokens.
        """
        variant = config.actor_train.pg_variant
        source = proximal_source(config, variant, config.async_generation_ratio)
        settled: dict[str, Any] = {
            "pg_variant": variant,
            "old_log_probs_source": source,
            "pg_ratio_base": ratio_base(config, variant, source),
        }
        shared = {name: getattr(config, name) for name in keys_of(cls, config) if name not in settled}
        return cls(**settled, **shared)

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether the loss differentiates the entropy; without it, one computed under no_grad is enough."""
        return self.entropy_loss_coef != 0.0

    @property
    def bypass(self) -> bool:
        """Whether there is no proximal policy: the correction compares the current policy with the sampling one."""
        return self.old_log_probs_source == "behavior"

    @property
    def reads_turns(self) -> bool:
        """Whether the loss needs `turn_index`."""
        return self.ratio_type == "segment"

    @property
    def base_key(self) -> str:
        """The tensor of a batch that the ratio is taken against."""
        return "behavior_log_probs" if self.pg_ratio_base == "behavior" else "old_log_probs"


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


def tied_base(
    log_probs: Tensor, base_log_probs: Tensor, response_mask: Tensor, ratio_type: str, turn_index: Tensor | None = None
) -> Tensor:
    """What to take the ratio against, so that it is of `ratio_type`.

    For segment and sequence it is sg[log pi_t] - m, where m is the mean of sg[log pi - log base] over the response
    tokens of the token's turn or sample, clamped to +-LOG_RATIO_CLAMP. The log ratio is then m, the same for all of
    them, and its gradient is that of the token's own log pi_t. Source: GSPO (arXiv 2507.18071), its token-level form.

    Args:
        log_probs: log pi [b, T].
        base_log_probs: log base [b, T].
        response_mask: [b, T].
        ratio_type: token, segment or sequence.
        turn_index: [b, T] the turn of each response token; needed for segment.

    Returns:
        [b, T]: `base_log_probs` itself for token; else float64 without gradient, so that the difference to log pi is
        m to more digits than float32 leaves of it.

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
        raise ValueError("ratio_type: segment needs the tensor turn_index [b, T] of the batch; got none")
    current = log_probs.detach().double()
    mean = _mean_of_unit(masked(current - base_log_probs, response_mask), response_mask, units)
    return current - mean.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


def _mean_of_unit(values: Tensor, mask: Tensor, units: Tensor) -> Tensor:
    """[b, T] mean of values over the tokens of the mask that share a token's row and unit; values are 0 elsewhere."""
    sums = values.new_zeros(values.shape[0], int(units.max()) + 1 if units.numel() else 1)
    counts = sums.clone().scatter_add_(1, units, mask.to(values.dtype))
    sums.scatter_add_(1, units, values)
    return (sums / counts.clamp(min=1)).gather(1, units)


@dataclass(frozen=True)
class Clip:
    """Bounds of a ratio: [1 - low, 1 + high], and where A < 0 a loss of at most `dual` times |A|, if given."""

    low: float
    high: float
    dual: float | None = None


@PG_VARIANTS.register("ppo")
def ppo(
    log_probs: Tensor,
    base_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    scores: Tensor | None,
    config: PolicyLossConfig,
) -> TokenLosses:
    """max(-r A, -clip(r, 1 - eps_low, 1 + eps_high) A), and with dual clip min(that, -c A) where A < 0.

    Source: Schulman et al. 2017 (arXiv 1707.06347) eq. 7; separate bounds, DAPO (arXiv 2503.14476); dual clip, Ye et
    al. 2020 (arXiv 1912.09729) eq. 5.
    """
    return clipped_surrogate(policy_ratio(log_probs, base_log_probs, response_mask), advantages, _ppo_clip(config))


@PG_VARIANTS.register("decoupled_ppo")
def decoupled_ppo(
    log_probs: Tensor,
    base_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    scores: Tensor | None,
    config: PolicyLossConfig,
) -> TokenLosses:
    """PPO against the proximal policy: the clip measures this update, the correction weight p / mu the data's age.

    The weight is that of the correction block, which the configuration turns on for this variant and the `policy` loss
    multiplies on every token. Source: Hilton et al. 2021 (arXiv 2110.00641); AReaL (arXiv 2505.24298).
    """
    return clipped_surrogate(policy_ratio(log_probs, base_log_probs, response_mask), advantages, _ppo_clip(config))


@PG_VARIANTS.register("gspo")
def gspo(
    log_probs: Tensor,
    base_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    scores: Tensor | None,
    config: PolicyLossConfig,
) -> TokenLosses:
    """PPO's loss of r_t = sg[s] pi_t / sg[pi_t], where s = exp(mean_t(log pi - log base)) is the response's ratio.

    All tokens of a response share the value of the ratio, and are clipped or not together; the gradient flows through
    each token's own log-prob. Source: GSPO (arXiv 2507.18071), its token-level form.
    """
    base = tied_base(log_probs, base_log_probs, response_mask, "sequence")
    ratio = policy_ratio(log_probs, base, response_mask).to(log_probs.dtype)
    return clipped_surrogate(ratio, advantages, Clip(config.gspo_clip_low, config.gspo_clip_high))


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: Clip) -> TokenLosses:
    """PPO's loss of a given ratio [b, T]; see `ppo`."""
    free = -ratio * advantages
    bounded = -ratio.clamp(1 - clip.low, 1 + clip.high) * advantages
    loss, clipped = torch.maximum(free, bounded), bounded > free
    if clip.dual is not None:
        ceiling = -clip.dual * advantages
        capped = (advantages < 0) & (loss > ceiling)
        loss, clipped = torch.where(capped, ceiling, loss), clipped | capped
    return TokenLosses(loss, ratio.detach(), clipped)


def _ppo_clip(config: PolicyLossConfig) -> Clip:
    return Clip(config.pg_clip_low, config.pg_clip_high, config.dual_clip_c if config.dual_clip_loss else None)


@PG_VARIANTS.register("vanilla")
def vanilla(
    log_probs: Tensor,
    base_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    scores: Tensor | None,
    config: PolicyLossConfig,
) -> TokenLosses:
    """-A log pi (REINFORCE, Williams 1992): no ratio enters, so stale data is not corrected for."""
    ratio = policy_ratio(log_probs, base_log_probs, response_mask).detach()
    return TokenLosses(-advantages * log_probs, ratio, torch.zeros_like(ratio, dtype=torch.bool))


@PG_VARIANTS.register("tis")
def tis(
    log_probs: Tensor,
    base_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    scores: Tensor | None,
    config: PolicyLossConfig,
) -> TokenLosses:
    """-sg(clip(r, lower, upper)) A log pi: truncated importance sampling (Ionides 2008), per token.

    Between the bounds the gradient is that of -r A; the upper bound trades variance for bias. Source of the form for
    policies: IMPALA (arXiv 1802.01561) section 4.
    """
    ratio = policy_ratio(log_probs, base_log_probs, response_mask).detach()
    weight = ratio.clamp(config.tis_lower_bound, config.tis_upper_bound)
    return TokenLosses(-weight * advantages * log_probs, ratio, weight != ratio)


@PG_VARIANTS.register("topr")
def topr(
    log_probs: Tensor,
    base_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    scores: Tensor | None,
    config: PolicyLossConfig,
) -> TokenLosses:
    """-w_pos A log pi for responses of score s > 0, -w_neg sg(clip(r, 0, 1)) A log pi for the others.

    What was good is imitated at full weight; what was bad is pushed away only as far as the policy still does it.
    `topr_level: sequence` takes r from the summed log ratio of the response, as the paper does. Source: Le Roux et al.
    2025 (arXiv 2503.14286).

    Raises:
        ValueError: `scores` is None.
    """
    if scores is None:
        raise ValueError("pg_variant topr needs the raw scores [b] of the samples; got None")
    log_ratio = masked(log_probs - base_log_probs, response_mask).detach()
    if config.topr_level == "sequence":
        log_ratio = masked_sum(log_ratio, response_mask, dim=-1)[:, None].expand_as(log_ratio)
    ratio = bounded_exp(masked(log_ratio, response_mask))
    positive = (scores > 0)[:, None]
    tapered = config.topr_negative_weight * ratio.clamp(max=1.0)
    weight = torch.where(positive, torch.full_like(ratio, config.topr_positive_weight), tapered)
    return TokenLosses(-weight * advantages * log_probs, ratio, ~positive & (ratio > 1))


@PG_VARIANTS.register("cispo")
def cispo(
    log_probs: Tensor,
    base_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    scores: Tensor | None,
    config: PolicyLossConfig,
) -> TokenLosses:
    """-sg(clip(r, 1 - eps_low, 1 + eps_high)) A log pi: the weight is clipped, and no token loses its gradient.

    With `cispo_use_unified_mask` tokens with (A > 0 and r > 1 + eps_high) or (A < 0 and r < 1 - eps_low) have no loss,
    as in PPO. Source: MiniMax-M1 (arXiv 2506.13585) eq. 4-5, and its unified formulation for the mask.
    """
    low, high = 1 - config.cispo_epsilon_low, 1 + config.cispo_epsilon_high
    ratio = policy_ratio(log_probs, base_log_probs, response_mask).detach()
    weight = ratio.clamp(low, high)
    clipped = weight != ratio
    if config.cispo_use_unified_mask:
        dropped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
        weight = weight.masked_fill(dropped, 0.0)
    return TokenLosses(-weight * advantages * log_probs, ratio, clipped)


@PG_VARIANTS.register("kimi15")
def kimi15(
    log_probs: Tensor,
    base_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    scores: Tensor | None,
    config: PolicyLossConfig,
) -> TokenLosses:
    """-A log pi + (tau / 2) (log pi - log base)^2: nothing is weighted; a square tethers the policy to its base.

    Source: Kimi k1.5 (arXiv 2501.12599) section 2.3.2, per token.
    """
    log_ratio = masked(log_probs - base_log_probs, response_mask)
    loss = -advantages * log_probs + 0.5 * config.kimi15_tau * log_ratio**2
    return TokenLosses(loss, bounded_exp(log_ratio).detach(), torch.zeros_like(loss, dtype=torch.bool))

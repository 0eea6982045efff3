"""Policy-gradient losses per token, by name (`pg_variant`), and the settings of the policy loss.

A variant is one function registered in PG_VARIANTS. It gets whole samples (b samples of T padded tokens), so that it
can compute sequence-level ratios, and returns values per token. The `policy` loss in `roll.algorithms.losses` applies
the correction weights and the mask and aggregates the result; values outside the response mask are ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from roll.algorithms.aggregation import masked, masked_mean, masked_sum, unit_mean
from roll.algorithms.kl import LOG_RATIO_CLAMP
from roll.algorithms.registry import Registry
from roll.configs.advantages import Divergence
from roll.configs.agentic import AgenticOptions
from roll.configs.pipeline import RLConfig
from roll.configs.policy import PolicyOptions, losses_of, options_of, proximal_source, ratio_base, traits_of


@dataclass
class PolicyLossConfig(PolicyOptions):
    """Settings of the `policy` loss: the YAML keys of `PolicyOptions`, with every `auto` resolved, and some more.

    The driver sends it to every training rank, so it must be picklable.

    Attributes:
        pg_variant: key of actor_train, a name of PG_VARIANTS or a mixture of several.
        ratio_type: key of agentic runs; other runs use the default.
        p99_logprob_mismatch: key of RL runs; tokens whose log ratio is larger are counted in a metric.
        opd_top_k: key of the advantages; None where no divergence to a teacher is part of the loss.
        opd_kl_coef: weight of that divergence.
        opd_divergence: which one it is.
        opd_jsd_beta: the weight of `opd_divergence: jsd`.
        first_step: this is the first optimizer step of the batch, and log p was not computed before: it is log pi.
    """

    old_log_probs_source: Literal["auto", "behavior", "recompute"] = "recompute"
    pg_ratio_base: Literal["auto", "behavior", "proximal"] = "proximal"
    pg_variant: str = field(kw_only=True)
    ratio_type: Literal["token", "segment", "sequence"] = AgenticOptions.ratio_type
    p99_logprob_mismatch: float | None = None
    opd_top_k: int | None = None
    opd_kl_coef: float = 1.0
    opd_divergence: Divergence = "reverse"
    opd_jsd_beta: float = 0.5
    first_step: bool = False

    @classmethod
    def from_config(cls, config: RLConfig) -> PolicyLossConfig:
        """The settings of a run."""
        variant = config.actor_train.pg_variant
        source = proximal_source(config, variant, config.async_generation_ratio)
        base = ratio_base(config, variant, source)
        resolved = {"pg_variant": variant, "old_log_probs_source": source, "pg_ratio_base": base}
        return cls(**options_of(cls, config) | resolved)

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether the loss differentiates the entropy; otherwise it may be computed under no_grad."""
        return self.entropy_loss_coef != 0.0

    @property
    def bypass(self) -> bool:
        """Whether there is no proximal policy, so that the correction compares the current with the sampling policy."""
        return self.old_log_probs_source == "behavior"

    @property
    def corrects_in_loss(self) -> bool:
        """Whether the loss computes the correction, of the current policy against the one that sampled."""
        return self.bypass or self.first_step

    @property
    def reads_turns(self) -> bool:
        """Whether the loss needs `turn_index`."""
        return "segment" in (self.ratio_type, self.correction.weights.level) or self.correction.rejects_segments

    @property
    def base_key(self) -> str:
        """Name of the batch tensor that holds log base, the denominator of the ratio."""
        return "behavior_log_probs" if self.pg_ratio_base == "behavior" else "old_log_probs"


@dataclass(frozen=True)
class TokenLosses:
    """Result of a variant, each [b, T].

    Attributes:
        loss: loss of each token, with gradient.
        ratio: pi / base as the variant uses it, before clipping, detached; for metrics.
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
        high_covariance: [b, T] bool, the tokens that `clip_cov` or `kl_cov` treats differently; None without them.
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


PolicyLoss = Callable[[PolicyTokens, PolicyLossConfig], TokenLosses]
PG_VARIANTS: Registry[PolicyLoss] = Registry("pg_variant")
"""f(tokens, config) -> the loss of each token; `roll.configs.policy.VARIANT_TRAITS` lists the steps to add one."""


def token_losses(tokens: PolicyTokens, config: PolicyLossConfig, turn_index: Tensor | None = None) -> TokenLosses:
    """The losses of `pg_variant` with the ratio of `ratio_type`; of a mixture, the sum with its weights.

    The ratio of a mixture is that of its first loss that reads one, and a token counts as clipped if one loss clips it.

    Args:
        tokens: of the samples.
        config: of the policy loss.
        turn_index: [b, T]; needed with `ratio_type: segment`.
    """
    parts: list[tuple[float, bool, TokenLosses]] = []
    for name, weight in losses_of(config.pg_variant).items():
        traits = traits_of(name)
        ratio_type = config.ratio_type if traits.reads_ratio_type else "token"
        base = sequence_ratio_base(tokens.log_probs, tokens.base, tokens.mask, ratio_type, turn_index)
        parts.append((weight, traits.reads_ratio, PG_VARIANTS[name](replace(tokens, base=base), config)))
    shown = next((terms for _, reads, terms in parts if reads), parts[0][2])
    loss, clipped = parts[0][0] * parts[0][2].loss, parts[0][2].clipped
    for weight, _, terms in parts[1:]:
        loss, clipped = loss + weight * terms.loss, clipped | terms.clipped
    return TokenLosses(loss, shown.ratio, clipped)


def clamped_exp(log_ratio: Tensor) -> Tensor:
    """exp(clamp(x, +-LOG_RATIO_CLAMP)), finite for any x."""
    return log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()


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


# Variants that clip the ratio and differentiate through it: the clip bounds the size of an update.


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


def _ppo_clip(config: PolicyLossConfig) -> Clip:
    return Clip(config.pg_clip_low, config.pg_clip_high, config.dual_clip_c if config.dual_clip_loss else None)


@PG_VARIANTS.register("ppo")
def ppo(tokens: PolicyTokens, config: PolicyLossConfig) -> TokenLosses:
    """max(-r A, -clip(r, 1 - eps_low, 1 + eps_high) A), and with dual clip min(that, -c A) where A < 0.

    Source: Schulman et al. 2017 (arXiv 1707.06347) eq. 7; separate bounds, DAPO (arXiv 2503.14476); dual clip, Ye et
    al. 2020 (arXiv 1912.09729) eq. 5.
    """
    return clipped_surrogate(tokens.ratio, tokens.advantages, _ppo_clip(config))


@PG_VARIANTS.register("decoupled_ppo")
def decoupled_ppo(tokens: PolicyTokens, config: PolicyLossConfig) -> TokenLosses:
    """PPO against the proximal policy p; the weight p / mu corrects for stale samples.

    The configuration turns on the weights of the `correction` section for this variant, and the `policy` loss
    multiplies them in, so the formula here is that of `ppo`. Source: Hilton et al. 2021 (arXiv 2110.00641); AReaL
    (arXiv 2505.24298).
    """
    return clipped_surrogate(tokens.ratio, tokens.advantages, _ppo_clip(config))


@PG_VARIANTS.register("clip_cov")
def clip_cov(tokens: PolicyTokens, config: PolicyLossConfig) -> TokenLosses:
    """`ppo`, without a gradient of some tokens of high covariance (see `roll.algorithms.covariance`).

    Source: arXiv 2505.22617 section 4.2, Clip-Cov.
    """
    if tokens.high_covariance is None:
        return ppo(tokens, config)
    terms = ppo(replace(tokens, advantages=tokens.advantages.masked_fill(tokens.high_covariance, 0.0)), config)
    return replace(terms, clipped=terms.clipped | tokens.high_covariance)


@PG_VARIANTS.register("kl_cov")
def kl_cov(tokens: PolicyTokens, config: PolicyLossConfig) -> TokenLosses:
    """-r A + `kl_cov_coef` |log pi - log base|, the second term for the tokens of highest covariance only.

    The penalty has no gradient where pi is the base. Source: arXiv 2505.22617 section 4.2, KL-Cov.
    """
    loss, chosen = -tokens.ratio * tokens.advantages, tokens.high_covariance
    if chosen is None:
        chosen = torch.zeros_like(tokens.ratio, dtype=torch.bool)
    penalty = config.kl_cov_coef * masked(tokens.log_ratio.abs(), chosen)
    return TokenLosses(loss + penalty, tokens.ratio.detach(), chosen)


@PG_VARIANTS.register("gspo")
def gspo(tokens: PolicyTokens, config: PolicyLossConfig) -> TokenLosses:
    """PPO's loss with r_t = sg[s] pi_t / sg[pi_t], where s = exp(mean_t(log pi - log base)) is the sequence ratio.

    All tokens of a response have the same ratio and are clipped together; the gradient flows through each token's own
    log-prob. Source: GSPO (arXiv 2507.18071) section 4.3, GSPO-token.
    """
    base = sequence_ratio_base(tokens.log_probs, tokens.base, tokens.mask, "sequence")
    ratio = replace(tokens, base=base).ratio.to(tokens.log_probs.dtype)
    return clipped_surrogate(ratio, tokens.advantages, Clip(config.gspo_clip_low, config.gspo_clip_high))


@PG_VARIANTS.register("geo_mean")
def geo_mean(tokens: PolicyTokens, config: PolicyLossConfig) -> TokenLosses:
    """-r_t A with log r_t = sg[mean_t l'_t] + l'_t - sg[l'_t]: the geometric mean of a response's bounded ratios.

    l' is the log ratio, at most `geo_mean_clip_high` where A > 0 and at least -`geo_mean_clip_low` where A < 0, so that
    no single token decides the ratio of all. With `loss_agg_mode: seq-mean-token-mean`, value and gradient are those
    of -A exp(mean_t l'_t) for each response. Source: GMPO (arXiv 2507.20673) eq. 4.
    """
    log_ratio = tokens.log_ratio
    high = torch.where(tokens.advantages > 0, config.geo_mean_clip_high, torch.inf)
    low = torch.where(tokens.advantages < 0, -config.geo_mean_clip_low, -torch.inf)
    bounded = log_ratio.clamp(low, high)
    mean = masked_mean(bounded.detach(), tokens.mask, dim=-1)[:, None]
    ratio = clamped_exp(masked(mean + bounded - bounded.detach(), tokens.mask))
    return TokenLosses(-ratio * tokens.advantages, ratio.detach(), bounded != log_ratio)


@PG_VARIANTS.register("sapo")
def sapo(tokens: PolicyTokens, config: PolicyLossConfig) -> TokenLosses:
    """-A (4 / tau) sigmoid(tau (r - 1)): a soft gate instead of a clip; at r = 1 its gradient is that of -r A.

    tau is `sapo_tau_positive` where A > 0, else `sapo_tau_negative`. Source: SAPO (arXiv 2511.20347) eq. 5-6.
    """
    ratio = tokens.ratio
    tau = torch.where(tokens.advantages > 0, config.sapo_tau_positive, config.sapo_tau_negative).to(ratio.dtype)
    gate = 4 / tau * torch.sigmoid(tau * (ratio - 1))
    return TokenLosses(-gate * tokens.advantages, ratio.detach(), torch.zeros_like(ratio, dtype=torch.bool))


@PG_VARIANTS.register("dppo_tv")
def dppo_tv(tokens: PolicyTokens, config: PolicyLossConfig) -> TokenLosses:
    """-r A, without tokens that moved away by more than `dppo_tv_threshold` in probability: |pi - base| of the token.

    A token moves away where A > 0 and r > 1, or A < 0 and r < 1. A ratio would bound rare tokens too much and frequent
    ones too little. Source: DPPO (arXiv 2602.04879), Binary-TV.
    """
    divergence = (tokens.log_probs.detach().exp() - tokens.base.exp()).abs()
    return _within_divergence(tokens, divergence <= config.dppo_tv_threshold)


@PG_VARIANTS.register("dppo_kl")
def dppo_kl(tokens: PolicyTokens, config: PolicyLossConfig) -> TokenLosses:
    """As `dppo_tv`, with the KL divergence between the base's and the policy's probabilities of the token or not.

    q log(q / pi) + (1 - q) log((1 - q) / (1 - pi)), where q is the base's probability of the token. Source: DPPO
    (arXiv 2602.04879), Binary-KL.
    """
    current, base = (masked(x, tokens.mask).double() for x in (tokens.log_probs.detach(), tokens.base))
    other, base_other = (torch.log1p(-x.exp().clamp(max=1 - PROBABILITY_MARGIN)) for x in (current, base))
    divergence = base.exp() * (base - current) + (1 - base.exp()) * (base_other - other)
    return _within_divergence(tokens, divergence <= config.dppo_kl_threshold)


PROBABILITY_MARGIN = 1e-6
"""Probabilities closer to 1 count as this far from it, so that the log-prob of all other tokens is finite."""


def _within_divergence(tokens: PolicyTokens, inside: Tensor) -> TokenLosses:
    """-r A of the tokens that are `inside` [b, T] the trust region, or on the way back into it."""
    ratio = tokens.ratio
    away = ((tokens.advantages > 0) & (ratio > 1)) | ((tokens.advantages < 0) & (ratio < 1))
    dropped = away & ~inside
    return TokenLosses(-ratio * tokens.advantages.masked_fill(dropped, 0.0), ratio.detach(), dropped)


# Variants that differentiate log pi: REINFORCE, with a detached weight or a penalty for stale samples.


@PG_VARIANTS.register("vanilla")
def vanilla(tokens: PolicyTokens, config: PolicyLossConfig) -> TokenLosses:
    """-A log pi (REINFORCE, Williams 1992); uses no ratio, so it does not correct for stale samples.

    The `loss_mode: vanilla` of verl is `ppo` here.
    """
    ratio = tokens.ratio.detach()
    return TokenLosses(-tokens.advantages * tokens.log_probs, ratio, torch.zeros_like(ratio, dtype=torch.bool))


@PG_VARIANTS.register("tis")
def tis(tokens: PolicyTokens, config: PolicyLossConfig) -> TokenLosses:
    """-sg(clip(r, lower, upper)) A log pi: truncated importance sampling (Ionides 2008), per token.

    r is against the policy that sampled, the default of `pg_ratio_base` for this variant. Between the bounds the
    gradient is that of -r A; the upper bound trades variance for bias. A truncated weight on top of another loss
    (`rollout_is` of verl, `use_tis` of slime, the importance sampling correction for vLLM of TRL) is
    `correction.weights` here. Source of the form for policy gradients: IMPALA (arXiv 1802.01561) section 4.
    """
    ratio = tokens.ratio.detach()
    weight = ratio.clamp(config.tis_lower_bound, config.tis_upper_bound)
    return TokenLosses(-weight * tokens.advantages * tokens.log_probs, ratio, weight != ratio)


@PG_VARIANTS.register("topr")
def topr(tokens: PolicyTokens, config: PolicyLossConfig) -> TokenLosses:
    """-w_pos A log pi for responses with score s > 0, -w_neg sg(clip(r, 0, 1)) A log pi for the others.

    Responses with a negative score lose weight as the policy becomes less likely to produce them. `topr_level:
    sequence` takes r from the summed log ratio of the response, as in the paper. Source: Le Roux et al. 2025 (arXiv
    2503.14286).

    Raises:
        ValueError: `scores` is None.
    """
    if tokens.scores is None:
        raise ValueError("pg_variant topr needs the raw scores [b] of the samples; got None")
    log_ratio = tokens.log_ratio.detach()
    if config.topr_level == "sequence":
        log_ratio = masked_sum(log_ratio, tokens.mask, dim=-1)[:, None].expand_as(log_ratio)
    ratio = clamped_exp(masked(log_ratio, tokens.mask))
    positive = (tokens.scores > 0)[:, None]
    negative_weight = config.topr_negative_weight * ratio.clamp(max=1.0)
    weight = torch.where(positive, torch.full_like(ratio, config.topr_positive_weight), negative_weight)
    return TokenLosses(-weight * tokens.advantages * tokens.log_probs, ratio, ~positive & (ratio > 1))


@PG_VARIANTS.register("cispo")
def cispo(tokens: PolicyTokens, config: PolicyLossConfig) -> TokenLosses:
    """-sg(clip(r, 1 - eps_low, 1 + eps_high)) A log pi: clips the weight, so every token keeps a gradient.

    With `cispo_use_unified_mask` tokens with (A > 0 and r > 1 + eps_high) or (A < 0 and r < 1 - eps_low) have no loss,
    as in PPO. Source: MiniMax-M1 (arXiv 2506.13585) eq. 4-5, and its unified formulation for the mask.
    """
    low, high = 1 - config.cispo_epsilon_low, 1 + config.cispo_epsilon_high
    ratio = tokens.ratio.detach()
    weight = ratio.clamp(low, high)
    clipped = weight != ratio
    if config.cispo_use_unified_mask:
        dropped = ((tokens.advantages > 0) & (ratio > high)) | ((tokens.advantages < 0) & (ratio < low))
        weight = weight.masked_fill(dropped, 0.0)
    return TokenLosses(-weight * tokens.advantages * tokens.log_probs, ratio, clipped)


@PG_VARIANTS.register("kimi15")
def kimi15(tokens: PolicyTokens, config: PolicyLossConfig) -> TokenLosses:
    """-A log pi + (tau / 2) (log pi - log base)^2: no weights; a squared penalty keeps the policy near its base.

    Source: Kimi k1.5 (arXiv 2501.12599) section 2.3.2, per token.
    """
    log_ratio = tokens.log_ratio
    loss = -tokens.advantages * tokens.log_probs + 0.5 * config.kimi15_tau * log_ratio**2
    return TokenLosses(loss, clamped_exp(log_ratio).detach(), torch.zeros_like(loss, dtype=torch.bool))

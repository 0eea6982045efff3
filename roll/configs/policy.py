"""How a batch becomes a policy gradient: the loss, what its ratio is taken against, and the off-policy correction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from roll.configs.fields import option

FOLLOWING_VARIANTS = ("ppo", "gspo")
"""Their ratio is the size of an update; against which policy follows `old_log_probs_source`."""

BEHAVIOR_VARIANTS = ("tis", "topr", "cispo", "kimi15")
"""Their ratio is the distance to the policy that sampled."""

RATIO_WEIGHTED_VARIANTS = ("ppo", "gspo", "tis", "topr", "cispo")
"""Their loss is a multiple of the ratio, so a weight for the same ratio would count it twice."""

VARIANT_KNOBS: dict[str, tuple[str, ...]] = {
    "pg_clip_low": ("ppo", "decoupled_ppo"),
    "pg_clip_high": ("ppo", "decoupled_ppo"),
    "dual_clip_loss": ("ppo", "decoupled_ppo"),
    "dual_clip_c": ("ppo", "decoupled_ppo"),
    "gspo_clip_low": ("gspo",),
    "gspo_clip_high": ("gspo",),
    "tis_lower_bound": ("tis",),
    "tis_upper_bound": ("tis",),
    "topr_positive_weight": ("topr",),
    "topr_negative_weight": ("topr",),
    "topr_level": ("topr",),
    "cispo_epsilon_low": ("cispo",),
    "cispo_epsilon_high": ("cispo",),
    "cispo_use_unified_mask": ("cispo",),
    "kimi15_tau": ("kimi15",),
}
"""Key -> the values of `pg_variant` that read it."""


@dataclass
class WeightOptions:
    """Importance weights on the token loss."""

    level: Literal["token", "sequence", "geometric"] | None = option(
        None,
        "Ratio of a token, of the whole response, or its geometric mean; null: no weights (token for decoupled_ppo).",
    )
    mode: Literal["clamp", "mask"] = option(
        "clamp", "What happens outside the bounds: the weight is clamped to them, or its tokens leave the loss."
    )
    lower: float = option(0.0, "Least weight.", minimum=0)
    upper: float = option(2.0, "Largest weight.", above=0)


@dataclass
class RejectionOptions:
    """Tokens or responses left out of the loss because the sampling policy was too far away."""

    statistic: Literal["k1", "k2", "k3"] | None = option(
        None, "Of the log ratio l: k1 = l, k2 = l^2 / 2, k3 = e^l - 1 - l; null: nothing is rejected."
    )
    level: Literal["token", "sequence-mean", "sequence-sum", "sequence-max"] = option(
        "token", "One token, or the mean, sum or extremes over the response, which then leaves as a whole."
    )
    lower: float | None = option(None, "Kept from here: a ratio for k1, nats for k2 and k3; null: no bound.", minimum=0)
    upper: float | None = option(None, "Kept up to here, in the same units; null: no bound.", above=0)


@dataclass
class CorrectionOptions:
    """Correction for the distance between the policy that sampled and the one that learns; off by default."""

    weights: WeightOptions = option(factory=WeightOptions, help="Importance weights on the token loss.")
    rejection: RejectionOptions = option(factory=RejectionOptions, help="What is too far away to learn from.")
    veto_threshold: float | None = option(
        None, "A response with any token ratio below this leaves the loss whole, e.g. 1e-4.", above=0
    )
    renormalize: bool = option(False, "Divide the loss by the tokens left after rejection instead of by all.")

    @property
    def weighted(self) -> bool:
        """Whether token losses carry a weight."""
        return self.weights.level is not None

    @property
    def rejects(self) -> bool:
        """Whether tokens may leave the loss."""
        masks = self.weighted and self.weights.mode == "mask"
        return masks or self.rejection.statistic is not None or self.veto_threshold is not None

    @property
    def active(self) -> bool:
        """Whether the loss differs from one without correction."""
        return self.weighted or self.rejects


@dataclass
class PolicyOptions:
    """The keys of the policy loss; `pg_variant` stands with actor_train."""

    old_log_probs_source: Literal["auto", "behavior", "recompute"] = option(
        "auto",
        "Proximal log-probs: the engine's (no extra forward pass) or recomputed by the trainer; auto takes behavior "
        "in asynchronous training where nothing needs the others, else recompute.",
    )
    pg_ratio_base: Literal["auto", "behavior", "proximal"] = option(
        "auto",
        "What the ratio of the policy loss is taken against; auto is behavior for tis, topr, cispo and kimi15, "
        "proximal for decoupled_ppo, and follows old_log_probs_source for the others.",
    )
    allow_uncorrected_off_policy: bool = option(
        False, "Train on stale samples though nothing corrects for their age; else such a file is refused."
    )
    correction: CorrectionOptions = option(
        factory=CorrectionOptions, help="Weights and rejection against the sampling policy, for any pg_variant."
    )
    pg_clip_low: float = option(0.2, "ppo, decoupled_ppo: ratio clip below 1.", above=0, maximum=1)
    pg_clip_high: float = option(0.2, "ppo, decoupled_ppo: ratio clip above 1.", above=0)
    dual_clip_loss: bool = option(False, "ppo, decoupled_ppo: bound the loss of negative advantages.")
    dual_clip_c: float = option(3.0, "ppo, decoupled_ppo: that bound in multiples of |A|.", above=1)
    gspo_clip_low: float = option(3e-4, "gspo: clip below 1 of the response's mean ratio.", above=0, maximum=1)
    gspo_clip_high: float = option(4e-4, "gspo: clip above 1 of the response's mean ratio.", above=0)
    tis_lower_bound: float = option(0.0, "tis: least weight.", minimum=0)
    tis_upper_bound: float = option(1.0, "tis: largest weight.", above=0)
    topr_positive_weight: float = option(1.0, "topr: weight of responses with a score above 0.", minimum=0)
    topr_negative_weight: float = option(1.0, "topr: weight of the others.", minimum=0)
    topr_level: Literal["token", "sequence"] = option(
        "token", "topr: the ratio of a token, or of the whole response (the paper's form)."
    )
    cispo_epsilon_low: float = option(
        0.1, "cispo: the weight is at least 1 minus this; 1 or more leaves it unbounded below.", above=0
    )
    cispo_epsilon_high: float = option(0.1, "cispo: the weight is at most 1 plus this.", above=0)
    cispo_use_unified_mask: bool = option(
        False, "cispo: leave out tokens that ppo would clip: ratio too high with A > 0, too low with A < 0."
    )
    kimi15_tau: float = option(0.1, "kimi15: weight of half the squared log ratio.", above=0)
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        option("seq-mean-token-mean", "How token losses become one number.")
    )
    entropy_loss_coef: float = option(0.0, "Weight of the entropy bonus.", minimum=0)
    use_kl_loss: bool = option(False, "KL to the reference in the loss.")
    kl_loss_coef: float = option(0.0, "Its weight.", minimum=0)
    add_token_level_kl: bool = option(False, "KL to the reference in the token reward.")
    init_kl_coef: float = option(0.0, "Its weight; with target_kl the first one.", minimum=0)
    target_kl: float | None = option(
        None, "KL of the token reward in nats per token that its weight is steered to; null: a fixed weight.", above=0
    )
    kl_horizon: int = option(10000, "Samples over which that weight moves: the more, the slower.", minimum=1)
    kl_penalty: Literal["k1", "k2", "k3", "abs"] = option(
        "k3", "KL estimator: the log ratio k1, its half square k2, the unbiased positive k3, or the absolute log ratio."
    )


def proximal_source(options: PolicyOptions, pg_variant: str, async_generation_ratio: float) -> str:
    """`old_log_probs_source` without auto: behavior or recompute.

    Stale samples need no recomputed log-probs unless something tells the proximal policy from the sampling one: a
    variant or base that asks for it, weights beside a ratio that would otherwise be the same one, or denominators
    that must be known before the loss.
    """
    if options.old_log_probs_source != "auto":
        return options.old_log_probs_source
    weighted = options.correction.weighted and pg_variant in FOLLOWING_VARIANTS
    proximal = pg_variant == "decoupled_ppo" or options.pg_ratio_base == "proximal"
    needed = proximal or weighted or options.correction.renormalize
    return "behavior" if async_generation_ratio > 0 and not needed else "recompute"


def ratio_base(options: PolicyOptions, pg_variant: str, source: str) -> str:
    """`pg_ratio_base` without auto: behavior or proximal, given the source of the proximal log-probs."""
    if options.pg_ratio_base != "auto":
        return options.pg_ratio_base
    if pg_variant in BEHAVIOR_VARIANTS:
        return "behavior"
    return "behavior" if source == "behavior" and pg_variant != "decoupled_ppo" else "proximal"

"""How a batch becomes a policy gradient: advantages, the loss, its KL terms and the off-policy correction."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from roll.configs.schema import Condition, needs, option

TURN_ESTIMATORS = ("gigpo", "step_reinforce", "agentic_reinforce")
"""Values of `adv_estimator` that use the turns of a trajectory."""

ADV_ESTIMATORS = (
    "grpo",
    "reinforce",
    "rloo",
    "lite_ppo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "opo",
    "gpg",
    "pass_at_k",
    *TURN_ESTIMATORS,
)
"""Values of `adv_estimator`; the registry of roll.algorithms agrees with it."""

GROUP_ESTIMATORS = ("grpo", "rloo", "lite_ppo", "reinforce_plus_plus_baseline", "opo", "gpg", "pass_at_k")
"""Estimators that compare a response with the others to its prompt and give all its tokens the same advantage."""

WHITENING_ESTIMATORS = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Estimators that whiten advantages by definition."""


@dataclass(frozen=True)
class VariantTraits:
    """What the rules of the configuration need to know of a policy loss; nothing has a default, so each is decided.

    Attributes:
        ratio_base: what `pg_ratio_base: auto` is: `behavior` where the ratio is the distance to the policy that
            sampled, `proximal` where it must be the size of an update, `auto` where `old_log_probs_source` decides.
        multiplies_ratio: whether the gradient of a token is a multiple of its ratio, so that a weight for the same
            ratio would count it twice.
        reads_ratio: whether the loss depends on the ratio at all; if not, it does not correct for stale samples.
        reads_ratio_type: whether the loss takes the ratio of a token, which `ratio_type` can replace.
        needs_weights: whether the weights of `correction` are part of the loss, so that they are on by default.
    """

    ratio_base: Literal["behavior", "proximal", "auto"]
    multiplies_ratio: bool
    reads_ratio: bool
    reads_ratio_type: bool
    needs_weights: bool


PG_VARIANTS: dict[str, VariantTraits] = {
    # ratio_base, multiplies_ratio, reads_ratio, reads_ratio_type, needs_weights
    "ppo": VariantTraits("auto", True, True, True, False),
    "vanilla": VariantTraits("auto", False, False, False, False),
    "tis": VariantTraits("behavior", True, True, True, False),
    "topr": VariantTraits("behavior", True, True, True, False),
    "cispo": VariantTraits("behavior", True, True, True, False),
    "kimi15": VariantTraits("behavior", False, True, True, False),
    "gspo": VariantTraits("auto", True, True, False, False),
    "geo_mean": VariantTraits("auto", True, True, False, False),
    "sapo": VariantTraits("auto", True, True, True, False),
    "dppo_tv": VariantTraits("behavior", True, True, False, False),
    "dppo_kl": VariantTraits("behavior", True, True, False, False),
    "decoupled_ppo": VariantTraits("proximal", True, True, True, True),
}
"""Values of `pg_variant`. A variant consists of its line here, its keys in `PolicyOptions`, its function in
`roll/algorithms/policy_losses.py` and its row in docs/algorithms.md; `tests/algorithms/test_variants.py` compares
them."""


def traits_of(pg_variant: str) -> VariantTraits:
    """The traits of a variant; those of ppo for an unknown one, which the rules report."""
    return PG_VARIANTS.get(pg_variant, PG_VARIANTS["ppo"])


def _names(base: str) -> str:
    """The variants whose ratio has this base, for help texts."""
    names = [name for name, traits in PG_VARIANTS.items() if traits.ratio_base == base]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def pg_variants(*names: str) -> Condition:
    """The condition of keys that belong to these values of `actor_train.pg_variant`."""
    return Condition(
        lambda config, _: config.actor_train.pg_variant in names,
        f"it belongs to actor_train.pg_variant {' or '.join(names)}",
        ("actor_train.pg_variant",),
        variants=names,
    )


def estimators(*names: str, reason: str, is_error: bool = False) -> Condition:
    """The condition of keys that only these values of `adv_estimator` read."""
    return Condition(lambda config, _: config.adv_estimator in names, reason, ("adv_estimator",), is_error)


def not_estimators(*names: str, reason: str) -> Condition:
    """The condition of keys that these values of `adv_estimator` do not read."""
    return Condition(lambda config, _: config.adv_estimator not in names, reason, ("adv_estimator",))


PPO = pg_variants("ppo", "decoupled_ppo")
GSPO = pg_variants("gspo")
GEO_MEAN = pg_variants("geo_mean")
SAPO = pg_variants("sapo")
TIS = pg_variants("tis")
TOPR = pg_variants("topr")
CISPO = pg_variants("cispo")
KIMI15 = pg_variants("kimi15")

KL_LOSS = needs("use_kl_loss", "use_kl_loss is false; set it to true")
KL_REWARD = needs("add_token_level_kl", "add_token_level_kl is false; set it to true")
WEIGHTED = needs(
    "level", "correction.weights.level is null; set it to token, sequence, geometric or segment", is_error=True
)
REJECTING = needs("statistic", "correction.rejection.statistic is null; set it to k1, k2 or k3", is_error=True)
DIFFERING = needs("level", "correction.difference.level is null; set it, such as to token", is_error=True)
REJECTS = Condition(
    lambda config, correction: correction.rejects,
    "nothing is rejected; set correction.rejection, correction.difference, correction.veto_threshold or "
    "correction.weights.mode: mask",
    (
        "correction.rejection.statistic",
        "correction.difference.level",
        "correction.veto_threshold",
        "correction.weights.mode",
    ),
    is_error=True,
)
NORMALISED = estimators(
    "reinforce",
    reason="only adv_estimator reinforce reads it; the others define their own normalisation",
)


@dataclass
class WeightOptions:
    """Importance weights on the token loss."""

    level: Literal["token", "sequence", "geometric", "segment"] | None = option(
        None,
        "Ratio of a token, of the whole response, or its geometric mean over the response or over a turn (segment); "
        "null: no weights (token for decoupled_ppo).",
    )
    mode: Literal["clamp", "mask"] = option(
        "clamp",
        "What happens outside the bounds: the weight is clamped to them, or its tokens leave the loss.",
        only_for=WEIGHTED,
    )
    lower: float = option(0.0, "Smallest weight.", ge=0, only_for=WEIGHTED)
    upper: float = option(2.0, "Largest weight.", gt=0, only_for=WEIGHTED)


REJECTION_LEVELS = Literal["token", "segment-mean", "sequence-mean", "sequence-sum", "sequence-max"]


@dataclass
class RejectionOptions:
    """Tokens or responses left out of the loss because the sampling policy was too far away."""

    statistic: Literal["k1", "k2", "k3"] | None = option(
        None, "Of the log ratio l: k1 = l, k2 = l^2 / 2, k3 = e^l - 1 - l; null: nothing is rejected."
    )
    level: REJECTION_LEVELS = option(
        "token",
        "One token, the mean over its turn, or the mean, sum or extremes over the response; a turn or response leaves "
        "as a whole.",
        only_for=REJECTING,
    )
    lower: float | None = option(
        None, "Smallest value kept: a ratio for k1, nats for k2 and k3; null: no bound.", ge=0, only_for=REJECTING
    )
    upper: float | None = option(
        None, "Largest value kept, in the same units; null: no bound.", gt=0, only_for=REJECTING
    )


@dataclass
class DifferenceOptions:
    """Tokens, turns or responses left out because their probability changed by too much, however small the ratio."""

    level: REJECTION_LEVELS | None = option(
        None, "As in correction.rejection, for p - mu of a token; null: nothing is rejected."
    )
    lower: float | None = option(None, "Smallest value kept, such as -0.1; null: no bound.", le=0, only_for=DIFFERING)
    upper: float | None = option(None, "Largest value kept, such as 0.1; null: no bound.", ge=0, only_for=DIFFERING)


@dataclass
class CorrectionOptions:
    """Correction for the distance between the policy that sampled and the one that learns; off by default."""

    weights: WeightOptions = option(factory=WeightOptions, help="Importance weights on the token loss.")
    rejection: RejectionOptions = option(factory=RejectionOptions, help="Which tokens or responses are left out.")
    veto_threshold: float | None = option(
        None, "A response with any token ratio below this is left out of the loss, e.g. 1e-4.", gt=0
    )
    renormalize: bool = option(
        False, "Divide the loss by the tokens left after rejection instead of by all.", only_for=REJECTS
    )
    difference: DifferenceOptions = option(
        factory=DifferenceOptions,
        help="Which are left out by the difference of probabilities; combines with rejection.",
    )

    @property
    def weighted(self) -> bool:
        """Whether token losses have a weight."""
        return self.weights.level is not None

    @property
    def rejects(self) -> bool:
        """Whether tokens may be left out of the loss."""
        masks = self.weighted and self.weights.mode == "mask"
        return masks or any(
            given is not None for given in (self.rejection.statistic, self.difference.level, self.veto_threshold)
        )

    @property
    def rejects_segments(self) -> bool:
        """Whether whole turns may be left out."""
        return "segment-mean" in (self.difference.level, self.rejection.statistic and self.rejection.level)

    @property
    def active(self) -> bool:
        """Whether the loss differs from one without correction."""
        return self.weighted or self.rejects


@dataclass
class KLOptions:
    """KL to the reference, in the loss or in the token reward."""

    use_kl_loss: bool = option(False, "KL to the reference in the loss.")
    kl_loss_coef: float = option(0.0, "Its weight.", ge=0, only_for=KL_LOSS)
    kl_loss_type: Literal["k1", "k2", "k3", "abs"] = option(
        "k3", "Its estimator; k1 is refused, because its gradient is 0 on average.", only_for=KL_LOSS
    )
    add_token_level_kl: bool = option(False, "KL to the reference in the token reward.")
    init_kl_coef: float = option(0.0, "Its weight; with target_kl the first one.", ge=0, only_for=KL_REWARD)
    target_kl: float | None = option(
        None,
        "KL of the token reward in nats per token that its weight is steered to; null: a fixed weight.",
        gt=0,
        only_for=KL_REWARD,
    )
    kl_horizon: int = option(
        10000,
        "Samples over which that weight moves: the more, the slower.",
        ge=1,
        only_for=needs(
            "target_kl",
            "target_kl is null, so the weight of the KL is fixed",
            accepts=lambda target: target is not None,
        ),
    )
    kl_penalty: Literal["k1", "k2", "k3", "abs"] = option(
        "k1",
        "Its estimator: the log ratio k1, its half square k2, the unbiased positive k3, or the absolute log ratio.",
        only_for=KL_REWARD,
    )


@dataclass
class PolicyOptions(KLOptions):
    """The keys of the policy loss; `pg_variant` is a key of actor_train."""

    old_log_probs_source: Literal["auto", "behavior", "recompute"] = option(
        "auto",
        "Proximal log-probs: the engine's (no extra forward pass) or recomputed by the trainer; auto takes behavior "
        "in asynchronous training where nothing needs the others, else recompute.",
    )
    pg_ratio_base: Literal["auto", "behavior", "proximal"] = option(
        "auto",
        f"What the ratio of the policy loss is taken against; auto is behavior for {_names('behavior')}, "
        f"proximal for {_names('proximal')}, and follows old_log_probs_source for the others.",
    )
    correction: CorrectionOptions = option(
        factory=CorrectionOptions,
        help="Importance weights and rejection against the sampling policy, for any pg_variant.",
    )
    pg_clip_low: float = option(0.2, "Ratio clip below 1.", gt=0, le=1, only_for=PPO)
    pg_clip_high: float = option(0.2, "Ratio clip above 1.", gt=0, only_for=PPO)
    dual_clip_loss: bool = option(False, "Bound the loss of negative advantages.", only_for=PPO)
    dual_clip_c: float = option(
        3.0, "That bound in multiples of |A|.", gt=1, only_for=(PPO, needs("dual_clip_loss", "dual_clip_loss is false"))
    )
    gspo_clip_low: float = option(3e-4, "Clip below 1 of the response's mean ratio.", gt=0, le=1, only_for=GSPO)
    gspo_clip_high: float = option(4e-4, "Clip above 1 of the response's mean ratio.", gt=0, only_for=GSPO)
    geo_mean_clip_low: float = option(
        0.4, "Largest decrease of a token's log-prob that counts where A < 0, in nats.", gt=0, only_for=GEO_MEAN
    )
    geo_mean_clip_high: float = option(0.4, "Largest increase where A > 0, in nats.", gt=0, only_for=GEO_MEAN)
    sapo_tau_positive: float = option(
        1.0, "How fast the gradient falls with the distance of the ratio from 1 where A > 0.", gt=0, only_for=SAPO
    )
    sapo_tau_negative: float = option(1.05, "The same where A <= 0.", gt=0, only_for=SAPO)
    dppo_tv_threshold: float = option(
        0.15, "Largest change of a token's probability.", gt=0, le=1, only_for=pg_variants("dppo_tv")
    )
    dppo_kl_threshold: float = option(
        0.05,
        "Largest binary KL divergence, of the sampled token against all others, in nats.",
        gt=0,
        only_for=pg_variants("dppo_kl"),
    )
    tis_lower_bound: float = option(0.0, "Smallest weight.", ge=0, only_for=TIS)
    tis_upper_bound: float = option(1.0, "Largest weight.", gt=0, only_for=TIS)
    topr_positive_weight: float = option(1.0, "Weight of responses with a score above 0.", ge=0, only_for=TOPR)
    topr_negative_weight: float = option(1.0, "Weight of the others.", ge=0, only_for=TOPR)
    topr_level: Literal["token", "sequence"] = option(
        "token", "The ratio of a token, or of the whole response (the paper's form).", only_for=TOPR
    )
    cispo_epsilon_low: float = option(
        0.1, "The weight is at least 1 minus this; 1 or more leaves it unbounded below.", gt=0, only_for=CISPO
    )
    cispo_epsilon_high: float = option(0.1, "The weight is at most 1 plus this.", gt=0, only_for=CISPO)
    cispo_use_unified_mask: bool = option(
        False, "Leave out tokens that ppo would clip: ratio too high with A > 0, too low with A < 0.", only_for=CISPO
    )
    kimi15_tau: float = option(0.1, "Weight of half the squared log ratio.", gt=0, only_for=KIMI15)
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        option("seq-mean-token-mean", "How token losses become one number.")
    )
    entropy_loss_coef: float = option(0.0, "Weight of the entropy bonus.", ge=0)


@dataclass
class AdvantageOptions:
    """The keys of the advantages."""

    adv_estimator: str = option("grpo", "Advantage estimator; see docs/algorithms.md for the known ones.")
    grpo_norm_by_std: bool = option(
        True,
        "Divide by the group's standard deviation; false is Dr. GRPO.",
        only_for=estimators("grpo", reason="adv_estimator is not grpo"),
    )
    pass_k: int = option(
        4,
        "k of pass@k: the best of k responses counts; below num_return_sequences_in_group.",
        ge=1,
        only_for=estimators("pass_at_k", reason="adv_estimator is not pass_at_k"),
    )
    norm_mean_type: Literal["batch", "group"] | None = option(
        None, "Subtract this mean from scores (reinforce).", only_for=NORMALISED
    )
    norm_std_type: Literal["batch", "group"] | None = option(
        None, "Divide scores by this deviation (reinforce).", only_for=NORMALISED
    )
    gamma: float = option(
        1.0,
        "Discount of the return to go.",
        ge=0,
        le=1,
        only_for=not_estimators(
            *GROUP_ESTIMATORS, reason="this adv_estimator gives every token of a response the same advantage"
        ),
    )
    overlong_buffer_len: int | None = option(
        None,
        "Last tokens of response_length over which a response loses up to overlong_penalty_factor of its score (DAPO).",
        ge=1,
        only_for=Condition(lambda config, _: config.pipeline == "rlvr", "it belongs to pipeline rlvr", ("pipeline",)),
    )
    overlong_penalty_factor: float = option(
        1.0,
        "That loss for a response of response_length.",
        gt=0,
        only_for=needs("overlong_buffer_len", "overlong_buffer_len is null", accepts=lambda length: length is not None),
    )
    reward_clip: float | None = option(None, "Clip scores to +- this.", gt=0)
    advantage_clip: float | None = option(None, "Clip advantages to +- this.", gt=0)
    whiten_rewards: bool = option(False, "Zero mean and unit variance of scores over the batch.")
    whiten_advantages: bool = option(
        False,
        "Zero mean and unit variance of advantages over the batch's tokens.",
        only_for=not_estimators(*WHITENING_ESTIMATORS, reason="this adv_estimator always whitens its advantages"),
    )


DIFFICULTY = needs("difficulty_mask", "difficulty_mask is false; set it to true")


@dataclass
class SampleMaskOptions:
    """Which samples of a batch are left out of the loss; their scores still count in the statistics of advantages."""

    max_len_mask: bool = option(
        False, "Leave responses out of the loss that were cut at their length, and trajectories at sequence_length."
    )
    difficulty_mask: bool = option(
        False, "Leave groups out of the loss whose mean score is not between the two thresholds."
    )
    difficulty_low_threshold: float = option(
        0.0, "Groups with this mean score or less are too difficult.", only_for=DIFFICULTY
    )
    difficulty_high_threshold: float = option(
        1.0, "Groups with this mean score or more are too easy.", only_for=DIFFICULTY
    )


VARIANT_KEYS: dict[str, tuple[str, ...]] = {
    item.name: condition.variants
    for item in fields(PolicyOptions)
    for condition in item.metadata["only_for"]
    if condition.variants
}
"""Key -> the values of `pg_variant` that read it."""


def options_of(cls: type, config: Any) -> dict[str, Any]:
    """Values of the fields of `cls`, the settings of one part of a run, that the configuration has too."""
    return {item.name: getattr(config, item.name) for item in fields(cls) if hasattr(config, item.name)}


def proximal_source(options: PolicyOptions, pg_variant: str, async_generation_ratio: float) -> str:
    """`old_log_probs_source` without auto: behavior or recompute.

    Stale samples need no recomputed log-probs unless the proximal policy must differ from the sampling one: for a
    variant or base that requires it, for weights in addition to a ratio that would otherwise be the same, or for
    denominators that must be known before the loss.
    """
    if options.old_log_probs_source != "auto":
        return options.old_log_probs_source
    traits = traits_of(pg_variant)
    weighted = options.correction.weighted and traits.ratio_base == "auto" and traits.multiplies_ratio
    proximal = traits.ratio_base == "proximal" or options.pg_ratio_base == "proximal"
    needed = proximal or weighted or options.correction.renormalize
    return "behavior" if async_generation_ratio > 0 and not needed else "recompute"


def ratio_base(options: PolicyOptions, pg_variant: str, source: str) -> str:
    """`pg_ratio_base` without auto: behavior or proximal, given the source of the proximal log-probs."""
    if options.pg_ratio_base != "auto":
        return options.pg_ratio_base
    base = traits_of(pg_variant).ratio_base
    if base == "auto":
        return "behavior" if source == "behavior" else "proximal"
    return base

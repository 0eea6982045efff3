"""The policy loss and its KL terms, and losses of preferences; corrections and advantages have files of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from roll.base.schema import Condition, needs, option
from roll.configs.correction import CorrectionOptions

if TYPE_CHECKING:
    from roll.configs.pipeline import RLConfig


@dataclass(frozen=True)
class VariantTraits:
    """What the rules of the configuration need to know of a policy loss; the defaults are the traits of PPO.

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
    multiplies_ratio: bool = True
    reads_ratio: bool = True
    reads_ratio_type: bool = True
    needs_weights: bool = False


VARIANT_TRAITS: dict[str, VariantTraits] = {
    "ppo": VariantTraits("auto"),
    "vanilla": VariantTraits("auto", multiplies_ratio=False, reads_ratio=False, reads_ratio_type=False),
    "tis": VariantTraits("behavior"),
    "topr": VariantTraits("behavior"),
    "cispo": VariantTraits("behavior"),
    "kimi15": VariantTraits("behavior", multiplies_ratio=False),
    "gspo": VariantTraits("auto", reads_ratio_type=False),
    "geo_mean": VariantTraits("auto", reads_ratio_type=False),
    "sapo": VariantTraits("auto"),
    "dppo_tv": VariantTraits("behavior", reads_ratio_type=False),
    "dppo_kl": VariantTraits("behavior", reads_ratio_type=False),
    "decoupled_ppo": VariantTraits("proximal", needs_weights=True),
    "clip_cov": VariantTraits("auto"),
    "kl_cov": VariantTraits("auto"),
}
"""Values of `pg_variant`. To add one, `mine`:

1. its entry here, which the rules of the configuration read;
2. its function in `roll/algorithms/policy_losses.py`, registered with `@PG_VARIANTS.register("mine")`;
3. its keys, if it has any: in `PolicyOptions` below with `only_for=pg_variants("mine")`; the function reads them from
   its `config`. A value outside of its range in `roll/configs/rules/ranges.py` is warned of;
4. its row in the table of docs/algorithms.md, Policy loss;
5. its recipe `mine.yaml` in `examples/algorithms`, the row of the recipe in the README.md of that folder, its page
   `mine.md` in `docs/recipes` and its runs in results.json of that folder, and its name in the README.md of the
   project;
6. its formula in `tests/algorithms/test_policy_losses.py`, and `make docs` for docs/configuration.md.

`tests/algorithms/test_variants.py` compares 1, 2 and 4, `tests/examples/test_algorithm_recipes.py` and
`tests/examples/test_recipe_pages.py` require 5."""


COVARIANCE_VARIANTS = ("clip_cov", "kl_cov")
"""Variants that treat tokens of high covariance between log-prob and advantage differently."""

PART = r"\s*([0-9]\S*)\s+([A-Za-z_]\w*)\s*"
"""One part of a mixture of losses: its weight and its name."""

MIXTURE = re.compile(rf"{PART}(?:\+{PART})*")


def parse_pg_variant(value: Any) -> str:
    """A name, or a mixture as `0.5 ppo + 0.5 topr`; also given as a mapping of names to weights.

    Raises:
        ValueError: it is neither, or a weight is not a number from 1e-6 to 1e6.
    """
    if isinstance(value, Mapping):
        for name, weight in value.items():
            if not re.fullmatch(r"[A-Za-z_]\w*", str(name)):
                raise ValueError(f"{name!r} is not the name of a loss")
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 1e-6 <= weight <= 1e6:
                raise ValueError(f"weight {weight!r} of {name} is not a number from 1e-6 to 1e6")
        if not value:
            raise ValueError("has no loss; write its name, or names with weights such as {ppo: 0.5, topr: 0.5}")
        return " + ".join(f"{_shortest(weight)} {name}" for name, weight in value.items())
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not the name of a loss, or names with weights such as {{ppo: 0.5, topr: 0.5}}")
    if not MIXTURE.fullmatch(value):
        return value
    parts = re.findall(PART, value)
    if len({name for _, name in parts}) < len(parts):
        raise ValueError(f"{value!r} has a loss twice; add up its weights")
    try:
        return parse_pg_variant({name: float(weight) for weight, name in parts})
    except ValueError as error:
        raise ValueError(f"{value!r}: {error}") from None


def _shortest(weight: float) -> str:
    """The shortest text of the same number."""
    return f"{weight:g}" if float(f"{weight:g}") == weight else repr(weight)


def losses_of(pg_variant: str) -> dict[str, float]:
    """Names and weights of the losses of a parsed `pg_variant`: of one with weight 1, or of a mixture."""
    if MIXTURE.fullmatch(pg_variant):
        return {name: float(weight) for weight, name in re.findall(PART, pg_variant)}
    return {pg_variant: 1.0}


def traits_of(pg_variant: str) -> VariantTraits:
    """The traits of a variant; those of ppo for an unknown one, which the rules report.

    A mixture reads a ratio if all its losses do, and has every other trait that one of them has. Its base is proximal
    or behavior if that of one loss is.
    """
    known = [VARIANT_TRAITS.get(name, VARIANT_TRAITS["ppo"]) for name in losses_of(pg_variant)]
    if len(known) == 1:
        return known[0]
    bases: set[Literal["behavior", "proximal", "auto"]] = {traits.ratio_base for traits in known}
    return VariantTraits(
        ratio_base="proximal" if "proximal" in bases else "behavior" if "behavior" in bases else "auto",
        multiplies_ratio=any(traits.multiplies_ratio for traits in known),
        reads_ratio=all(traits.reads_ratio for traits in known),
        reads_ratio_type=any(traits.reads_ratio_type for traits in known),
        needs_weights=any(traits.needs_weights for traits in known),
    )


def _names(base: str) -> str:
    """The variants whose ratio has this base, for help texts."""
    names = [name for name, traits in VARIANT_TRAITS.items() if traits.ratio_base == base]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def pg_variants(*names: str) -> Condition:
    """The condition of keys that belong to these values of `actor_train.pg_variant`."""
    return Condition(
        lambda config, _: any(name in names for name in losses_of(config.actor_train.pg_variant)),
        f"it belongs to actor_train.pg_variant {' or '.join(names)}",
        ("actor_train.pg_variant",),
        variants=names,
    )


PPO = pg_variants("ppo", "decoupled_ppo", "clip_cov")
CLIP_COV = pg_variants("clip_cov")
KL_COV = pg_variants("kl_cov")
GSPO = pg_variants("gspo")
GEO_MEAN = pg_variants("geo_mean")
SAPO = pg_variants("sapo")
TIS = pg_variants("tis")
TOPR = pg_variants("topr")
CISPO = pg_variants("cispo")
KIMI15 = pg_variants("kimi15")

KL_LOSS = needs("use_kl_loss", "use_kl_loss is false; set it to true")
KL_REWARD = needs("add_token_level_kl", "add_token_level_kl is false; set it to true")


@dataclass
class KLOptions:
    """KL to the reference, in the loss or in the token reward."""

    use_kl_loss: bool = option(False, "KL to the reference in the loss.")
    kl_loss_coef: float = option(0.0, "Weight of the KL in the loss; 0 is off.", ge=0, only_for=KL_LOSS)
    kl_loss_type: Literal["k1", "k2", "k3", "abs"] = option(
        "k3", "Estimator of the KL in the loss; k1 is refused, because its gradient is 0 on average.", only_for=KL_LOSS
    )
    add_token_level_kl: bool = option(False, "KL to the reference in the token reward.")
    init_kl_coef: float = option(
        0.0, "Weight of the KL in the token reward; with target_kl the first; 0 is off.", ge=0, only_for=KL_REWARD
    )
    target_kl: float | None = option(
        None,
        "Target of the KL in the token reward, in nats per token, for an adaptive weight; null: a fixed weight.",
        gt=0,
        only_for=KL_REWARD,
    )
    kl_horizon: int = option(
        10000,
        "Samples over which the adaptive weight of the KL moves: the more, the slower.",
        ge=1,
        only_for=needs(
            "target_kl",
            "target_kl is null, so the weight of the KL is fixed",
            accepts=lambda target: target is not None,
        ),
    )
    kl_penalty: Literal["k1", "k2", "k3", "abs"] = option(
        "k1",
        "Estimator of the KL in the token reward: the log ratio k1, its half square k2, the unbiased positive k3, or "
        "the absolute log ratio.",
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
        f"Denominator of the ratio of the policy loss; auto is behavior for {_names('behavior')}, "
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
        3.0,
        "Bound of dual_clip_loss in multiples of |A|.",
        gt=1,
        only_for=(PPO, needs("dual_clip_loss", "dual_clip_loss is false")),
    )
    gspo_clip_low: float = option(3e-4, "Clip below 1 of the response's mean ratio.", gt=0, le=1, only_for=GSPO)
    gspo_clip_high: float = option(4e-4, "Clip above 1 of the response's mean ratio.", gt=0, only_for=GSPO)
    geo_mean_clip_low: float = option(
        0.4, "Largest decrease of a token's log-prob that counts where A < 0, in nats.", gt=0, only_for=GEO_MEAN
    )
    geo_mean_clip_high: float = option(
        0.4, "Largest increase of a token's log-prob that counts where A > 0, in nats.", gt=0, only_for=GEO_MEAN
    )
    sapo_tau_positive: float = option(
        1.0, "How fast the gradient falls with the distance of the ratio from 1 where A > 0.", gt=0, only_for=SAPO
    )
    sapo_tau_negative: float = option(1.05, "As sapo_tau_positive, where A <= 0.", gt=0, only_for=SAPO)
    dppo_tv_threshold: float = option(
        0.15, "Largest change of a token's probability.", gt=0, le=1, only_for=pg_variants("dppo_tv")
    )
    dppo_kl_threshold: float = option(
        0.05,
        "Largest binary KL divergence, of the sampled token against all others, in nats.",
        gt=0,
        only_for=pg_variants("dppo_kl"),
    )
    clip_cov_ratio: float = option(
        2e-4, "Share of the response tokens that lose their gradient.", gt=0, le=1, only_for=CLIP_COV
    )
    clip_cov_lower: float = option(
        1.0, "Smallest covariance of log-prob and advantage of tokens that may lose their gradient.", only_for=CLIP_COV
    )
    clip_cov_upper: float = option(
        5.0, "Largest covariance of log-prob and advantage of these tokens.", only_for=CLIP_COV
    )
    kl_cov_ratio: float = option(
        2e-4,
        "Share of the response tokens, those of the highest covariance, that get a KL penalty.",
        gt=0,
        le=1,
        only_for=KL_COV,
    )
    kl_cov_coef: float = option(1.0, "Weight of the KL penalty of these tokens.", gt=0, only_for=KL_COV)
    tis_lower_bound: float = option(0.0, "Smallest weight.", ge=0, only_for=TIS)
    tis_upper_bound: float = option(1.0, "Largest weight.", gt=0, only_for=TIS)
    topr_positive_weight: float = option(1.0, "Weight of responses with a score above 0.", ge=0, only_for=TOPR)
    topr_negative_weight: float = option(1.0, "Weight of the other responses.", ge=0, only_for=TOPR)
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
    entropy_loss_coef: float = option(0.0, "Weight of the entropy bonus; 0 is off.", ge=0)


@dataclass
class DPOOptions:
    """The keys of the preference loss of pipeline dpo."""

    beta: float = option(
        0.1, "Penalty of the distance to the reference: a smaller value lets the policy move further.", gt=0
    )
    dpo_loss_type: Literal["sigmoid", "hinge", "ipo", "kto_pair"] = option(
        "sigmoid", "Loss of a pair of responses; see docs/algorithms.md. kto_pair needs one more forward pass per step."
    )
    label_smoothing: float = option(
        0.0,
        "Assumed share of pairs whose two responses are swapped; 0 is off.",
        ge=0,
        le=0.5,
        only_for=needs("dpo_loss_type", "only dpo_loss_type sigmoid reads it", accepts=lambda kind: kind == "sigmoid"),
    )
    length_normalized: bool = option(False, "A response counts with the mean over its tokens instead of the sum.")
    sft_loss_coef: float = option(
        0.0, "Weight of the likelihood of the better responses, which DPO alone lets fall; 0 is off.", ge=0
    )


@dataclass
class RewardModelOptions:
    """The keys of the loss of pipeline reward_model."""

    center_rewards_coefficient: float | None = option(
        None,
        "Weight of the mean of (chosen reward + rejected reward)^2, which keeps rewards around 0, such as 0.01; null "
        "or 0: off.",
        ge=0,
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


def needs_old_log_probs(config: RLConfig) -> bool:
    """Whether something reads the old log-probs of a batch before its training pass.

    Such are a KL term in the reward, a teacher, an estimator of the optimal baseline, what a correction decides over
    the whole batch, samples that are left out of the loss (metrics count them too), and losses of chosen tokens.
    """
    rewards = config.add_token_level_kl or config.uses_teacher or config.uses_sum_pi_squared
    whole_batch = config.correction.renormalize or config.correction.reads_batch
    masks = config.max_len_mask or config.difficulty_mask
    chosen_tokens = set(COVARIANCE_VARIANTS) & set(losses_of(config.actor_train.pg_variant))
    return bool(rewards or whole_batch or masks or chosen_tokens)


def training_gives_old_log_probs(config: RLConfig) -> bool:
    """Whether the first optimizer step of a batch gives the old log-probs of its samples, from a run's second step on.

    Before that optimizer step the old policy is the current one. False where something reads old log-probs earlier, or
    where those of the engine are taken.
    """
    return config.old_log_probs_source != "behavior" and not needs_old_log_probs(config)


def samples_with_own_pass(config: RLConfig) -> int:
    """Samples of a batch, masked ones too, whose old log-probs take a pass of their own from a run's second step on."""
    if config.old_log_probs_source == "behavior":
        return 0
    given = config.actor_train.samples_per_optimizer_step if training_gives_old_log_probs(config) else 0
    return config.filled_samples_per_batch - given


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
    needed = proximal or weighted or options.correction.renormalize or options.correction.reads_batch
    return "behavior" if async_generation_ratio > 0 and not needed else "recompute"


def ratio_base(options: PolicyOptions, pg_variant: str, source: str) -> str:
    """`pg_ratio_base` without auto: behavior or proximal, given the source of the proximal log-probs."""
    if options.pg_ratio_base != "auto":
        return options.pg_ratio_base
    base, correction = traits_of(pg_variant).ratio_base, options.correction
    if base == "auto":
        m2 = correction.m2_threshold is not None and not correction.weighted  # bounds the ratio to the sampling policy
        return "behavior" if source == "behavior" or m2 else "proximal"
    return base

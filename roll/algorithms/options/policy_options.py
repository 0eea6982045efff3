"""The keys of the policy loss and of its KL terms; a loss declares its own beside its formula (`policy_loss`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from roll.algorithms.distillation import DistillationOptions
from roll.algorithms.estimators import ADV_ESTIMATORS
from roll.algorithms.lazy_torch import Tensor
from roll.algorithms.options.correction_options import CorrectionOptions
from roll.algorithms.policy_loss import POLICY_LOSSES, PolicyLoss
from roll.algorithms.registry import UserOptions
from roll.base.custom_modules import load_custom_modules
from roll.base.errors import Finding, error, warning
from roll.base.schema import Condition, combined, needs, option
from roll.base.text import check_known

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


def known_losses(pg_variant: str) -> list[PolicyLoss]:
    """The losses of a parsed `pg_variant`, without unknown names, which the rules report."""
    return [POLICY_LOSSES[name] for name in losses_of(pg_variant) if name in POLICY_LOSSES]


def traits_of(pg_variant: str) -> PolicyLoss:
    """The traits of a variant; those of ppo for an unknown one.

    A mixture reads a ratio if all its losses do, and has every other trait that one of them has. Its base is proximal
    or behavior if that of one loss is.
    """
    known = known_losses(pg_variant) or [POLICY_LOSSES["ppo"]]
    if len(known) == 1:
        return known[0]
    bases = {loss.ratio_base for loss in known}
    return replace(
        known[0],
        ratio_base="proximal" if "proximal" in bases else "behavior" if "behavior" in bases else "auto",
        multiplies_ratio=any(loss.multiplies_ratio for loss in known),
        reads_ratio=all(loss.reads_ratio for loss in known),
        reads_ratio_type=any(loss.reads_ratio_type for loss in known),
        needs_weights=any(loss.needs_weights for loss in known),
    )


def _names(base: str) -> str:
    """The losses whose ratio has this base, for help texts."""
    names = [name for name, loss in POLICY_LOSSES.items() if loss.ratio_base == base]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def pg_variants(*names: str) -> Condition:
    """The condition of keys that belong to these values of `actor_train.pg_variant`."""
    return Condition(
        lambda config, _: any(name in names for name in losses_of(config.actor_train.pg_variant)),
        f"it belongs to actor_train.pg_variant {' or '.join(names)}",
        ("actor_train.pg_variant",),
        variants=names,
    )


if TYPE_CHECKING:

    class LossOptions:
        """The keys of all policy losses; each loss reads its own."""

else:
    LossOptions = combined("LossOptions", {name: each.options for name, each in POLICY_LOSSES.items()}, pg_variants)

KL_LOSS = needs("use_kl_loss", "use_kl_loss is false; set it to true")


@dataclass
class KLLossOptions:
    """KL to the reference in the loss."""

    use_kl_loss: bool = option(False, "KL to the reference in the loss.")
    kl_loss_coef: float = option(
        0.0, "Weight of the KL in the loss; 0 is off.", ge=0, usual=(1e-8, 100.0), only_for=KL_LOSS
    )
    kl_loss_type: Literal["k1", "k2", "k3", "abs"] = option(
        "k3", "Estimator of the KL in the loss; k1 is refused, because its gradient is 0 on average.", only_for=KL_LOSS
    )


@dataclass
class PolicyOptions(LossOptions, KLLossOptions):
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
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        option("seq-mean-token-mean", "How token losses become one number.")
    )
    entropy_loss_coef: float = option(0.0, "Weight of the entropy bonus; 0 is off.", ge=0, usual=(1e-8, 10.0))


VARIANT_KEYS: dict[str, tuple[str, ...]] = {
    item.name: condition.variants
    for item in fields(PolicyOptions)
    for condition in item.metadata["only_for"]
    if condition.variants
}
"""Key -> the values of `pg_variant` that read it."""


@dataclass
class RatioOptions:
    """The key of the ratio that only trajectories of several turns have; other runs use the default."""

    ratio_type: Literal["token", "segment", "sequence"] = option(
        "token",
        "The ratio of the policy loss: a token's own, or that of the mean over its turn or over its sample.",
        only_for=Condition(
            lambda config, _: traits_of(config.actor_train.pg_variant).reads_ratio_type,
            "this actor_train.pg_variant has no ratio, or always that of the sequence",
            ("actor_train.pg_variant",),
        ),
    )


@dataclass
class PolicySettings(UserOptions, DistillationOptions, PolicyOptions, RatioOptions):
    """Settings of the `policy` loss, `RLConfig.policy`; every `auto` is resolved.

    The driver sends it to every training rank, so it must be picklable.

    Attributes:
        pg_variant: name of a policy loss, or a mixture of several.
        p99_logprob_mismatch: key of RL runs; tokens whose log ratio is larger are counted in a metric.
        first_step: this is the first optimizer step of the batch, and log p was not computed before: it is log pi.
    """

    old_log_probs_source: Literal["auto", "behavior", "recompute"] = "recompute"
    pg_ratio_base: Literal["auto", "behavior", "proximal"] = "proximal"
    pg_variant: str = field(kw_only=True)
    p99_logprob_mismatch: float | None = None
    first_step: bool = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In the process of a rank, the losses of the user are registered by their modules."""
        load_custom_modules()
        self.__dict__.update(state)

    def chosen_tokens(self, log_probs: Tensor, advantages: Tensor, response_mask: Tensor, seed: int) -> Tensor | None:
        """The tokens [B, T] bool that a loss treats differently, for any log p, advantages and mask [B, T].

        None where no loss chooses some; of several, the choice of the first.
        """
        for loss in known_losses(self.pg_variant):
            if loss.choose is not None:
                return loss.choose(log_probs, advantages, response_mask.bool(), self.options_of(loss), seed)
        return None

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


def check_policy(config: Any) -> Iterator[Finding]:
    """The losses are known and fit together, nothing is counted twice, and stale samples are corrected."""
    path, losses = "actor_train.pg_variant", known_losses(config.actor_train.pg_variant)
    for name in losses_of(config.actor_train.pg_variant):
        yield from check_known(path, name, POLICY_LOSSES, {"adv_estimator": ADV_ESTIMATORS})
    choosing = [loss.name for loss in losses if loss.choose]
    if len(choosing) > 1:
        yield error(path, f"{' and '.join(choosing)} cannot be mixed with each other; keep one of them")
    for loss in losses:
        if loss.check is not None:
            yield from loss.check(config.policy.options_of(loss), config)
    if config.use_kl_loss and config.kl_loss_type == "k1":
        yield error(
            "kl_loss_type", "k1 in a loss has a gradient of 0 on average; use k3 or k2, or put the KL in the reward"
        )
    if config.use_kl_loss and config.kl_loss_coef == 0:
        yield error("kl_loss_coef", "0 turns off the KL that use_kl_loss requires; use a weight such as 0.001")
    if config.old_log_probs_source == "behavior" and config.async_generation_ratio == 0:
        yield warning(
            "old_log_probs_source",
            "behavior in synchronous training uses the engine's log-probs instead of the trainer's, so the first ratio "
            "is not exactly 1; auto recomputes them",
        )
    yield from _check_base(config)
    yield from _check_counted_once(config)
    if config.async_generation_ratio > 0:
        yield from _check_corrected(config)


def _check_base(config: Any) -> Iterator[Finding]:
    variant = config.actor_train.pg_variant
    needs_proximal = traits_of(variant).ratio_base == "proximal"
    needs_behavior = [name for name in losses_of(variant) if traits_of(name).ratio_base == "behavior"]
    if needs_proximal and needs_behavior:
        yield error(
            "actor_train.pg_variant",
            f"{variant}: the losses of a mixture have one base of the ratio, and that of {needs_behavior[0]} is the "
            "sampling policy; use ppo instead of decoupled_ppo, or leave the others out",
        )
    if needs_proximal and config.pg_ratio_base == "behavior":
        yield error(
            "pg_ratio_base",
            f"behavior leaves {variant} without its proximal policy; leave it out, or use pg_variant ppo",
        )
    if config.old_log_probs_source != "behavior":
        return
    if needs_proximal:
        yield error(
            "old_log_probs_source",
            f"behavior makes the proximal policy of {variant} the sampling one, so its weights are 1; leave it out, "
            "or use pg_variant ppo",
        )
    elif config.pg_ratio_base == "proximal":
        yield error(
            "pg_ratio_base",
            "proximal needs a proximal policy, but old_log_probs_source is behavior; set that to recompute, or leave "
            "pg_ratio_base out",
        )


def _check_counted_once(config: Any) -> Iterator[Finding]:
    variant, weights = config.actor_train.pg_variant, config.correction.weights
    traits = traits_of(variant)
    if traits.ratio_base == "proximal" or not traits.multiplies_ratio:
        return
    if not config.correction.weighted or config.pg_ratio_base != "behavior":
        return
    yield error(
        "correction.weights.level",
        f"{weights.level} would count the distance to the sampling policy twice: the ratio of {variant} is "
        "already taken against it; leave correction.weights out, or set pg_ratio_base: proximal and "
        "old_log_probs_source: recompute",
    )


def _check_corrected(config: Any) -> Iterator[Finding]:
    """Stale samples need a ratio against the sampling policy or weights for it, unless explicitly allowed without."""
    variant = config.actor_train.pg_variant
    if config.correction.weighted:
        return
    reads_ratio = traits_of(variant).reads_ratio
    if not reads_ratio and "actor_train.pg_variant" in config.source.given:
        yield warning(
            "actor_train.pg_variant",
            f"{variant} does not correct for the age of samples; ppo and tis do, and {variant} does with "
            "correction.weights.level: token",
        )
        return
    if config.pg_ratio_base == "behavior" and reads_ratio:
        return
    path = "pg_ratio_base" if "pg_ratio_base" in config.source.given else "old_log_probs_source"
    message = (
        f"{getattr(config, path)} with async_generation_ratio {config.async_generation_ratio:g} computes the ratio of "
        f"{variant} against the policy just before the update, not against the older one that sampled"
    )
    if config.allow_uncorrected_off_policy:
        yield warning(path, f"{message}; allowed by allow_uncorrected_off_policy")
    else:
        yield error(
            path,
            f"{message}; leave it out, or correct with actor_train.pg_variant: decoupled_ppo or "
            "correction.weights.level: token, or set allow_uncorrected_off_policy: true",
        )

"""The keys of the off-policy correction: weights and rejection for the distance to the policy that sampled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from roll.base.errors import Finding, error, warning
from roll.base.schema import Condition, check_order, needs, option, value_at

WEIGHTED = needs(
    "level", "correction.weights.level is null; set it to token, sequence, geometric or segment", is_error=True
)
REJECTING = needs("statistic", "its statistic is null; set that to k1, k2 or k3", is_error=True)
DIFFERING = needs("level", "correction.difference.level is null; set it, such as to token", is_error=True)
REJECTS = Condition(
    lambda config, correction: correction.rejects,
    "nothing is rejected; set correction.rejection, correction.difference, correction.veto_threshold, "
    "correction.m2_threshold or correction.weights.mode: mask",
    (
        "correction.rejection.statistic",
        "correction.difference.level",
        "correction.veto_threshold",
        "correction.m2_threshold",
        "correction.weights.mode",
    ),
    is_error=True,
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
    upper: float = option(2.0, "Largest weight.", gt=0, usual=(0.0, 1e6), only_for=WEIGHTED)
    normalize: bool = option(
        False,
        "Divide the weights by their mean over the tokens of the batch, with level sequence over its responses.",
        only_for=WEIGHTED,
    )


REJECTION_LEVELS = Literal["token", "segment-mean", "sequence-mean", "sequence-sum", "sequence-max"]


@dataclass
class RejectionOptions:
    """Tokens or responses left out of the loss because the sampling policy was too far away."""

    statistic: Literal["k1", "k2", "k3"] | None = option(
        None, "Statistic of the log ratio l: k1 = l, k2 = l^2 / 2, k3 = e^l - 1 - l; null: nothing is rejected."
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
        None, "Largest value kept, in the same units; null: no bound.", gt=0, usual=(0.0, 1e6), only_for=REJECTING
    )


@dataclass
class DifferenceOptions:
    """Tokens, turns or responses left out because their probability changed by too much, however small the ratio."""

    level: REJECTION_LEVELS | None = option(
        None, "As in correction.rejection, for p - mu of a token; null: nothing is rejected."
    )
    lower: float | None = option(None, "Smallest value kept, such as -0.1; null: no bound.", le=0, only_for=DIFFERING)
    upper: float | None = option(
        None, "Largest value kept, such as 0.1; null: no bound.", ge=0, usual=(0.0, 1e6), only_for=DIFFERING
    )


@dataclass
class CorrectionOptions:
    """Correction for the distance between the policy that sampled and the one that learns; off by default."""

    weights: WeightOptions = option(factory=WeightOptions, help="Importance weights on the token loss.")
    rejection: RejectionOptions = option(factory=RejectionOptions, help="Which tokens or responses are left out.")
    veto_threshold: float | None = option(
        None, "A response with any token ratio below this is left out of the loss, e.g. 1e-4.", gt=0, usual=(0.0, 0.9)
    )
    renormalize: bool = option(
        False, "Divide the loss by the tokens left after rejection instead of by all.", only_for=REJECTS
    )
    m2_threshold: float | None = option(
        None,
        "M2PO: tokens of the largest squared log ratio are left out until the mean of the others is at most this, such "
        "as 0.04.",
        gt=0,
        usual=(1e-6, 1e4),
    )
    opsm_delta: float | None = option(
        None,
        "OPSM: tokens of negative advantage are left out where the policy finds their response less likely than the "
        "one that sampled did, by more than this mean log ratio in nats: 1e-4 in fp32, 1e-2 or more in half precision.",
        ge=0,
        usual=(0.0, 1e4),
    )
    difference: DifferenceOptions = option(
        factory=DifferenceOptions,
        help="Which are left out by the difference of probabilities; combines with rejection.",
    )
    rejections: dict[str, RejectionOptions] = option(
        factory=dict, help="Further ones, by names of your choice: what is kept has to be kept by all."
    )

    @property
    def all_rejections(self) -> dict[str, RejectionOptions]:
        """`rejection` and `rejections` by their path, without those that reject nothing."""
        named = {f"correction.rejections.{name}": given for name, given in self.rejections.items()}
        every = {"correction.rejection": self.rejection} | named
        return {path: given for path, given in every.items() if given.statistic is not None}

    @property
    def weighted(self) -> bool:
        return self.weights.level is not None

    @property
    def rejects(self) -> bool:
        masks = self.weighted and self.weights.mode == "mask"
        thresholds = (self.difference.level, self.veto_threshold, self.m2_threshold)
        return masks or bool(self.all_rejections) or any(given is not None for given in thresholds)

    @property
    def reads_batch(self) -> bool:
        """Whether weights or tokens left out depend on the whole batch, and so must be known before the loss."""
        return self.m2_threshold is not None or (self.weighted and self.weights.normalize)

    @property
    def rejects_segments(self) -> bool:
        levels = [given.level for given in self.all_rejections.values()]
        return "segment-mean" in (self.difference.level, *levels)

    @property
    def active(self) -> bool:
        """Whether the loss differs from one without correction."""
        return self.weighted or self.rejects


OPSM_NOISE = 1e-2
"""In half precision log-probs differ by up to 0.05 nats a token; a smaller mean over a response says nothing."""


def check_correction(config: Any) -> Iterator[Finding]:
    """Bounds are in order, what is on has an effect, and nothing is needed before it is known."""
    correction, is_bypassed = config.correction, config.old_log_probs_source == "behavior"
    yield from _check_bounds(correction)
    yield from _check_rejections(correction)
    yield from _check_on_policy(correction)
    if correction.renormalize and is_bypassed:
        yield error(
            "correction.renormalize",
            "true needs to know the kept tokens before the loss is computed, but with old_log_probs_source behavior "
            "they depend on the current policy; set that to recompute, or leave renormalize out",
        )
    for key in ("m2_threshold", "weights.normalize"):
        if value_at(correction, key) and is_bypassed:
            yield error(
                f"correction.{key}",
                "needs the log ratios of the whole batch before the loss is computed, but with old_log_probs_source "
                "behavior they depend on the current policy; set that to recompute, or leave this out",
            )
    if correction.renormalize and correction.opsm_delta is not None:
        yield error(
            "correction.renormalize",
            "true needs to know the kept tokens before the loss is computed, and those of opsm_delta depend on the "
            "current policy; leave one of them out",
        )
    in_fp32 = config.actor_train.model_args.dtype == config.actor_infer.model_args.dtype == "fp32"
    if correction.opsm_delta is not None and correction.opsm_delta < OPSM_NOISE and not in_fp32:
        yield warning(
            "correction.opsm_delta",
            f"{correction.opsm_delta:g} is below the noise between engine and trainer in half precision, so negative "
            f"responses are left out at random; use {OPSM_NOISE:g} or more",
        )


def _check_bounds(correction: CorrectionOptions) -> Iterator[Finding]:
    yield from check_order("correction.weights.lower", correction.weights.lower, correction.weights.upper)
    for path, rejection in correction.all_rejections.items():
        if rejection.lower is not None and rejection.upper is not None:
            yield from check_order(f"{path}.lower", rejection.lower, rejection.upper)


def _check_rejections(correction: CorrectionOptions) -> Iterator[Finding]:
    for path, rejection in correction.all_rejections.items():
        if not rejection.lower and rejection.upper is None:
            bounds = {"k1": "lower: 0.5, upper: 2.0", "k2": "upper: 0.1", "k3": "upper: 0.01"}[str(rejection.statistic)]
            given = "without bounds" if rejection.lower is None else "with a lower bound of 0 alone"
            yield error(
                f"{path}.statistic", f"{rejection.statistic} {given} rejects nothing; give some, such as {bounds}"
            )
    for name, rejection in correction.rejections.items():
        if rejection.statistic is None:
            yield warning(
                f"correction.rejections.{name}", "has no effect: its statistic is null; set it to k1, k2 or k3"
            )
    difference = correction.difference
    if difference.level is not None and difference.lower is None and difference.upper is None:
        yield error(
            "correction.difference.level",
            f"{difference.level} without bounds rejects nothing; give correction.difference.upper, .lower or both",
        )


def _check_on_policy(correction: CorrectionOptions) -> Iterator[Finding]:
    """On-policy samples are neither left out nor weighted."""
    for path, rejection in correction.all_rejections.items():
        agreement = 1.0 if rejection.statistic == "k1" else 0.0
        if not _inside(agreement, rejection.lower, rejection.upper):
            yield warning(
                path, f"also rejects on-policy samples: {rejection.statistic} of equal policies is {agreement:g}"
            )
    veto, weights = correction.veto_threshold, correction.weights
    if veto is not None and veto > 1:
        yield warning(
            "correction.veto_threshold", f"{veto:g} also rejects on-policy samples: their ratio is 1; use less than 1"
        )
    if not correction.weighted or weights.lower > weights.upper or _inside(1.0, weights.lower, weights.upper):
        return
    if weights.mode == "mask":
        yield warning("correction.weights", "mask also leaves out on-policy samples: their weight is 1")
    else:
        bound = min(max(1.0, weights.lower), weights.upper)
        yield warning(
            "correction.weights",
            f"clamp also changes the weight of on-policy samples, from 1 to {bound:g}; use bounds with 1 between them",
        )


def _inside(value: float, lower: float | None, upper: float | None) -> bool:
    return (lower is None or value >= lower) and (upper is None or value <= upper)

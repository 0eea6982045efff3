"""The keys of the off-policy correction: weights and rejection for the distance to the policy that sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from roll.base.schema import Condition, needs, option

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

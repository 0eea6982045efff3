"""Advantages of one batch by many formulas: those of the keys of this project, and variants that no key gives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from roll.algorithms.advantages import AdvantageInputs, AdvantageSettings, compute_advantages
from roll.algorithms.aggregation import EPSILON, group_mean, group_std, masked
from roll.algorithms.estimators import ADV_ESTIMATORS

OURS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"adv_estimator": "grpo"}, ""),
    ({"adv_estimator": "grpo", "grpo_norm_by_std": False}, "A = R - mean_group"),
    ({"adv_estimator": "grpo", "whiten_advantages": True}, "that of grpo, whitened over the batch's tokens"),
    ({"adv_estimator": "rloo"}, ""),
    ({"adv_estimator": "lite_ppo"}, ""),
    ({"adv_estimator": "reinforce_plus_plus_baseline"}, "A = R - mean_group, whitened over the batch's tokens"),
    ({"adv_estimator": "opo"}, ""),
    ({"adv_estimator": "gpg"}, ""),
    ({"adv_estimator": "pass_at_k"}, ""),
    ({"adv_estimator": "gdpo"}, ""),
    ({"adv_estimator": "reinforce"}, "A = R"),
    ({"adv_estimator": "reinforce", "norm_mean_type": "batch"}, "A = R - mean_batch"),
    (
        {"adv_estimator": "reinforce", "norm_mean_type": "batch", "norm_std_type": "batch"},
        "A = (R - mean_batch) / (std_batch + EPSILON)",
    ),
    ({"adv_estimator": "reinforce_plus_plus"}, ""),
)
"""Keys that are tried, and their formula where it is not the first line of the estimator's documentation."""

NEAREST = {("group", "group"): 0, ("batch", "batch"): 12, ("group", "batch"): 4, ("others", "group"): 3}
"""Sets of mean and deviation of a variant -> its nearest entry of OURS."""

MATCHES = 1e-5
"""Largest difference of equal advantages, relative to the largest one: what fp32 rounds."""


@dataclass(frozen=True)
class AdvantageFormula:
    """A formula and its advantages [B, T]; `exact` where `keys` give it, otherwise they are the nearest."""

    text: str
    keys: Mapping[str, Any]
    exact: bool
    values: Tensor

    @property
    def key_text(self) -> str:
        return ", ".join(f"{key}: {str(value).lower()}" for key, value in self.keys.items())

    def distance(self, advantages: Tensor) -> float:
        """The largest difference to other advantages [B, T]."""
        return float((self.values - advantages).abs().max())

    def matches(self, advantages: Tensor) -> bool:
        return self.distance(advantages) <= MATCHES * max(1.0, float(advantages.abs().max()))


@dataclass(frozen=True)
class Scored:
    """Scores [B] as given, numbers of groups [B], response_mask [B, T], and scores [B, R] and weights of rewards."""

    scores: Tensor
    groups: Tensor
    mask: Tensor
    parts: Tensor | None = None
    weights: tuple[float, ...] = ()

    def of_recipe(self, settings: AdvantageSettings, **inputs: Any) -> Tensor:
        """[B, T]: scores of a dump have their penalties of length already, so these are not subtracted again.

        Raises:
            ValueError: the estimator needs what the dump does not have.
        """
        settings = replace(settings, overlong_buffer_len=None, length_penalty_per_token=0.0, length_reward_coef=0.0)
        given: AdvantageInputs = {"reward_parts": self.parts, **inputs}  # type: ignore[typeddict-item]
        return compute_advantages(self.scores, self.groups, self.mask, settings, **given).advantages

    def formulas(self) -> Iterator[AdvantageFormula]:
        """All of OURS with defaults for other keys, then the variants."""
        plain = AdvantageSettings(reward_weights=self.weights)
        for keys, text in OURS:
            estimator = ADV_ESTIMATORS[keys["adv_estimator"]]
            if estimator.needs == "reward_parts" and len(self.weights) < 2:
                continue
            text = text or (estimator.formula.__doc__ or "").partition("\n")[0].partition(": ")[0].partition(", ")[
                0
            ].rstrip(".")
            text = text.replace("EPSILON", f"{EPSILON:.0e}")
            yield AdvantageFormula(text, keys, True, self.of_recipe(replace(plain, **keys)))
        for (mean, of), biased, epsilon in product(NEAREST, (False, True), (1e-4, EPSILON, 1e-8)):
            if biased or epsilon != EPSILON or mean == "others":
                yield self.variant(mean, of, biased, epsilon)
        yield self.variant("group", "group", False, EPSILON, alone_is_score=True)

    def of_verl(self, by_std: bool) -> Tensor:
        """Those of verl's grpo [B, T]; without `by_std` R - mean, and R for a prompt with one sample."""
        if by_std:
            return self.variant("group", "group", False, 1e-6, alone_is_score=True).values
        alone = torch.bincount(self.groups)[self.groups] == 1
        centre = group_mean(self.scores, self.groups).masked_fill(alone, 0.0)
        return masked((self.scores - centre)[:, None], self.mask)

    def variant(
        self, mean: str, of: str, biased: bool, epsilon: float, alone_is_score: bool = False
    ) -> AdvantageFormula:
        """(R - mean) / (deviation + epsilon); with `alone_is_score` A = R / (1 + epsilon) for a group of one."""
        scores, sets = self.scores, {"group": self.groups, "batch": torch.zeros_like(self.groups)}
        sizes = {name: torch.bincount(numbers)[numbers].float() for name, numbers in sets.items()}
        if mean == "others":
            size = sizes["group"]
            centre = (group_mean(scores, self.groups) * size - scores) / (size - 1).clamp(min=1)
        else:
            centre = group_mean(scores, sets[mean])
        deviation = group_std(scores, sets[of])
        if biased:
            deviation = deviation * ((sizes[of] - 1) / sizes[of]).sqrt()
        advantages = ((scores - centre) / (deviation + epsilon)).nan_to_num(0.0, 0.0, 0.0)
        if alone_is_score:
            advantages = torch.where(sizes["group"] == 1, scores / (1 + epsilon), advantages)
        kind = "biased_std" if biased else "std"
        text = f"A = (R - mean_{mean}) / ({kind}_{of} + {epsilon:.0e})"
        text += ", A = R for a prompt with one sample" if alone_is_score else ""
        return AdvantageFormula(text, OURS[NEAREST[mean, of]][0], False, masked(advantages[:, None], self.mask))


def closest(formulas: list[AdvantageFormula], advantages: Tensor) -> list[AdvantageFormula]:
    """The formulas by distance, matches first; of equal ones the formulas with a key first."""

    def order(each: AdvantageFormula) -> tuple[bool, bool, float]:
        matches, distance = each.matches(advantages), each.distance(advantages)
        return not matches, not (matches and each.exact), math.inf if math.isnan(distance) else distance

    return sorted(formulas, key=order)

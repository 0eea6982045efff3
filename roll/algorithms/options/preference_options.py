"""The keys of losses of preferences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from roll.base.errors import Finding, error, warning
from roll.base.schema import needs, option


@dataclass
class DPOOptions:
    """The keys of the preference loss of pipeline dpo."""

    beta: float = option(
        0.1,
        "Penalty of the distance to the reference: a smaller value lets the policy move further.",
        gt=0,
        usual=(0.0001, 100.0),
    )
    dpo_loss_type: Literal["sigmoid", "hinge", "ipo", "kto_pair"] = option(
        "sigmoid",
        "Loss of a pair of responses; see docs/algorithms/preferences.md. kto_pair needs one more forward pass per "
        "step.",
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
        0.0,
        "Weight of the likelihood of the better responses, which DPO alone lets fall; 0 is off.",
        ge=0,
        usual=(1e-8, 1000.0),
    )


@dataclass
class RewardModelOptions:
    """The keys of the loss of pipeline reward_model."""

    center_rewards_coefficient: float | None = option(
        None,
        "Weight of the mean of (chosen reward + rejected reward)^2, which keeps rewards around 0, such as 0.01; null "
        "or 0: off.",
        ge=0,
        usual=(1e-6, 10.0),
    )


def check_preferences(config: Any) -> Iterator[Finding]:
    """The loss prefers one of the two responses of a pair."""
    if config.dpo_loss_type == "sigmoid" and config.label_smoothing == 0.5:
        yield error(
            "label_smoothing",
            "0.5 takes half of all pairs for swapped, so no preference is learned; use less, such as 0.1",
        )
    if config.dpo_loss_type == "kto_pair" and config.actor_train.samples_per_optimizer_step == 1:
        yield warning(
            "dpo_loss_type",
            "kto_pair compares a response with the mean over the pairs of an optimizer step, and this one has 1 pair; "
            "use more, such as actor_train.training_args.gradient_accumulation_steps 8",
        )

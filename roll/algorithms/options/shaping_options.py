"""The keys that shape scores by length and weight samples, or leave samples out, with their checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from roll.algorithms.estimators import Estimator
from roll.base.errors import Finding, error, warning
from roll.base.schema import Condition, needs, option


def unless(test: Callable[[Estimator], bool], reason: str) -> Condition:
    """The condition of keys that some estimators do not read."""
    return Condition(lambda config, _: not test(config.estimator), reason, ("adv_estimator",))


SCORED = unless(lambda each: each.needs == "teacher_kl", "the advantages of adv_estimator opd do not depend on scores")

SINGLE_TURN = Condition(lambda config, _: config.pipeline == "rlvr", "it belongs to pipeline rlvr", ("pipeline",))

HAS_ADVANTAGES = Condition(
    lambda config, _: config.opd_top_k is None or config.estimator.needs != "teacher_kl",
    "with adv_estimator opd and opd_top_k all advantages are 0",
    ("opd_top_k", "adv_estimator"),
)

DIFFICULTY_WEIGHT = needs("difficulty_loss_weight", "difficulty_loss_weight is false; set it to true")

LENGTH_WEIGHT = needs("length_loss_weight", "length_loss_weight is false; set it to true")


@dataclass
class ShapingOptions:
    """The keys of length penalties, and of weights by difficulty and length."""

    overlong_buffer_len: int | None = option(
        None,
        "Last tokens of response_length over which the length penalty of a response rises from 0 (DAPO).",
        ge=1,
        only_for=(SINGLE_TURN, SCORED),
    )
    overlong_penalty_factor: float = option(
        1.0,
        "Length penalty of a response of response_length tokens, subtracted from its score.",
        gt=0,
        usual=(1e-6, 1e4),
        only_for=needs("overlong_buffer_len", "overlong_buffer_len is null", accepts=lambda length: length is not None),
    )
    length_penalty_per_token: float = option(
        0.0,
        "Subtracted from a score for each token of the response; 0 is off.",
        ge=0,
        usual=(1e-9, 1.0),
        only_for=(SINGLE_TURN, SCORED),
    )
    length_reward_coef: float = option(
        0.0,
        "Weight of the reward of short responses, 0.5 for the shortest to a prompt and -0.5 for the longest, where a "
        "wrong one gains nothing (Kimi k1.5); 0 is off.",
        ge=0,
        usual=(1e-6, 1e4),
        only_for=(SINGLE_TURN, SCORED),
    )
    length_reward_threshold: float = option(
        0.0,
        "A response with a raw score above this is a correct one for length_reward_coef.",
        only_for=needs("length_reward_coef", "length_reward_coef is 0"),
    )
    difficulty_loss_weight: bool = option(
        False,
        "Multiply the advantages of a prompt's samples by a weight that rises with its difficulty, which is 1 minus "
        "their mean score, between 0 and 1; the weights of a batch are divided by their mean.",
        only_for=SCORED,
    )
    difficulty_weight_easy: float = option(
        0.5, "Weight of a prompt with a mean score of 1 or more.", ge=0, usual=(0.0, 1e4), only_for=DIFFICULTY_WEIGHT
    )
    difficulty_weight_hard: float = option(
        2.0, "Weight of a prompt with a mean score of 0 or less.", ge=0, usual=(0.0, 1e4), only_for=DIFFICULTY_WEIGHT
    )
    length_loss_weight: bool = option(
        False,
        "Multiply the advantages of a response by a weight that falls with its length, from that of the shortest of "
        "the batch to that of the longest; the weights of a batch are divided by their mean.",
        only_for=(SINGLE_TURN, HAS_ADVANTAGES),
    )
    length_weight_short: float = option(
        1.5, "Weight of the shortest response.", ge=0, usual=(0.0, 1e4), only_for=LENGTH_WEIGHT
    )
    length_weight_long: float = option(
        0.5, "Weight of the longest response.", ge=0, usual=(0.0, 1e4), only_for=LENGTH_WEIGHT
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


def check_shaping(config: Any) -> Iterator[Finding]:
    """What shapes scores or leaves samples out has the effect it is for."""
    single = config.num_return_sequences_in_group == 1
    if config.pipeline == "rlvr" and config.length_reward_coef and single:
        yield warning(
            "length_reward_coef",
            "has no effect: num_return_sequences_in_group is 1, and it compares the lengths of the responses to a "
            "prompt; use length_penalty_per_token",
        )
    buffer, longest = config.overlong_buffer_len, config.response_length
    if buffer is not None and longest is not None and buffer > longest:
        yield error("overlong_buffer_len", f"{buffer} is above response_length {longest}; use at most that")
    if config.difficulty_loss_weight:
        yield from _check_two_weights(
            config, "difficulty_loss_weight", "difficulty_weight_easy", "difficulty_weight_hard"
        )
        if single:
            yield warning(
                "difficulty_loss_weight",
                "takes the only sample of a prompt for its difficulty, so it weights right and wrong answers "
                "differently; use at least 2 samples, or set it to false",
            )
    if config.length_loss_weight and config.pipeline == "rlvr":
        yield from _check_two_weights(config, "length_loss_weight", "length_weight_short", "length_weight_long")
        if config.samples_per_batch == 1:
            yield warning("length_loss_weight", "has no effect: a batch of one response has no lengths to compare")
    low, high = config.difficulty_low_threshold, config.difficulty_high_threshold
    if config.difficulty_mask and low >= high:
        yield error(
            "difficulty_low_threshold",
            f"no mean score lies between {low:g} and difficulty_high_threshold {high:g}, so every group is left out of "
            "the loss; the low one must be the smaller",
        )


def _check_two_weights(config: Any, path: str, first: str, second: str) -> Iterator[Finding]:
    weight = getattr(config, first)
    if weight == getattr(config, second):
        yield error(
            path, f"true has no effect: {first} and {second} are both {weight:g}; use two weights, or set it to false"
        )

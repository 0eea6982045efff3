"""From scores to advantages: the keys of estimators, of a critic, and of samples that are left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from roll.base.schema import Condition, needs, option

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
    "gdpo",
    "optimal_token_baseline",
    "remax",
    "gae",
    "opd",
    *TURN_ESTIMATORS,
)
"""Values of `adv_estimator`; the registry of roll.algorithms agrees with it."""

TOKEN_ESTIMATORS = ("optimal_token_baseline",)
"""Estimators that compare a token with those at the same position of the other responses to the prompt."""

GROUP_ESTIMATORS = (
    "grpo",
    "rloo",
    "lite_ppo",
    "reinforce_plus_plus_baseline",
    "opo",
    "gpg",
    "pass_at_k",
    "gdpo",
    *TOKEN_ESTIMATORS,
)
"""Estimators that compare a response with the others to its prompt."""

PER_REWARD_ESTIMATORS = ("gdpo",)
"""Estimators that read the score of each reward of a sample, not only their weighted sum."""

GREEDY_ESTIMATORS = ("remax",)
"""Estimators that compare a response with the greedy one to its prompt."""

RESPONSE_ESTIMATORS = tuple(name for name in (*GROUP_ESTIMATORS, *GREEDY_ESTIMATORS) if name not in TOKEN_ESTIMATORS)
"""Estimators that give all tokens of a response the same advantage."""

VALUE_ESTIMATORS = ("gae",)
"""Estimators that need the values of a critic."""

TEACHER_ESTIMATORS = ("opd",)
"""Estimators that learn from the log-probs of a teacher alone, not from scores."""

WHITENING_ESTIMATORS = ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo")
"""Estimators that whiten advantages by definition."""


def estimators(*names: str, reason: str, is_error: bool = False) -> Condition:
    """The condition of keys that only these values of `adv_estimator` read."""
    return Condition(lambda config, _: config.adv_estimator in names, reason, ("adv_estimator",), is_error)


def not_estimators(*names: str, reason: str) -> Condition:
    """The condition of keys that these values of `adv_estimator` do not read."""
    return Condition(lambda config, _: config.adv_estimator not in names, reason, ("adv_estimator",))


RUNNING, RUNNING_TAG = "running", "running_tag"
"""Values of `norm_mean_type` and `norm_std_type` for statistics over the run: of all scores, or of those of a tag."""

RUNNING_TYPES = (RUNNING, RUNNING_TAG)


def normalised_by(key: str) -> Condition:
    """The condition of `norm_mean_type` or `norm_std_type`; a critic needs returns of one scale, that of the run."""
    return Condition(
        lambda config, _: (
            config.adv_estimator == "reinforce"
            or (config.adv_estimator in VALUE_ESTIMATORS and getattr(config, key) in RUNNING_TYPES)
        ),
        "only adv_estimator reinforce reads it, and gae if it is running or running_tag; the others define their own "
        "normalisation",
        ("adv_estimator",),
    )


SCORED = not_estimators(*TEACHER_ESTIMATORS, reason="the advantages of adv_estimator opd do not depend on scores")

SUMMED = not_estimators(
    *PER_REWARD_ESTIMATORS, reason="adv_estimator gdpo normalises the score of each reward, and does not read their sum"
)

SINGLE_TURN = Condition(lambda config, _: config.pipeline == "rlvr", "it belongs to pipeline rlvr", ("pipeline",))

TEACHER = Condition(
    lambda config, _: config.uses_teacher,
    "there is no teacher: use_opd is false and adv_estimator is not opd",
    ("use_opd", "adv_estimator"),
)

HAS_ADVANTAGES = Condition(
    lambda config, _: config.opd_top_k is None or config.adv_estimator not in TEACHER_ESTIMATORS,
    "with adv_estimator opd and opd_top_k all advantages are 0",
    ("opd_top_k", "adv_estimator"),
)

CRITIC = estimators(*VALUE_ESTIMATORS, reason="adv_estimator is not gae, so there is no critic")


DIFFICULTY_WEIGHT = needs("difficulty_loss_weight", "difficulty_loss_weight is false; set it to true")

LENGTH_WEIGHT = needs("length_loss_weight", "length_loss_weight is false; set it to true")


@dataclass
class CriticOptions:
    """How the critic of `adv_estimator: gae` is trained; its model, devices and optimizer are in `critic`."""

    value_clip: float | None = option(
        None,
        "The value loss does not reward values further than this from those at the start of the step; null: no bound.",
        gt=0,
        usual=(0.0001, 1e4),
        only_for=CRITIC,
    )
    critic_warmup: int = option(
        0, "First steps, in which the critic learns and the policy does not; 0 is off.", ge=0, only_for=CRITIC
    )


NormType = Literal["batch", "group", "tag", "running", "running_tag"]


def jsd_beta(value: Any) -> Any:
    """The weight, unchanged.

    Raises:
        ValueError: it is 0 or 1, where the divergence is 0 whatever the policy does.
    """
    limits = {0.0: "forward", 1.0: "reverse"}
    limit = None if isinstance(value, bool) else limits.get(value)
    if limit is not None:
        raise ValueError(
            f"at {value:g} the divergence is always 0; use opd_divergence: {limit}, which is its limit there"
        )
    return value


Divergence = Literal["reverse", "forward", "jsd"]
"""A divergence of the policy from a teacher; see `roll.algorithms.distillation`."""


KL_REWARD = needs("add_token_level_kl", "add_token_level_kl is false; set it to true")


@dataclass
class KLRewardOptions:
    """KL to the reference in the token reward."""

    add_token_level_kl: bool = option(False, "KL to the reference in the token reward.")
    init_kl_coef: float = option(
        0.0,
        "Weight of the KL in the token reward; with target_kl the first; 0 is off.",
        ge=0,
        usual=(1e-8, 100.0),
        only_for=KL_REWARD,
    )
    target_kl: float | None = option(
        None,
        "Target of the KL in the token reward, in nats per token, for an adaptive weight; null: a fixed weight.",
        gt=0,
        usual=(1e-6, 1000.0),
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
class DistillationOptions:
    """The keys of a teacher."""

    opd_kl_coef: float = option(
        1.0,
        "Weight of the teacher.",
        gt=0,
        usual=(1e-6, 100.0),
        only_for=TEACHER,
    )
    opd_top_k: int | None = option(
        None,
        "The teacher's most likely tokens at each position: opd_kl_coef x the divergence over them, and one outcome "
        "for all others, is a term of the loss instead of the advantage. At least the vocabulary: over all tokens. "
        "null: the sampled token alone.",
        ge=1,
        only_for=TEACHER,
    )
    opd_divergence: Divergence = option(
        "reverse",
        "Divergence of opd_top_k: KL of the policy from the teacher (reverse), KL of the teacher from the policy "
        "(forward), or the generalised Jensen-Shannon divergence of GKD (jsd).",
        only_for=needs("opd_top_k", "opd_top_k is null, so only sampled tokens are compared", lambda k: k is not None),
    )
    opd_jsd_beta: float = option(
        0.5,
        "Weight of the teacher in the mixture that jsd compares both with, above 0 and below 1: small ones learn as "
        "forward does, large ones as reverse.",
        gt=0,
        lt=1,
        usual=(0.001, 0.999),
        parse=jsd_beta,
        only_for=needs("opd_divergence", "opd_divergence is not jsd", lambda divergence: divergence == "jsd"),
    )


@dataclass
class AdvantageOptions(KLRewardOptions, DistillationOptions):
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
    norm_mean_type: NormType | None = option(
        None,
        "Subtract the mean of this set from scores: the batch, the group of the sample, those of its tag in the batch, "
        "all samples of the run so far (running), or those of its tag in the run so far (running_tag). For reinforce; "
        "gae reads the last two.",
        only_for=normalised_by("norm_mean_type"),
    )
    norm_std_type: NormType | None = option(
        None,
        "Divide scores by the standard deviation of this set, as for norm_mean_type.",
        only_for=normalised_by("norm_std_type"),
    )
    gamma: float = option(
        1.0,
        "Discount of the return to go.",
        ge=0,
        le=1,
        only_for=(
            not_estimators(
                *RESPONSE_ESTIMATORS, reason="this adv_estimator gives every token of a response the same advantage"
            ),
            SCORED,
        ),
    )
    lambd: float = option(
        0.95,
        "GAE's weight of later temporal differences: 1 is the return minus the value, 0 trusts the critic after one "
        "token.",
        ge=0,
        le=1,
        only_for=CRITIC,
    )
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
    reward_clip: float | None = option(
        None, "Clip scores to +- this.", gt=0, usual=(1e-6, 1e6), only_for=(SCORED, SUMMED)
    )
    advantage_clip: float | None = option(
        None, "Clip advantages to +- this.", gt=0, usual=(1e-6, 1e6), only_for=HAS_ADVANTAGES
    )
    whiten_rewards: bool = option(
        False, "Zero mean and unit variance of scores over the batch.", only_for=(SCORED, SUMMED)
    )
    whiten_advantages: bool = option(
        False,
        "Zero mean and unit variance of advantages over the batch's tokens.",
        only_for=(
            not_estimators(*WHITENING_ESTIMATORS, reason="this adv_estimator always whitens its advantages"),
            HAS_ADVANTAGES,
        ),
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
    use_opd: bool = option(
        False,
        "On-policy distillation beside the scores: subtract opd_kl_coef x (log-prob of the policy - log-prob of the "
        "teacher) from the advantage of every token. The teacher is the model of `reference`.",
        only_for=not_estimators(*TEACHER_ESTIMATORS, reason="adv_estimator opd learns from the teacher alone"),
    )

    @property
    def uses_teacher(self) -> bool:
        return self.use_opd or self.adv_estimator in TEACHER_ESTIMATORS

    @property
    def uses_sum_pi_squared(self) -> bool:
        return self.adv_estimator in TOKEN_ESTIMATORS

    @property
    def uses_running_statistics(self) -> bool:
        reads = self.adv_estimator == "reinforce" or self.adv_estimator in VALUE_ESTIMATORS
        return reads and not {self.norm_mean_type, self.norm_std_type}.isdisjoint(RUNNING_TYPES)

    @property
    def uses_reward_parts(self) -> bool:
        """Whether the advantages need the score of each reward of a sample."""
        return self.adv_estimator in PER_REWARD_ESTIMATORS


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

"""From scores to advantages: the keys of estimators and of a critic, with their checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from roll.algorithms.distillation import DistillationOptions, check_teacher
from roll.algorithms.estimators import ADV_ESTIMATORS, Estimator
from roll.algorithms.estimators.returns_to_go import RUNNING, RUNNING_TAG, RUNNING_TYPES
from roll.algorithms.options.shaping_options import HAS_ADVANTAGES, SCORED, ShapingOptions, unless
from roll.algorithms.policy_loss import POLICY_LOSSES
from roll.base.errors import Finding, error, warning
from roll.base.schema import Condition, combined, needs, option
from roll.base.text import check_known


def _of_estimators(*names: str) -> Condition:
    return Condition(
        lambda config, _: config.adv_estimator in names,
        f"it belongs to adv_estimator {' or '.join(names)}",
        ("adv_estimator",),
        variants=names,
    )


def _uses_turns(names: Sequence[str]) -> bool:
    return all(ADV_ESTIMATORS[name].needs == "turns" for name in names)


if TYPE_CHECKING:

    class EstimatorOptions:
        """The keys of estimators for all pipelines."""

    class TurnOptions:
        """The keys of estimators that only trajectories of several turns have."""

else:
    _parts = {name: each.options for name, each in ADV_ESTIMATORS.items()}
    EstimatorOptions = combined("EstimatorOptions", _parts, _of_estimators, lambda names: not _uses_turns(names))
    TurnOptions = combined("TurnOptions", _parts, _of_estimators, _uses_turns)


def _normalised_by(key: str) -> Condition:
    return Condition(
        lambda config, _: getattr(config, key) in config.estimator.norm_types,
        "only adv_estimator reinforce reads it, and gae if it is running or running_tag; the others define their own "
        "normalisation",
        ("adv_estimator",),
    )


SUMMED = unless(
    lambda each: each.needs == "reward_parts",
    "adv_estimator gdpo normalises the score of each reward, and does not read their sum",
)


CRITIC = unless(lambda each: each.needs != "values", "adv_estimator is not gae, so there is no critic")


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
class AdvantageOptions(EstimatorOptions, KLRewardOptions, DistillationOptions, ShapingOptions):
    """The keys of the advantages."""

    adv_estimator: str = option("grpo", "Advantage estimator; see docs/algorithms/advantages.md for the known ones.")
    norm_mean_type: NormType | None = option(
        None,
        "Subtract the mean of this set from scores: the batch, the group of the sample, those of its tag in the batch, "
        "all samples of the run so far (running), or those of its tag in the run so far (running_tag). For reinforce; "
        "gae reads the last two.",
        only_for=_normalised_by("norm_mean_type"),
    )
    norm_std_type: NormType | None = option(
        None,
        "Divide scores by the standard deviation of this set, as for norm_mean_type.",
        only_for=_normalised_by("norm_std_type"),
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
            unless(lambda each: each.whitens, "this adv_estimator always whitens its advantages"),
            HAS_ADVANTAGES,
        ),
    )
    use_opd: bool = option(
        False,
        "On-policy distillation beside the scores: subtract opd_kl_coef x (log-prob of the policy - log-prob of the "
        "teacher) from the advantage of every token. The teacher is the model of `reference`.",
        only_for=unless(lambda each: each.needs == "teacher_kl", "adv_estimator opd learns from the teacher alone"),
    )

    @property
    def estimator(self) -> Estimator:
        """The estimator; grpo for an unknown name, which a check reports."""
        return ADV_ESTIMATORS.get(self.adv_estimator) or ADV_ESTIMATORS["grpo"]

    @property
    def uses_teacher(self) -> bool:
        return self.use_opd or self.estimator.needs == "teacher_kl"

    @property
    def uses_sum_pi_squared(self) -> bool:
        return self.estimator.needs == "squared_gradients"

    @property
    def norm_types(self) -> tuple[str | None, str | None]:
        """`norm_mean_type` and `norm_std_type`, None where the estimator does not read them."""
        known = self.estimator.norm_types
        mean, std = (kind if kind in known else None for kind in (self.norm_mean_type, self.norm_std_type))
        return mean, std

    @property
    def uses_running_statistics(self) -> bool:
        return not set(RUNNING_TYPES).isdisjoint(self.norm_types)

    @property
    def uses_reward_parts(self) -> bool:
        """Whether the advantages need the score of each reward of a sample."""
        return self.estimator.needs == "reward_parts"


def check_advantages(config: Any) -> Iterator[Finding]:
    """The estimator is known and fits the pipeline, and terms that are on have a weight."""
    name, estimator = config.adv_estimator, config.estimator
    yield from check_known("adv_estimator", name, ADV_ESTIMATORS, {"actor_train.pg_variant": POLICY_LOSSES})
    yield from _check_pipeline(config)
    if estimator.in_group and config.num_return_sequences_in_group == 1:
        yield error(
            "train_env_manager.group_size" if config.pipeline == "agentic" else "num_return_sequences_in_group",
            f"1 gives every sample of {name} advantage 0, so nothing is learned; use at least 2, or adv_estimator "
            "reinforce",
        )
    if estimator.check is not None:
        yield from estimator.check(config.advantages.options_of(estimator), config)
    if config.uses_sum_pi_squared and config.old_log_probs_source == "behavior":
        yield error(
            "adv_estimator",
            f"{name} needs the probabilities of all tokens, which the log-prob pass of the trainer computes, but with "
            "old_log_probs_source behavior there is no such pass; set that to recompute, or use opo",
        )
    if config.uses_teacher:
        yield from check_teacher(config)
    if config.uses_running_statistics:
        yield from _check_running(config)
    if config.add_token_level_kl and config.init_kl_coef == 0:
        yield error("init_kl_coef", "0 turns off the KL that add_token_level_kl requires; use a weight such as 0.001")
    if estimator.per_response and config.add_token_level_kl:
        yield warning(
            "add_token_level_kl",
            f"with {name} the KL of a response is summed and counts for all its tokens alike; use_kl_loss keeps it per "
            "token",
        )


def _check_pipeline(config: Any) -> Iterator[Finding]:
    name, needed = config.adv_estimator, config.estimator.needs
    if needed == "turns" and config.pipeline == "rlvr":
        message = "needs trajectories of several turns, and pipeline rlvr has one turn; use grpo or reinforce"
        yield error("adv_estimator", f"{name} {message}")
    if needed == "baselines" and config.pipeline == "agentic":
        yield error(
            "adv_estimator",
            f"{name} needs a greedy response to each prompt, which agents of several turns do not generate; use grpo "
            "or rloo, or reinforce where train_env_manager.group_size is 1",
        )
    if needed == "reward_parts" and config.pipeline == "agentic":
        yield error(
            "adv_estimator",
            f"{name} normalises each of several rewards of a response, and an environment gives one; use grpo or rloo",
        )


def _check_running(config: Any) -> Iterator[Finding]:
    """Statistics over the run change the score that is learned from, and see it as the rewards gave it."""
    types = {key: getattr(config, key) for key in ("norm_mean_type", "norm_std_type")}
    running = {key: kind for key, kind in types.items() if kind in RUNNING_TYPES}
    key, kind = next(iter(running.items()))
    if config.uses_critic and config.pipeline == "agentic":
        yield error(
            key,
            f"{kind} would scale the score of a trajectory but not the rewards of its turns, which gae adds up; leave "
            "it out, or use whiten_advantages",
        )
    elif config.whiten_rewards and RUNNING in running.values():
        key = next(key for key, kind in running.items() if kind == RUNNING)
        yield warning(
            key,
            "running has no effect with whiten_rewards: true, which gives the scores of every batch mean 0 and "
            "variance 1; leave one of them out",
        )
    elif config.whiten_rewards:
        yield warning(
            key,
            f"{RUNNING_TAG} keeps statistics of scores that whiten_rewards: true has scaled by those of their batch, "
            "which differ from batch to batch; set whiten_rewards to false",
        )

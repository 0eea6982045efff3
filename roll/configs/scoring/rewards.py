"""Rewards of pipeline rlvr: the keys of an entry of `rewards`, the built-in rewards, and which entries score a tag."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from roll.base.errors import Finding, error, missing, warning
from roll.base.schema import Condition, ConfigSource, option
from roll.base.text import check_known, nearest
from roll.configs.scoring.built_in_rewards import (
    BUILT_IN,
    PENALTIES,
    belongs_to,
    built_in_of,
    regular_expression,
    scoring_role,
)
from roll.configs.scoring.judge import JudgeOptions, check_judge
from roll.configs.user_code import names_code
from roll.models.families.registry import template_names

if TYPE_CHECKING:
    from roll.configs.pipeline import RLVRConfig

DEFAULT_CONCURRENCY = 128
"""`max_concurrent_calls` of a coroutine function of the user, as many as one process is sent at a time."""

LARGEST_REWARD = 1e18
"""Rewards of a larger size are failures: training adds up squares over a batch in float32, which ends at 3e38."""


def is_trainable(reward: float) -> bool:
    """Whether a reward is finite and not beyond LARGEST_REWARD."""
    return -LARGEST_REWARD <= reward <= LARGEST_REWARD


FUNCTION_CALLED = Condition(
    lambda config, section: scoring_role(section) is None,
    "a model of the run gives the scores, that of role reward or judge; no function is called",
    (".function",),
)

SCORES_CHOSEN = Condition(
    lambda config, section: scoring_role(section) != "reward",
    "the scores of a reward_model are those of the model of role reward",
    (".function",),
)

OWN_FUNCTION = Condition(
    lambda config, section: built_in_of(section.function) is None,
    "the built-in rewards start no processes, or limit them themselves",
    (".function",),
)


@dataclass
class FilterArguments:
    """Thresholds of a query filter; each belongs to one type."""

    threshold_up: float | None = option(None, "mean_filter: groups with this mean score or more are dropped.")
    threshold_down: float | None = option(None, "mean_filter: groups with this mean score or less are dropped.")
    std_threshold: float | None = option(
        None, "std_filter: groups whose scores have this standard deviation or less are dropped; default 0.", ge=0
    )


@dataclass
class QueryFilterConfig:
    """Dynamic sampling: groups without a learning signal are replaced by new prompts."""

    type: Literal["no_filter", "mean_filter", "std_filter"] = option(
        "no_filter", "Which statistic of its scores decides about a group."
    )
    filter_args: FilterArguments = option(factory=FilterArguments, help="The thresholds.")


CODE = belongs_to("code_sandbox")


@dataclass
class CodeOptions:
    """How a program is taken from a response and run."""

    code_from: Literal["last_block", "whole"] = option(
        "last_block", "The program is the last block between ``` marks, or the whole response.", only_for=CODE
    )
    test_timeout_s: float = option(
        6.0, "Maximum seconds of one test of a program, of processor time and of wall time.", gt=0, only_for=CODE
    )
    memory_limit_mb: int = option(
        1024, "Maximum address space of a program in MiB.", ge=64, usual=(64, 1e6), only_for=CODE
    )
    output_limit_kb: int = option(
        1024,
        "Maximum KiB that a program prints or returns in one test; a test with more fails.",
        ge=1,
        usual=(1, 1e6),
        only_for=CODE,
    )


@dataclass
class ModelScoreOptions:
    """How a model of the run reads a response."""

    template: str | None = option(
        None,
        "Chat template of the prompt in front of the reward model, by its own tokenizer, default: that of "
        "actor_train.data_args; or of the question to the model of role judge, default: native.",
        only_for=(
            belongs_to("reward_model", "llm_judge"),
            Condition(
                lambda config, section: built_in_of(section.function) != "llm_judge" or section.base_url is None,
                "an endpoint applies the template of its model",
                (".base_url",),
            ),
        ),
    )


@dataclass
class RewardConfig(CodeOptions, JudgeOptions, ModelScoreOptions):
    """One rule that scores samples."""

    function: str = option(
        BUILT_IN["math_rule"].function,
        "`module:function`, whose parameters say what it reads and when it is called, or the name of a built-in "
        f"reward: {', '.join(BUILT_IN)}; see docs/rewards.md. Default: the built-in reward with the name of the entry, "
        "else math_rule.",
    )
    worker_cls: str | None = option(
        None,
        "Class that scores in a recipe of ROLL. Classes of rules are read as built-in rewards; others need a "
        "`function`.",
    )
    tag_included: list[str] = option(
        factory=list, help="Tags of the samples this reward scores; empty: all that no other reward names."
    )
    weight: float = option(
        1.0,
        "Factor of this score; the score of a sample is the sum over all rewards that name its tag.",
        usual=(-1e4, 1e4),
    )
    options: dict[str, Any] = option(
        factory=dict,
        help="Options of a function of your own, which reads them as `config.options`.",
        only_for=OWN_FUNCTION,
    )
    world_size: int = option(1, "Worker processes of this reward.", ge=1, only_for=FUNCTION_CALLED)
    process_memory_limit_mb: int = option(
        16384,
        "Maximum memory of a process of the reward in MiB (Linux: RLIMIT_DATA), and for a function of your own also of "
        "the process and all that it starts; a call beyond it fails.",
        ge=256,
        usual=(256, 1e6),
    )
    child_process_limit: int = option(
        128,
        "Maximum processes that a process of the reward may have started at a time (Linux); beyond it they are killed, "
        "and the call fails.",
        ge=0,
        usual=(0, 1e5),
        only_for=OWN_FUNCTION,
    )
    timeout_s: float = option(
        5.0,
        "Maximum seconds for one call; then the process is killed and the group of the sample dropped. Default: "
        + ", ".join(f"{item.timeout_s:g} for {name}" for name, item in BUILT_IN.items() if item.timeout_s != 5.0)
        + ", 5 for others.",
        gt=0,
        only_for=FUNCTION_CALLED,
    )
    max_concurrent_calls: int | None = option(
        None,
        "Calls of a coroutine function in flight in one process. Default: "
        + ", ".join(
            f"{item.max_concurrent_calls} for {name}" for name, item in BUILT_IN.items() if item.max_concurrent_calls
        )
        + f", {DEFAULT_CONCURRENCY} for others.",
        ge=1,
        usual=(1, 1e5),
        only_for=FUNCTION_CALLED,
    )
    answer_pattern: Literal["boxed", "last_number", "boxed_or_last_number"] = option(
        "boxed_or_last_number", "Where the response gives its answer.", only_for=belongs_to("math_rule")
    )
    pattern: str | None = option(
        None,
        "Regular expression that is searched in the response; the first group of its last match, if it has a group, "
        "is compared with the ground truth. Null: the ground truth is the expression.",
        parse=regular_expression,
        only_for=belongs_to("regex"),
    )
    reward_type: Literal["strict", "soft"] = option(
        "strict",
        "strict: a response that passes every test or follows every instruction is right; soft: each counts for its "
        "share.",
        only_for=belongs_to("ifeval", "code_sandbox"),
    )
    correct_score: float = option(1.0, "Score of a right answer.", usual=(-1e6, 1e6), only_for=SCORES_CHOSEN)
    wrong_score: float = option(0.0, "Score of a wrong answer.", usual=(-1e6, 1e6), only_for=SCORES_CHOSEN)
    query_filter_config: QueryFilterConfig = option(
        factory=QueryFilterConfig,
        help="Which groups scored by this rule are trained on. Of several rules for one tag, one may have a filter, "
        "which reads their sum.",
    )

    def share_score(self, share: float) -> float:
        """The score of a response that is right to a share between 0 and 1, from `wrong_score` to `correct_score`."""
        return self.wrong_score + (self.correct_score - self.wrong_score) * share


def rewards_of(rewards: Mapping[str, RewardConfig], tag: str) -> list[str]:
    """Names of the rewards that score a tag; none if there is none.

    They are all those that name the tag in `tag_included`. A tag that none names is scored by the first reward without
    `tag_included`.
    """
    naming = [name for name, reward in rewards.items() if tag in reward.tag_included]
    return naming or [name for name, reward in rewards.items() if not reward.tag_included][:1]


def lacks_function(config: RLVRConfig, name: str) -> bool:
    """Whether the reward is a class of ROLL for which no function is given, so that it can only be planned."""
    return bool(config.rewards[name].worker_cls) and f"rewards.{name}.function" not in config.source.given


def truths_read(
    rewards: Mapping[str, RewardConfig], tag: str, left_out: Collection[str] = ()
) -> dict[str, tuple[type, ...]]:
    """The built-in rewards that read the ground truth of prompts with a tag, and the types that it may have.

    A function of the user is not among them: it gets what the data has. Nor is a reward whose name is `left_out`.
    """
    found = {}
    for reward in (rewards[name] for name in rewards_of(rewards, tag) if name not in left_out):
        name = built_in_of(reward.function)
        asked = name != "llm_judge" or "{ground_truth" in reward.prompt_template
        asked = asked and (name != "regex" or reward.pattern is None or re.compile(reward.pattern).groups > 0)
        if name is not None and asked and BUILT_IN[name].truth:
            found[name] = BUILT_IN[name].truth
    return found


def domain_of(rewards: Mapping[str, RewardConfig], shares: Mapping[str, float], tag: str) -> str | None:
    """The name under which `domain_interleave_probs` counts prompts with a tag; None if no reward scores it.

    It is the reward of the tag. Of several, it is the one that has a share; the first, if none has one.
    """
    names = rewards_of(rewards, tag)
    return next((name for name in names if name in shares), names[0] if names else None)


def no_reward(rewards: Mapping[str, RewardConfig], tag: str) -> str:
    known = {name: reward.tag_included for name, reward in rewards.items()}
    return f"no reward scores samples tagged {tag!r}; rewards and their tag_included: {known}"


MAX_PROCESSES = 4096
"""Most processes of one reward on one machine."""

FILTER_ARGUMENTS = {
    "no_filter": (),
    "mean_filter": ("threshold_up", "threshold_down"),
    "std_filter": ("std_threshold",),
}
"""Thresholds of each type of query filter."""


def _check_filter(path: str, config: QueryFilterConfig, group: int, source: ConfigSource) -> Iterator[Finding]:
    arguments = config.filter_args
    for name in ("threshold_up", "threshold_down", "std_threshold"):
        if getattr(arguments, name) is not None and name not in FILTER_ARGUMENTS[config.type]:
            owner = next(kind for kind, names in FILTER_ARGUMENTS.items() if name in names)
            message = f"belongs to type {owner}, but type is {config.type}"
            yield source.unused(f"{path}.filter_args.{name}", message, [f"{path}.type"])
    low, high = arguments.threshold_down, arguments.threshold_up
    if config.type == "mean_filter" and low is None and high is None:
        yield error(
            f"{path}.type",
            "mean_filter without thresholds drops nothing; give filter_args, such as threshold_down: 0.1, "
            "threshold_up: 0.9",
        )
    if config.type == "std_filter" and group == 1:
        yield error(
            f"{path}.type",
            "std_filter drops every group, since num_return_sequences_in_group 1 leaves a standard deviation of 0; use "
            "at least 2, or another type",
        )
    if low is not None and high is not None and low >= high:
        yield error(
            f"{path}.filter_args",
            f"no mean score lies between threshold_down {low:g} and threshold_up {high:g}; "
            "threshold_down must be the smaller",
        )


def check_rewards(config: RLVRConfig) -> Iterator[Finding]:
    """Every reward scores some samples, entries for one tag can be added, and names have the form `module:name`."""
    if not config.rewards:
        yield error("rewards", "is empty, so nothing scores a response; describe one, such as math_rule: {}")
    for name, reward in config.rewards.items():
        yield from _check_reward(f"rewards.{name}", reward, config)
        filtering = f"rewards.{name}.query_filter_config"
        yield from _check_filter(
            filtering, reward.query_filter_config, config.num_return_sequences_in_group, config.source
        )
    yield from _check_catch_all(config)
    yield from _check_sums(config)
    yield from _check_domains(config)
    if config.uses_reward_parts:
        yield from _check_per_reward(config)
    yield from _check_bounds(config)


def _check_catch_all(config: RLVRConfig) -> Iterator[Finding]:
    """Only the first reward without `tag_included` can score anything."""
    first, *others = [name for name, reward in config.rewards.items() if not reward.tag_included] or [""]
    for name in others:
        yield error(
            f"rewards.{name}",
            f"scores nothing: rewards.{first} already scores every tag that no reward names; give tag_included to both "
            "to add their scores ([default] where rows have no tag), or remove one of them; null removes that of a "
            f"base file, such as rewards.{first}: null",
        )


def _check_sums(config: RLVRConfig) -> Iterator[Finding]:
    rewards = config.rewards
    tags = dict.fromkeys(tag for reward in rewards.values() for tag in reward.tag_included)
    groups: dict[tuple[str, ...], list[str]] = {}
    for tag in tags:
        groups.setdefault(tuple(rewards_of(rewards, tag)), []).append(tag)
    for name, reward in rewards.items():
        if not reward.tag_included:
            groups[(name,)] = []
    for names, own in groups.items():
        tagged = f"prompts tagged {', '.join(own)}" if own else "prompts whose tag no reward names"
        if not any(rewards[name].weight for name in names):
            yield error(f"rewards.{names[0]}.weight", f"0 gives {tagged} a score of 0; give a reward another weight")
        largest = sum(
            abs(reward.weight) * max(abs(reward.correct_score), abs(reward.wrong_score))
            for reward in (rewards[name] for name in names)
        )
        if largest > LARGEST_REWARD:
            yield error(
                f"rewards.{names[0]}.weight",
                f"{tagged} have a score of up to {largest:g}; use weights and scores with a sum of {LARGEST_REWARD:g} "
                "at most, since training squares them",
            )
        yield from _check_spread(names, config, tagged)
        if len(names) == 1:
            continue
        filters = [name for name in names if rewards[name].query_filter_config.type != "no_filter"]
        if len(filters) > 1:
            yield error(
                f"rewards.{filters[1]}.query_filter_config",
                f"{tagged} are filtered by {_all(filters)}; a filter reads the sum of all rewards of a tag, so "
                "keep one of them",
            )
        if not any(f"rewards.{name}.weight" in config.source.given for name in names):
            yield warning(
                f"rewards.{names[-1]}.tag_included",
                f"{tagged} are scored by {_all(names)}: their score is the sum; write weight: 1 to one of them if "
                "this is meant, or remove the tags from one",
            )


def _check_spread(names: Collection[str], config: RLVRConfig, tagged: str) -> Iterator[Finding]:
    """Scores of a group can differ by more than `std_threshold`: at most, half are the lowest and half the highest."""
    rewards = [config.rewards[name] for name in names]
    if any(built_in_of(reward.function) in (None, "reward_model") for reward in rewards):
        return
    largest = sum(abs(reward.weight * (reward.correct_score - reward.wrong_score)) for reward in rewards) / 2
    for name in names:
        filters = config.rewards[name].query_filter_config
        threshold = filters.filter_args.std_threshold
        if filters.type == "std_filter" and threshold is not None and threshold >= largest > 0:
            yield warning(
                f"rewards.{name}.query_filter_config.filter_args.std_threshold",
                f"{threshold:g} drops every group: the scores of {tagged} have a standard deviation of at most "
                f"{largest:g}; use less",
            )


def _check_per_reward(config: RLVRConfig) -> Iterator[Finding]:
    rewards = config.rewards
    tags = {tag for reward in rewards.values() for tag in reward.tag_included}
    if not any(sum(rewards[name].weight != 0 for name in rewards_of(rewards, tag)) > 1 for tag in tags):
        yield warning(
            "adv_estimator",
            f"{config.adv_estimator} normalises each reward of a response, but no tag has several: with equal weights "
            "this is grpo with advantages whitened over the batch; name a tag in tag_included of several rewards, or "
            "use grpo",
        )


def _check_bounds(config: RLVRConfig) -> Iterator[Finding]:
    """The two scores of a reward are those that shaping expects; where rewards are added, others are possible."""
    threshold = config.length_reward_threshold
    for name, reward in config.rewards.items():
        is_added = all([*rewards_of(config.rewards, tag)] != [name] for tag in reward.tag_included)
        if scoring_role(reward) == "reward" or (reward.tag_included and is_added):
            continue
        low, high = sorted((reward.weight * reward.wrong_score, reward.weight * reward.correct_score))
        if config.length_reward_coef and not low <= threshold < high:
            yield warning(
                "length_reward_threshold",
                f"{threshold:g} does not tell right from wrong answers: scores of rewards.{name} are {low:g} and "
                f"{high:g}, and one above the threshold is right; use {low:g}",
            )
        if config.difficulty_loss_weight and (low < 0 or high > 1):
            yield warning(
                "difficulty_loss_weight",
                f"measures difficulty by mean scores from 0 to 1, and those of rewards.{name} are from {low:g} to "
                f"{high:g}: beyond 0 and 1 all prompts have the same weight",
            )


def _all(names: Collection[str]) -> str:
    *others, last = (f"rewards.{name}" for name in names)
    return f"{', '.join(others)} and {last}" if others else last


def _check_domains(config: RLVRConfig) -> Iterator[Finding]:
    """Prompts are drawn from domains that a reward scores, in shares above 0; no tag belongs to two of them."""
    shares, path = config.actor_train.data_args.domain_interleave_probs, "actor_train.data_args.domain_interleave_probs"
    for name, share in shares.items():
        if name not in config.rewards:
            yield error(f"{path}.{name}", f"is not in rewards; known: {', '.join(config.rewards)}")
        elif not 0 <= share < float("inf"):
            yield error(f"{path}.{name}", f"{share:g} is not a share; use 0 or more")
    if shares and not any(share > 0 for share in shares.values()):
        yield error(path, "gives no domain a share, so nothing is drawn; give one, such as math_rule: 1.0")
    ambiguous: dict[tuple[str, ...], list[str]] = {}
    for tag in dict.fromkeys(tag for reward in config.rewards.values() for tag in reward.tag_included):
        named = tuple(name for name in rewards_of(config.rewards, tag) if name in shares)
        if len(named) > 1:
            ambiguous.setdefault(named, []).append(tag)
    for names, tags in ambiguous.items():
        yield error(
            f"{path}.{names[1]}",
            f"prompts tagged {', '.join(tags)} belong to {' and '.join(names)}, whose scores are added, so it is not "
            f"clear how many are drawn; name one of them here, such as {names[0]}",
        )


def _check_reward(path: str, reward: RewardConfig, config: RLVRConfig) -> Iterator[Finding]:
    given = config.source.given
    worker = (reward.worker_cls or "").rpartition(".")[2]
    if lacks_function(config, path.removeprefix("rewards.")):
        yield missing(
            f"{path}.function",
            f"no rule here does what {worker} does; write function: module:name, a function of response, ground truth "
            f"and config that returns the score, or remove {path} and the data with its tags",
        )
    built_in = built_in_of(reward.function)
    name = path.removeprefix("rewards.")
    similar = nearest(name, BUILT_IN)
    if f"{path}.function" not in given and not worker and name not in BUILT_IN and similar not in (None, built_in):
        yield warning(
            f"{path}.function",
            f"is not given and {name} is not a built-in reward, so {built_in} scores; write function: {similar} if "
            f"that is meant, else function: {built_in}",
        )
    if not names_code(reward.function):
        file, _, name = reward.function.rpartition(":")
        stem = os.path.basename(file).removesuffix(".py")
        hint = f", here {stem}:{name}, with {stem}.py beside the YAML file" if file.endswith(".py") else ""
        known = "" if hint else f", or a built-in reward: {', '.join(BUILT_IN)}"
        like = nearest(reward.function, BUILT_IN)
        meant = f"did you mean {like}? " if like else ""
        yield error(
            f"{path}.function",
            f"{reward.function!r} is not the name of a function; {meant}write module:function{hint}{known}",
        )
    if scoring_role(reward) is not None and reward.template is not None:
        yield from check_known(f"{path}.template", reward.template, template_names())
    if built_in not in (None, "reward_model") and reward.correct_score == reward.wrong_score:
        yield error(
            f"{path}.correct_score",
            f"{reward.correct_score:g} equals wrong_score, so every answer has the same score and nothing is learned; "
            "use two scores",
        )
    if built_in not in (None, *PENALTIES) and reward.correct_score < reward.wrong_score and reward.weight > 0:
        yield warning(
            f"{path}.correct_score",
            f"{reward.correct_score:g} is below wrong_score {reward.wrong_score:g}, so the policy learns to answer "
            "wrongly; swap them",
        )
    if reward.world_size > MAX_PROCESSES:
        yield error(
            f"{path}.world_size",
            f"{reward.world_size} processes are too many for one machine; use at most {MAX_PROCESSES}",
        )
    if built_in == "llm_judge":
        yield from check_judge(path, reward, bool(config.judge.device_mapping))

"""Rewards of pipeline rlvr: the keys of an entry of `rewards`, the built-in rewards, and which entries score a tag."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from roll.base.schema import Condition, option


@dataclass(frozen=True)
class BuiltIn:
    """A reward that comes with this project.

    Attributes:
        function: its `module:function`.
        timeout_s: default of `timeout_s`, in seconds.
        max_concurrent_calls: default of `max_concurrent_calls`; None for a function that is not a coroutine.
        truth: types of the ground truth that it compares with; none if it may do without, or reads any.
    """

    function: str
    timeout_s: float = 5.0
    max_concurrent_calls: int | None = None
    truth: tuple[type, ...] = (str, int, float)


BUILT_IN = {
    "math_rule": BuiltIn("roll.rewards.math_rule:math_reward"),
    "multiple_choice": BuiltIn("roll.rewards.answers:multiple_choice"),
    "exact_match": BuiltIn("roll.rewards.answers:exact_match", truth=(str, int, float, list)),
    "regex": BuiltIn("roll.rewards.answers:regex"),
    "ifeval": BuiltIn("roll.rewards.ifeval:ifeval_reward", truth=()),
    "reasoning_gym": BuiltIn("roll.rewards.reasoning_gym:reasoning_gym_reward", truth=()),
    "code_sandbox": BuiltIn("roll.rewards.code_sandbox:code_reward", 60.0, max_concurrent_calls=1, truth=()),
    "llm_judge": BuiltIn("roll.rewards.llm_judge:judge_reward", timeout_s=120.0, max_concurrent_calls=16),
    "reward_model": BuiltIn("roll.rewards.reward_model:RewardModelScorer", truth=()),
}
"""Rewards by the name that an entry of `rewards`, or its `function`, may have.

A function of the user needs no entry here: `function: module:name` names it (docs/rewards.md). To add a built-in reward
`mine`:

1. its entry here, and the keys that only it reads in `RewardConfig` below, with `only_for=belongs_to("mine")`;
2. its function in `roll/rewards`, in a module whose SELF_TEST has samples of it that are scored before every run;
3. `STAND_IN_TRUTHS` in `roll/lab/rehearse/data.py`, unless its ground truth may be a number;
4. `roll/configs/rules/rewards.py`: what its keys have to fulfil together;
5. `roll/compat`: the classes and keys of other frameworks that mean it, such as `WORKERS` of `roll_rewards.py`;
6. its row in docs/rewards.md, its mention in README.md, and `make docs` for docs/configuration.md.

Tests compare this table with 3 (`tests/lab/rehearse/test_rehearse_inputs.py`) and 6
(`tests/rewards/test_reward_documentation.py`)."""

COMPARISONS = ("math_rule", "multiple_choice", "exact_match", "regex", "ifeval")
"""Built-in rewards for which a response that takes longer than `timeout_s` is wrong, and no failure."""

DEFAULT_CONCURRENCY = 128
"""`max_concurrent_calls` of a coroutine function of the user, as many as one process is sent at a time."""

LARGEST_REWARD = 1e18
"""Rewards of a larger size are failures: training adds up squares over a batch in float32, which ends at 3e38."""


def is_trainable(reward: float) -> bool:
    """Whether a reward is finite and not beyond LARGEST_REWARD."""
    return -LARGEST_REWARD <= reward <= LARGEST_REWARD


def built_in_of(function: str) -> str | None:
    """Name of the built-in reward with this `module:function`; None for a function of the user."""
    return next((name for name, item in BUILT_IN.items() if item.function == function), None)


def is_comparison(function: str) -> bool:
    return built_in_of(function) in COMPARISONS


def scoring_role(reward: RewardConfig) -> Literal["reward", "judge"] | None:
    """The role whose model gives the scores; None for a function in a process of its own."""
    built_in = built_in_of(reward.function)
    if built_in == "reward_model":
        return "reward"
    return "judge" if built_in == "llm_judge" and reward.base_url is None else None


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

ENDPOINT_ASKED = Condition(
    lambda config, section: not (scoring_role(section) == "judge" and config.judge.device_mapping),
    "without base_url the judge is the model of role judge",
    (".base_url",),
)


OWN_FUNCTION = Condition(
    lambda config, section: built_in_of(section.function) is None,
    "the built-in rewards start no processes, or limit them themselves",
    (".function",),
)


def belongs_to(*names: str) -> Condition:
    """The condition that the reward is one of these built-in ones, or a function of the user, which reads any key."""
    return Condition(
        lambda config, section: built_in_of(section.function) in (None, *names),
        f"of the built-in rewards, only {' and '.join(names)} read{'s' if len(names) == 1 else ''} it",
        (".function",),
        is_error=True,
        variants=names,
    )


def regular_expression(value: Any) -> Any:
    """A regular expression, unchanged; any other value is left to the check of its type.

    Raises:
        ValueError: it cannot be compiled.
    """
    if isinstance(value, str):
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"{value!r} is not a regular expression: {error}") from None
    return value


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
JUDGE = belongs_to("llm_judge")


@dataclass
class CodeOptions:
    """How a program is taken from a response and run."""

    code_from: Literal["last_block", "whole"] = option(
        "last_block", "The program is the last block between ``` marks, or the whole response.", only_for=CODE
    )
    test_timeout_s: float = option(
        6.0, "Maximum seconds of one test of a program, of processor time and of wall time.", gt=0, only_for=CODE
    )
    memory_limit_mb: int = option(1024, "Maximum address space of a program in MiB.", ge=64, only_for=CODE)
    output_limit_kb: int = option(
        1024, "Maximum KiB that a program prints or returns in one test; a test with more fails.", ge=1, only_for=CODE
    )


DEFAULT_PROMPT_TEMPLATE = """Grade the response to a task.

Task:
{prompt}

Reference answer:
{ground_truth}

Response:
{response}

A response that is right and complete gets 10, one that is wrong gets 0. End with a line "Grade: " and the number."""


@dataclass
class JudgeOptions:
    """The endpoint of a judge, what it is asked, and how its grade is read."""

    base_url: str | None = option(
        None,
        "OpenAI-compatible endpoint, such as http://127.0.0.1:30000/v1; null asks the engines of role judge.",
        only_for=JUDGE,
    )
    model: str | None = option(None, "Name of the model at that endpoint.", only_for=(JUDGE, ENDPOINT_ASKED))
    api_key_env: str | None = option(
        None,
        "Environment variable with the key of the endpoint; null sends none.",
        only_for=(JUDGE, ENDPOINT_ASKED),
    )
    prompt_template: str = option(
        DEFAULT_PROMPT_TEMPLATE,
        "The question, with the fields {prompt}, {response} and {ground_truth}.",
        only_for=JUDGE,
    )
    grade_pattern: str = option(
        r"Grade:\W*(-?\d+(?:\.\d+)?|yes|no)",
        "Regular expression whose first group is the grade in the judge's answer, a number, yes or no, in any case; "
        "the last match counts.",
        parse=regular_expression,
        only_for=JUDGE,
    )
    max_grade: float = option(10.0, "Grade of a right answer; 0 is that of a wrong one.", gt=0, only_for=JUDGE)
    judge_temperature: float = option(0.0, "Sampling temperature of the judge.", ge=0, only_for=JUDGE)
    judge_max_tokens: int = option(1024, "Longest answer of the judge in tokens.", ge=1, only_for=JUDGE)
    max_retries: int = option(
        3,
        "Repeated requests after an error or an answer without a grade, before the sample fails.",
        ge=0,
        only_for=JUDGE,
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
        1.0, "Factor of this score; the score of a sample is the sum over all rewards that name its tag."
    )
    world_size: int = option(1, "Worker processes of this reward.", ge=1, only_for=FUNCTION_CALLED)
    process_memory_limit_mb: int = option(
        16384,
        "Maximum memory of a process of the reward in MiB (Linux: RLIMIT_DATA), and for a function of your own also of "
        "the process and all that it starts; a call beyond it fails.",
        ge=256,
    )
    child_process_limit: int = option(
        128,
        "Maximum processes that a process of the reward may have started at a time (Linux); beyond it they are killed, "
        "and the call fails.",
        ge=0,
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
    correct_score: float = option(1.0, "Score of a right answer.", only_for=SCORES_CHOSEN)
    wrong_score: float = option(0.0, "Score of a wrong answer.", only_for=SCORES_CHOSEN)
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


def truths_read(rewards: Mapping[str, RewardConfig], tag: str) -> dict[str, tuple[type, ...]]:
    """The built-in rewards that read the ground truth of prompts with a tag, and the types that it may have.

    A function of the user is not among them: it gets what the data has.
    """
    found = {}
    for reward in (rewards[name] for name in rewards_of(rewards, tag)):
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

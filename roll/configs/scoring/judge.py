"""The built-in reward llm_judge: the endpoint or the engines it asks, its question and how its grade is read."""

from __future__ import annotations

import os
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll.base.errors import Finding, error, missing
from roll.base.schema import Condition, option
from roll.configs.scoring.built_in_rewards import belongs_to, regular_expression, scoring_role

if TYPE_CHECKING:
    from roll.configs.scoring.rewards import RewardConfig


ENDPOINT_ASKED = Condition(
    lambda config, section: not (scoring_role(section) == "judge" and config.judge.device_mapping),
    "without base_url the judge is the model of role judge",
    (".base_url",),
)


DEFAULT_PROMPT_TEMPLATE = """Grade the response to a task.

Task:
{prompt}

Reference answer:
{ground_truth}

Response:
{response}

A response that is right and complete gets 10, one that is wrong gets 0. End with a line "Grade: " and the number."""


JUDGE = belongs_to("llm_judge")


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
    judge_temperature: float = option(0.0, "Sampling temperature of the judge.", ge=0, usual=(0.0, 5.0), only_for=JUDGE)
    judge_max_tokens: int = option(1024, "Longest answer of the judge in tokens.", ge=1, usual=(1, 1e6), only_for=JUDGE)
    max_retries: int = option(
        3,
        "Repeated requests after an error or an answer without a grade, before the sample fails.",
        ge=0,
        usual=(0, 1000),
        only_for=JUDGE,
    )


TEMPLATE_FIELDS = ("prompt", "response", "ground_truth")
"""Names in braces that `prompt_template` of a judge may have."""


def check_judge(path: str, reward: RewardConfig, has_engines: bool) -> Iterator[Finding]:
    """Something grades, and it is asked a question whose answer can be read."""
    if reward.base_url is None and not has_engines:
        yield missing(
            f"{path}.base_url",
            "a judge needs an OpenAI-compatible endpoint, such as base_url: http://127.0.0.1:30000/v1, or engines in "
            "the run: judge.model_args.model_name_or_path and judge.device_mapping",
        )
    if reward.base_url is not None and reward.model is None:
        yield missing(
            f"{path}.model", "an endpoint needs the name of its model, such as model: Qwen/Qwen2.5-72B-Instruct"
        )
    if reward.base_url is not None and not re.match(r"https?://[^/]", reward.base_url):
        yield error(f"{path}.base_url", f"{reward.base_url!r} is not an address; write http://host:port/v1")
    asks_endpoint = reward.base_url is not None or not has_engines
    if asks_endpoint and reward.api_key_env is not None and not os.environ.get(reward.api_key_env):
        yield missing(
            f"{path}.api_key_env",
            f"the environment variable {reward.api_key_env} is not set; export {reward.api_key_env}=...",
        )
    try:
        found = {name for _, name, _, _ in string.Formatter().parse(reward.prompt_template) if name is not None}
    except ValueError as reason:
        yield error(f"{path}.prompt_template", f"cannot be filled in: {reason}; write {{{{ and }}}} for braces")
        return
    unknown = sorted(found - set(TEMPLATE_FIELDS))
    if unknown:
        yield error(
            f"{path}.prompt_template",
            f"{{{unknown[0]}}} is not a field; known: {', '.join(f'{{{name}}}' for name in TEMPLATE_FIELDS)}; write "
            "{{ and }} for braces",
        )
    elif "response" not in found:
        yield error(f"{path}.prompt_template", "does not contain {response}, so every response gets the same grade")
    if re.compile(reward.grade_pattern).groups < 1:
        yield error(
            f"{path}.grade_pattern",
            f"{reward.grade_pattern!r} has no group for the grade; put it in parentheses, such as Grade: (\\d+)",
        )

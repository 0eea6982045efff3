"""Rewards: every entry scores something, entries for one tag can be added, and built-in rewards have what they need."""

from __future__ import annotations

import os
import re
import string
from collections.abc import Collection
from dataclasses import fields

from roll.base.errors import Report
from roll.configs.pipeline import RLConfig, RLVRConfig
from roll.configs.rewards import BUILT_IN, LARGEST_REWARD, RewardConfig, built_in_of, rewards_of, scoring_role
from roll.configs.roles import TEMPLATES
from roll.configs.rules.learning import check_name
from roll.configs.suggestions import nearest

TEMPLATE_FIELDS = ("prompt", "response", "ground_truth")
"""Names in braces that `prompt_template` of a judge may have."""

PENALTIES = ("regex", "reward_model")
"""Built-in rewards that may lower a score on purpose: what they find may be unwanted."""


def check_rewards(config: RLConfig, report: Report) -> None:
    """Every reward scores some samples, and names of classes and functions have the form `module:name`."""
    for key in (item.name for item in fields(config.async_training) if item.name.endswith("_class")):
        name = getattr(config.async_training, key)
        if name is not None and not _names_code(name):
            report.error(f"async_training.{key}", f"{name!r} is not the name of a class; write module:Class")
    if not isinstance(config, RLVRConfig):
        return
    if not config.rewards:
        report.error("rewards", "is empty, so nothing scores a response; describe one, such as math_rule: {}")
    for name, reward in config.rewards.items():
        _check_reward(f"rewards.{name}", reward, config, report)
    _check_catch_all(config, report)
    _check_sums(config, report)
    _check_domains(config, report)
    if config.uses_reward_parts:
        _check_per_reward(config, report)


def _check_catch_all(config: RLVRConfig, report: Report) -> None:
    """Only the first reward without `tag_included` can score anything."""
    first, *others = [name for name, reward in config.rewards.items() if not reward.tag_included] or [""]
    for name in others:
        report.error(
            f"rewards.{name}",
            f"scores nothing: rewards.{first} already scores every tag that no reward names; give tag_included to both "
            "to add their scores, or remove one of them; null removes that of a base file, such as "
            f"rewards.{first}: null",
        )


def _check_sums(config: RLVRConfig, report: Report) -> None:
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
            report.error(f"rewards.{names[0]}.weight", f"0 gives {tagged} a score of 0; give a reward another weight")
        largest = sum(
            abs(reward.weight) * max(abs(reward.correct_score), abs(reward.wrong_score))
            for reward in (rewards[name] for name in names)
        )
        if largest > LARGEST_REWARD:
            report.error(
                f"rewards.{names[0]}.weight",
                f"{tagged} have a score of up to {largest:g}; use weights and scores with a sum of {LARGEST_REWARD:g} "
                "at most, since training squares them",
            )
        _check_spread(names, config, tagged, report)
        if len(names) == 1:
            continue
        filters = [name for name in names if rewards[name].query_filter_config.type != "no_filter"]
        if len(filters) > 1:
            report.error(
                f"rewards.{filters[1]}.query_filter_config",
                f"{tagged} are filtered by {_all(filters)}; a filter reads the sum of all rewards of a tag, so "
                "keep one of them",
            )
        if not any(f"rewards.{name}.weight" in config.source.given for name in names):
            report.warn(
                f"rewards.{names[-1]}.tag_included",
                f"{tagged} are scored by {_all(names)}: their score is the sum; write weight: 1 to one of them if "
                "this is meant, or remove the tags from one",
            )


def _check_spread(names: Collection[str], config: RLVRConfig, tagged: str, report: Report) -> None:
    """Scores of a group can differ by more than `std_threshold`: at most, half are the lowest and half the highest."""
    rewards = [config.rewards[name] for name in names]
    if any(built_in_of(reward.function) in (None, "reward_model") for reward in rewards):
        return
    largest = sum(abs(reward.weight * (reward.correct_score - reward.wrong_score)) for reward in rewards) / 2
    for name in names:
        filters = config.rewards[name].query_filter_config
        threshold = filters.filter_args.std_threshold
        if filters.type == "std_filter" and threshold is not None and threshold >= largest > 0:
            report.warn(
                f"rewards.{name}.query_filter_config.filter_args.std_threshold",
                f"{threshold:g} drops every group: the scores of {tagged} have a standard deviation of at most "
                f"{largest:g}; use less",
            )


def _check_per_reward(config: RLVRConfig, report: Report) -> None:
    rewards = config.rewards
    tags = {tag for reward in rewards.values() for tag in reward.tag_included}
    if not any(sum(rewards[name].weight != 0 for name in rewards_of(rewards, tag)) > 1 for tag in tags):
        report.warn(
            "adv_estimator",
            f"{config.adv_estimator} normalises each reward of a response, but no tag has several: with equal weights "
            "this is grpo with advantages whitened over the batch; name a tag in tag_included of several rewards, or "
            "use grpo",
        )


def _all(names: Collection[str]) -> str:
    *others, last = (f"rewards.{name}" for name in names)
    return f"{', '.join(others)} and {last}" if others else last


def _check_domains(config: RLVRConfig, report: Report) -> None:
    """Prompts are drawn from domains that a reward scores, in shares above 0; no tag belongs to two of them."""
    shares, path = config.actor_train.data_args.domain_interleave_probs, "actor_train.data_args.domain_interleave_probs"
    for name, share in shares.items():
        if name not in config.rewards:
            report.error(f"{path}.{name}", f"is not in rewards; known: {', '.join(config.rewards)}")
        elif not 0 <= share < float("inf"):
            report.error(f"{path}.{name}", f"{share:g} is not a share; use 0 or more")
    if shares and not any(share > 0 for share in shares.values()):
        report.error(path, "gives no domain a share, so nothing is drawn; give one, such as math_rule: 1.0")
    ambiguous: dict[tuple[str, ...], list[str]] = {}
    for tag in dict.fromkeys(tag for reward in config.rewards.values() for tag in reward.tag_included):
        named = tuple(name for name in rewards_of(config.rewards, tag) if name in shares)
        if len(named) > 1:
            ambiguous.setdefault(named, []).append(tag)
    for names, tags in ambiguous.items():
        report.error(
            f"{path}.{names[1]}",
            f"prompts tagged {', '.join(tags)} belong to {' and '.join(names)}, whose scores are added, so it is not "
            f"clear how many are drawn; name one of them here, such as {names[0]}",
        )


def _check_reward(path: str, reward: RewardConfig, config: RLVRConfig, report: Report) -> None:
    given, judge = config.source.given, config.judge
    worker = (reward.worker_cls or "").rpartition(".")[2]
    if worker and f"{path}.function" not in given:
        report.missing_resource(
            f"{path}.function",
            f"no rule here does what {worker} does; write function: module:name, a function of response, ground truth "
            f"and config that returns the score, or remove {path} and the data with its tags",
        )
    built_in = built_in_of(reward.function)
    name = path.removeprefix("rewards.")
    similar = nearest(name, BUILT_IN)
    if f"{path}.function" not in given and not worker and name not in BUILT_IN and similar not in (None, built_in):
        report.warn(
            f"{path}.function",
            f"is not given and {name} is not a built-in reward, so {built_in} scores; write function: {similar} if "
            f"that is meant, else function: {built_in}",
        )
    if not _names_code(reward.function):
        file, _, name = reward.function.rpartition(":")
        stem = os.path.basename(file).removesuffix(".py")
        hint = f", here {stem}:{name}, with {stem}.py beside the YAML file" if file.endswith(".py") else ""
        known = "" if hint else f", or a built-in reward: {', '.join(BUILT_IN)}"
        like = nearest(reward.function, BUILT_IN)
        meant = f"did you mean {like}? " if like else ""
        report.error(
            f"{path}.function",
            f"{reward.function!r} is not the name of a function; {meant}write module:function{hint}{known}",
        )
    if scoring_role(reward) is not None and reward.template is not None:
        check_name(f"{path}.template", reward.template, TEMPLATES, report)
    if built_in not in (None, "reward_model") and reward.correct_score == reward.wrong_score:
        report.error(
            f"{path}.correct_score",
            f"{reward.correct_score:g} equals wrong_score, so every answer has the same score and nothing is learned; "
            "use two scores",
        )
    if built_in not in (None, *PENALTIES) and reward.correct_score < reward.wrong_score and reward.weight > 0:
        report.warn(
            f"{path}.correct_score",
            f"{reward.correct_score:g} is below wrong_score {reward.wrong_score:g}, so the policy learns to answer "
            "wrongly; swap them",
        )
    if built_in == "llm_judge":
        _check_judge(path, reward, bool(judge.device_mapping), report)


def _check_judge(path: str, reward: RewardConfig, has_engines: bool, report: Report) -> None:
    if reward.base_url is None and not has_engines:
        report.missing_resource(
            f"{path}.base_url",
            "a judge needs an OpenAI-compatible endpoint, such as base_url: http://127.0.0.1:30000/v1, or engines in "
            "the run: judge.model_args.model_name_or_path and judge.device_mapping",
        )
    if reward.base_url is not None and reward.model is None:
        report.missing_resource(
            f"{path}.model", "an endpoint needs the name of its model, such as model: Qwen/Qwen2.5-72B-Instruct"
        )
    if reward.base_url is not None and not re.match(r"https?://[^/]", reward.base_url):
        report.error(f"{path}.base_url", f"{reward.base_url!r} is not an address; write http://host:port/v1")
    asks_endpoint = reward.base_url is not None or not has_engines
    if asks_endpoint and reward.api_key_env is not None and not os.environ.get(reward.api_key_env):
        report.missing_resource(
            f"{path}.api_key_env",
            f"the environment variable {reward.api_key_env} is not set; export {reward.api_key_env}=...",
        )
    try:
        found = {name for _, name, _, _ in string.Formatter().parse(reward.prompt_template) if name is not None}
    except ValueError as error:
        report.error(f"{path}.prompt_template", f"cannot be filled in: {error}; write {{{{ and }}}} for braces")
        return
    unknown = sorted(found - set(TEMPLATE_FIELDS))
    if unknown:
        report.error(
            f"{path}.prompt_template",
            f"{{{unknown[0]}}} is not a field; known: {', '.join(f'{{{name}}}' for name in TEMPLATE_FIELDS)}; write "
            "{{ and }} for braces",
        )
    elif "response" not in found:
        report.error(f"{path}.prompt_template", "does not contain {response}, so every response gets the same grade")
    if re.compile(reward.grade_pattern).groups < 1:
        report.error(
            f"{path}.grade_pattern",
            f"{reward.grade_pattern!r} has no group for the grade; put it in parentheses, such as Grade: (\\d+)",
        )


def _names_code(name: str) -> bool:
    module, colon, attribute = name.partition(":")
    parts = module.split(".")
    return bool(colon and attribute.isidentifier() and all(map(str.isidentifier, parts)) and parts[-1] != "py")

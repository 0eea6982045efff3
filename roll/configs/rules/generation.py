"""Generation: bounds on running ahead, waits, query filters and rewards."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import fields

from roll.configs.agentic import AgenticConfig
from roll.configs.asynchronous import max_batches_ready, versions_ahead
from roll.configs.compat.roll import MATH_RULES
from roll.configs.errors import Report
from roll.configs.pipeline import QueryFilterConfig, RewardConfig, RLConfig, RLVRConfig, Source

FILTER_ARGUMENTS = {
    "no_filter": (),
    "mean_filter": ("threshold_up", "threshold_down"),
    "std_filter": ("std_threshold",),
}
"""Thresholds of each type of query filter."""


def check_asynchronous(config: RLConfig, report: Report) -> None:
    """Staleness, queue and batches agree with the ratio; query filters keep something."""
    _check_staleness(config, report)
    _check_repeatable(config, report)
    _check_queue(config, report)
    _check_waits(config, report)
    if isinstance(config, RLVRConfig):
        for name, reward in config.rewards.items():
            path = f"rewards.{name}.query_filter_config"
            _check_filter(path, reward.query_filter_config, config.num_return_sequences_in_group, config.source, report)


def _check_staleness(config: RLConfig, report: Report) -> None:
    ratio, allowed = config.async_generation_ratio, config.async_training.max_staleness_allowed
    least = versions_ahead(config.async_generation_ratio)
    if allowed is not None and allowed < least:
        report.error(
            "async_training.max_staleness_allowed",
            f"{allowed} would drop samples that async_generation_ratio {ratio:g} admits, up to {least} "
            f"version(s) old; use at least {least}, or a ratio of at most {allowed}",
        )
    if config.async_training.rollouter == "inline" and ratio > 0:
        report.error(
            "async_training.rollouter",
            f"inline generates each batch on request, so nothing runs ahead and async_generation_ratio "
            f"{ratio:g} has no effect; use auto, or a ratio of 0",
        )
    if ratio > max(1, config.max_steps - 1):
        report.warn(
            "async_generation_ratio",
            f"{ratio:g} batches ahead are more than remain in a run of max_steps {config.max_steps}; anything above "
            f"{config.max_steps - 1} has no further effect",
        )


def _check_repeatable(config: RLConfig, report: Report) -> None:
    if config.deterministic and config.async_generation_ratio > 0:
        report.error(
            "deterministic",
            f"true is not possible at async_generation_ratio {config.async_generation_ratio:g}: which weights sample "
            "a token depends on timing; use a ratio of 0, or false",
        )


def _check_queue(config: RLConfig, report: Report) -> None:
    asynchronous = config.async_training
    batches, most = asynchronous.min_batch_count, max_batches_ready(config.async_generation_ratio)
    if batches > most:
        report.error(
            "async_training.min_batch_count",
            f"{batches} batches are never ready at a time: async_generation_ratio {config.async_generation_ratio:g} "
            f"admits {most}; use at most {most}, or a ratio of at least {batches - 1}",
        )
    samples, queue = config.samples_per_batch, asynchronous.max_queue_size
    unit, product = "samples", f" x num_return_sequences_in_group {config.num_return_sequences_in_group} = {samples}"
    if isinstance(config, AgenticConfig):
        samples, unit, product = config.rollout_batch_size, "trajectories", ""
    if queue is not None and queue < batches * samples:
        report.error(
            "async_training.max_queue_size",
            f"{queue} {unit} cannot hold {batches} batch(es) of rollout_batch_size {config.rollout_batch_size}"
            f"{product}, so no batch would ever be ready; use at least {batches * samples}",
        )


def _check_waits(config: RLConfig, report: Report) -> None:
    asynchronous = config.async_training
    if asynchronous.batch_deadline_s < asynchronous.batch_timeout_s:
        report.error(
            "async_training.batch_deadline_s",
            f"{asynchronous.batch_deadline_s:g} ends the run before batch_timeout_s {asynchronous.batch_timeout_s:g} "
            "reports the requests it waits for; use a longer one",
        )
    longest = config.actor_infer.generation_timeout_s
    age = asynchronous.max_sample_age_s
    if age is not None and age < longest and config.async_generation_ratio > 0:
        report.warn(
            "async_training.max_sample_age_s",
            f"{age:g} s is less than actor_infer.generation_timeout_s {longest:g} s, so a response that takes longer "
            "is generated in vain; use at least that, or lower generation_timeout_s",
        )
    if config.in_flight_policy == "drain" and config.sync_timeout_s < longest:
        report.warn(
            "sync_timeout_s",
            f"{config.sync_timeout_s:g} s limits a weight update, and in_flight_policy drain first waits for "
            f"requests of up to actor_infer.generation_timeout_s {longest:g} s; use at least that",
        )


def _check_filter(path: str, config: QueryFilterConfig, group: int, source: Source, report: Report) -> None:
    arguments = config.filter_args
    for name in ("threshold_up", "threshold_down", "std_threshold"):
        if getattr(arguments, name) is not None and name not in FILTER_ARGUMENTS[config.type]:
            owner = next(kind for kind, names in FILTER_ARGUMENTS.items() if name in names)
            where, message = f"{path}.filter_args.{name}", f"belongs to type {owner}, but type is {config.type}"
            report.unused(where, message, is_error=not source.made_moot(where, [f"{path}.type"]))
    low, high = arguments.threshold_down, arguments.threshold_up
    if config.type == "mean_filter" and low is None and high is None:
        report.error(
            f"{path}.type",
            "mean_filter without thresholds drops nothing; give filter_args, such as threshold_down: 0.1, "
            "threshold_up: 0.9",
        )
    if config.type == "std_filter" and group == 1:
        report.error(
            f"{path}.type",
            "std_filter drops every group, since num_return_sequences_in_group 1 leaves a standard deviation of 0; use "
            "at least 2, or another type",
        )
    if low is not None and high is not None and low >= high:
        report.error(
            f"{path}.filter_args",
            f"no mean score lies between threshold_down {low:g} and threshold_up {high:g}; "
            "threshold_down must be the smaller",
        )


def _check_domains(config: RLVRConfig, report: Report) -> None:
    """Prompts are drawn from domains that a reward scores, in shares above 0."""
    shares, path = config.actor_train.data_args.domain_interleave_probs, "actor_train.data_args.domain_interleave_probs"
    for name, share in shares.items():
        if name not in config.rewards:
            report.error(f"{path}.{name}", f"is not in rewards; known: {', '.join(config.rewards)}")
        elif not 0 <= share < float("inf"):
            report.error(f"{path}.{name}", f"{share:g} is not a share; use 0 or more")
    if shares and not any(share > 0 for share in shares.values()):
        report.error(path, "gives no domain a share, so nothing is drawn; give one, such as math_rule: 1.0")


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
    _check_domains(config, report)
    owner_by_tag: dict[str, str] = {}
    everything = ""
    for name, reward in config.rewards.items():
        _check_reward(f"rewards.{name}", reward, config.source.given, report)
        owners = (
            [everything] if everything else [owner_by_tag[tag] for tag in reward.tag_included if tag in owner_by_tag]
        )
        if everything or (owners and len(owners) == len(reward.tag_included)):
            tags = "every tag is" if everything else "its tags are"
            others = list(dict.fromkeys(owners))
            report.error(
                f"rewards.{name}",
                f"scores nothing: {tags} already scored by {' and '.join(others)}; change tag_included there, or "
                f"remove one of them; null removes that of a base file, such as {others[0]}: null; to add scores, "
                "write one function that returns their sum",
            )
        owner_by_tag = {**dict.fromkeys(reward.tag_included, f"rewards.{name}"), **owner_by_tag}
        if not reward.tag_included:
            everything = everything or f"rewards.{name}"


def _check_reward(path: str, reward: RewardConfig, given: Collection[str], report: Report) -> None:
    worker = (reward.worker_cls or "").rpartition(".")[2]
    if worker and worker not in MATH_RULES and f"{path}.function" not in given:
        report.missing_resource(
            f"{path}.function",
            f"no rule here does what {worker} does; write function: module:name, a function of response, ground truth "
            f"and config that returns the score, or remove {path} and the data with its tags",
        )
    if not _names_code(reward.function):
        file, _, name = reward.function.rpartition(":")
        stem = os.path.basename(file).removesuffix(".py")
        hint = f", here {stem}:{name}, with {stem}.py beside the YAML file" if file.endswith(".py") else ""
        report.error(
            f"{path}.function", f"{reward.function!r} is not the name of a function; write module:function{hint}"
        )
    if reward.function == RewardConfig().function and reward.correct_score == reward.wrong_score:
        report.error(
            f"{path}.correct_score",
            f"{reward.correct_score:g} equals wrong_score, so every answer has the same score and nothing is learned; "
            "use two scores",
        )


def _names_code(name: str) -> bool:
    """Whether a name has the form `module:name`; one with the ending of a file has not."""
    module, colon, attribute = name.partition(":")
    parts = module.split(".")
    return bool(colon and attribute.isidentifier() and all(map(str.isidentifier, parts)) and parts[-1] != "py")

"""The checks of a configuration: those of every subject, and those that need several.

A check is a function of the options of a subject, in the file that declares them. It yields findings, and never starts
or imports an engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from roll.algorithms.options.advantage_options import check_advantages
from roll.algorithms.options.correction_options import check_correction
from roll.algorithms.options.policy_options import check_policy
from roll.algorithms.options.preference_options import check_preferences
from roll.algorithms.options.shaping_options import check_shaping
from roll.base.errors import Finding, Report, error, warning
from roll.base.schema import YEAR_S, keys_along, value_at
from roll.configs.agentic import AgenticConfig, check_agentic
from roll.configs.arguments import LOWEST_TEMPERATURE, check_sampling
from roll.configs.asynchronous import check_asynchronous
from roll.configs.devices.device_use import check_device_use, check_reward_model_devices, check_shared_devices
from roll.configs.devices.megatron import check_kernels, check_megatron
from roll.configs.devices.sglang_options import check_engine_options
from roll.configs.devices.system_envs import check_variables
from roll.configs.environments import TryEnvironment, check_entries
from roll.configs.files.folders import check_files
from roll.configs.files.model_files import check_engine_lengths, check_models, check_tokenizers
from roll.configs.learning.batch_sizes import check_batch, check_training
from roll.configs.learning.lora import check_adapter_updates, check_lora, check_lora_model
from roll.configs.learning.rounding import check_mismatch
from roll.configs.pipeline import BaseConfig, DPOConfig, RLConfig, RLVRConfig
from roll.configs.roles import DEVICE_ROLES, MegatronRoleConfig
from roll.configs.run_options import check_weight_update
from roll.configs.scoring.rewards import check_rewards
from roll.configs.scoring.scoring_roles import ScoringEngineConfig, check_scoring_engine
from roll.configs.trackers import TRACKER_OPTIONS, check_trackers

SHORTEST_TIMEOUT_S = 0.01
"""Shortest timeout that anything can keep; shorter ones fail every call."""

LEAST_TEMPERATURE = 0.1
"""Lowest sampling temperature of samples that are trained on that is not warned of."""

TINY = 1e-30
"""Numbers closer to 0 vanish in single precision."""

OFF_AT_ZERO = re.compile(r"\b0 (is off|turns it off)")
"""In the help of a key whose feature the value 0 turns off."""

LARGEST_NODE = 16
"""Devices of the largest usual machine; more are CPU slots, or a slip."""


LEARNING = (
    check_advantages,
    check_policy,
    check_mismatch,
    check_asynchronous,
    check_correction,
    check_shaping,
    check_sampling,
    check_adapter_updates,
    check_weight_update,
)
"""What is checked of a reinforcement learning run."""


def check(config: BaseConfig) -> Report:
    """All findings about a loaded configuration: those of its keys, and those about this machine and the platform.

    The keys were checked when it was loaded. Files are looked at again, since a model may have been fetched meanwhile.
    """
    report = Report()
    report.include(config.source.report)
    report.add(_check_resources(config))
    return report


def check_keys(config: BaseConfig, report: Report, try_environment: TryEnvironment | None = None) -> None:
    """Adds the findings about the keys of a configuration whose defaults are filled in."""
    report.add(warning(path, message) for path, message in config.source.notes)
    report.add(_check_roles(config))
    if not any(problem.path.startswith("actor_train.") for problem in report.errors):
        report.add(check_batch(config))
    if isinstance(config, RLConfig):
        for check_subject in LEARNING:
            report.add(check_subject(config))
    if isinstance(config, RLVRConfig):
        report.add(check_rewards(config))
    if isinstance(config, DPOConfig):
        report.add(check_preferences(config))
    if isinstance(config, AgenticConfig):
        report.add(check_entries(config.custom_envs, try_environment))
        report.add(check_agentic(config))
    report.add(check_trackers(config.track_with, config.tracker_kwargs, config.source))
    report.add(_check_numbers(config))
    report.add(_check_unused_keys(config))


def _check_roles(config: BaseConfig) -> Iterator[Finding]:
    yield from check_device_use(config)
    if isinstance(config, RLConfig):
        yield from check_shared_devices(config)
    if isinstance(config, RLVRConfig):
        yield from check_reward_model_devices(config)
    for role, worker in _engines(config):
        path, options = f"{role}.strategy_args.strategy_config", worker.strategy_args.strategy_config
        if isinstance(worker, MegatronRoleConfig):
            yield from check_megatron(path, options, worker.model_args)
        else:
            yield from check_engine_options(role, options, isinstance(worker, ScoringEngineConfig))
        if isinstance(worker, ScoringEngineConfig):
            yield from check_scoring_engine(role, worker)
    if not isinstance(config, AgenticConfig):
        yield from _check_data(config)
    yield from check_training(config)
    yield from check_lora(config)


def _engines(config: BaseConfig) -> Iterator[tuple[str, Any]]:
    """The trained policy, and the roles with devices, also those that nothing uses."""
    for role in DEVICE_ROLES:
        worker = getattr(config, role, None)
        if worker is not None and (role == "actor_train" or worker.device_mapping):
            yield role, worker


def _check_data(config: BaseConfig) -> Iterator[Finding]:
    if config.eval_steps and not config.validation.data_args.file_name:
        yield error(
            "validation.data_args.file_name",
            f"is empty, but eval_steps is {config.eval_steps}; set a file, or eval_steps: 0",
        )
    if config.source.needs_data and not config.actor_train.data_args.file_name:
        yield error("actor_train.data_args.file_name", "is empty; set the JSONL or parquet files to train on")


def _check_resources(config: BaseConfig) -> Iterator[Finding]:
    """Models, data and folders of this machine, its environment, and what the platform has."""
    for role, worker in _engines(config):
        if isinstance(worker, MegatronRoleConfig):
            options = worker.strategy_args.strategy_config
            yield from check_kernels(role, options, worker.model_args, on_cpu=config.platform == "cpu")
    variables = {f"{role}.system_envs": worker.system_envs for role, worker in config.device_roles().items()}
    yield from check_variables({"system_envs": config.system_envs, **variables})
    yield from check_engine_lengths(config)
    yield from check_models(config)
    yield from check_lora_model(config)
    yield from check_tokenizers(config)
    yield from check_files(config)


def _check_numbers(config: BaseConfig) -> Iterator[Finding]:
    """Refuses times longer than a year or too short for anything, and warns of numbers far from what anyone uses."""
    for path in config.source.given:
        value, name = value_at(config, path), path.rpartition(".")[2]
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if name.endswith("_s") and value > YEAR_S:
            yield error(path, f"{value:g} s is longer than a year; use at most {YEAR_S:.0f}")
        elif name.endswith(("timeout_s", "_deadline_s")) and value < SHORTEST_TIMEOUT_S:
            yield error(path, f"{value:g} s is over before anything can answer; use at least {SHORTEST_TIMEOUT_S}")
        elif 0 < abs(value) < TINY:
            yield warning(path, f"{value:g} is too small for single precision; use 0, or at least {TINY:g}")
        elif path == "actor_infer.generating_args.temperature" and LOWEST_TEMPERATURE <= value < LEAST_TEMPERATURE:
            yield warning(
                path, f"{value:g} makes nearly all samples of a prompt equal; use at least {LEAST_TEMPERATURE}"
            )
        else:
            yield from _check_usual(config, path, value)
    count = config.num_devices_per_node or 0
    highest = max((max(worker.device_mapping, default=0) for worker in config.device_roles().values()), default=0)
    if count > max(LARGEST_NODE, 2 * (highest + 1)):
        yield warning("num_devices_per_node", f"{count}, but devices 0 to {highest} are used; write {highest + 1}")


def _check_usual(config: BaseConfig, path: str, value: float) -> Iterator[Finding]:
    root, _, rest = path.partition(".")
    if root == "tracker_kwargs":
        keys = keys_along(TRACKER_OPTIONS[rest.partition(".")[0]], rest.partition(".")[2])
    else:
        keys = keys_along(type(config), path.replace(".env_config.max_steps", ".max_steps"))
    _, key = keys[-1]
    if key.path != path.rpartition(".")[2]:
        return  # an option of an engine or of an environment
    usual = key.field.metadata["usual"]
    if usual is None or (value == 0 and OFF_AT_ZERO.search(key.field.metadata["help"])):
        return
    least, largest = usual
    if not least <= value <= largest:
        yield warning(path, f"{value:g} is unusual: usual values are between {least:g} and {largest:g}")


def _check_unused_keys(config: BaseConfig) -> Iterator[Finding]:
    """Keys with a value other than the default that have no effect, by the `only_for` of their declarations."""
    defaults = type(config)()
    for path in config.source.given:
        if value_at(config, path) == value_at(defaults, path):
            continue
        for head, key in reversed(keys_along(type(config), path)):
            section = value_at(config, head) if head else config
            unmet = next((item for item in key.field.metadata["only_for"] if not item.holds(config, section)), None)
            if unmet is None:
                continue
            causes = [f"{head}{cause}".lstrip(".") if cause.startswith(".") else cause for cause in unmet.causes]
            yield config.source.unused(path, f"has no effect: {unmet.reason}", causes, unmet.is_error)
            break

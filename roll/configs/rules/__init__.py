"""Rules between keys: one module per subject, each rule a function of the configuration that writes into a report.

Rules read the configuration and, for models, a config.json; they never start or import an engine.
"""

from __future__ import annotations

from roll.base.errors import Report
from roll.base.schema import keys_along, value_at
from roll.configs.agentic import AgenticConfig
from roll.configs.pipeline import BaseConfig, DPOConfig, RLConfig
from roll.configs.rules import agentic, devices, files, generation, learning, ranges, rewards, shaping


def check(config: BaseConfig) -> Report:
    """The findings of all rules about a configuration that loading has completed."""
    report = Report()
    for path, message in config.source.notes:
        report.warn(path, message)
    for path, message in config.source.unset:
        report.missing_resource(path, message)
    devices.check_devices(config, report)
    devices.check_engines(config, report)
    devices.check_training(config, report)
    if not any(problem.path.startswith("actor_train.") for problem in report.errors):
        devices.check_batch(config, report)
    if isinstance(config, RLConfig):
        learning.check_algorithm(config, report)
        generation.check_asynchronous(config, report)
        learning.check_policy(config, report)
        shaping.check_shaping(config, report)
        learning.check_sampling(config, report)
        rewards.check_rewards(config, report)
    if isinstance(config, DPOConfig):
        learning.check_preferences(config, report)
    if isinstance(config, AgenticConfig):
        agentic.check_groups(config, report)
        agentic.check_agentic(config, report)
        agentic.check_environments(config, report)
    ranges.check_ranges(config, report)
    ranges.check_node(config, report)
    ranges.check_variables(config, report)
    ranges.check_engine_lengths(config, report)
    check_unused_keys(config, report)
    files.check_models(config, report)
    files.check_tokenizers(config, report)
    files.check_files(config, report)
    return report


def check_unused_keys(config: BaseConfig, report: Report) -> None:
    """Reports keys with a value other than the default that have no effect, by the `only_for` of their declarations.

    A key of the file that has no effect only because of an override is a warning.
    """
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
            is_error = unmet.is_error and not config.source.unused_by_override(path, causes)
            report.unused(path, f"has no effect: {unmet.reason}", is_error)
            break

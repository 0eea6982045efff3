"""Cross-field rules: one module per subject, each rule a function of the configuration that writes into a report.

Rules read the configuration and, for models, a config.json where there is one; they never start or import an engine.
"""

from __future__ import annotations

from roll.configs.agentic import AgenticConfig
from roll.configs.errors import Report
from roll.configs.pipeline import BaseConfig, RLConfig
from roll.configs.rules import (
    agentic,
    algorithm,
    asynchronous,
    batch,
    devices,
    engines,
    environments,
    files,
    groups,
    inert,
    model,
    policy,
    rewards,
    sampling,
)


def check(config: BaseConfig) -> Report:
    """Everything the rules say about a configuration that loading has completed."""
    report = Report()
    for path, message in config.source.notes:
        report.warn(path, message)
    devices.check_devices(config, report)
    engines.check_engines(config, report)
    batch.check_training(config, report)
    if not any(problem.path.startswith("actor_train.") for problem in report.errors):
        batch.check_batch(config, report)
    if isinstance(config, RLConfig):
        algorithm.check_algorithm(config, report)
        asynchronous.check_asynchronous(config, report)
        policy.check_policy(config, report)
        sampling.check_sampling(config, report)
        rewards.check_rewards(config, report)
    if isinstance(config, AgenticConfig):
        groups.check_groups(config, report)
        agentic.check_agentic(config, report)
        environments.check_environments(config, report)
    inert.check_inert(config, report)
    model.check_models(config, report)
    files.check_files(config, report)
    return report

"""What must hold on this machine before a run may start."""

from __future__ import annotations

from roll.configs.errors import ConfigError
from roll.configs.machine import Machine, this_machine
from roll.configs.pipeline import BaseConfig
from roll.configs.rules import check
from roll.configs.rules.devices import check_fits_machine, check_nodes


def prepare_run(config: BaseConfig, machine: Machine | None = None) -> list[str]:
    """Settles `platform: auto` by what this machine has, and asks for everything a run needs.

    Returns:
        Warnings to show before the run starts.

    Raises:
        ConfigError: a model, dataset or checkpoint is missing, the devices are not there, or the run needs something
            that cannot be run yet.
    """
    machine = machine or this_machine()
    if config.platform == "auto":
        config.platform = "cuda" if machine.gpus else "cpu"
    report = check(config)
    check_fits_machine(config, machine, report)
    per_node = config.num_devices_per_node or (machine.cores if config.platform == "cpu" else machine.gpus)
    if per_node and not report.errors:
        check_nodes(config, per_node, report)
    problems = report.errors + report.missing
    if problems:
        raise ConfigError(problems, config.source.file)
    return [str(warning) for warning in report.warnings]

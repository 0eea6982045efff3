"""Environments that exist and take the options they are given."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from roll.configs.agentic import AgenticConfig
from roll.configs.errors import ConfigError, Report

ENVIRONMENTS = "roll.envs.registry"
"""Has `make_env`. Environments are built on this folder, so they are looked up by name, as a file's own are."""


def check_environments(config: AgenticConfig, report: Report) -> None:
    """Makes one environment of each entry, which costs little, and passes on what is said against it."""
    if not config.custom_envs:
        report.error("custom_envs", "is empty, so there is nothing to play; describe one, such as Lake: {}")
        return
    make_env: Callable[..., Any] = import_module(ENVIRONMENTS).make_env
    for tag, entry in config.custom_envs.items():
        try:
            make_env(entry.env_type, entry.env_config, f"custom_envs.{tag}")
        except ConfigError as error:
            for problem in error.problems:
                report.error(problem.path, problem.message)

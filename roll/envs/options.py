"""Reads options of environments and tools from plain mappings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

from roll.base.errors import ConfigError, Problem
from roll.base.schema import Converter, declared
from roll.base.text import nearest
from roll.loading.suggestions import unknown


class Checkable(Protocol):
    """A dataclass of options with a check between them."""

    def check(self) -> Iterable[Problem]:
        """See `EnvConfig.check`."""


Options = TypeVar("Options", bound=Checkable)


def read_config(config_class: type[Options], env_config: Mapping[str, Any], path: str = "", more: str = "") -> Options:
    """Options of an environment: the values of `env_config`, and defaults for the rest.

    Errors name `path`, that of the section in the file; that of an unknown option ends with `more`. Every field of
    `config_class` has a default.

    Raises:
        ConfigError: lists every unknown option, wrong type and value out of bounds with its path; if there are none,
            the problems between options.
    """
    converter = Converter(partial(_unknown_option, more))
    config = converter.overlay(env_config, config_class(), path)
    problems = converter.problems
    if not problems:
        prefix = f"{path}." if path else ""
        problems = [Problem(prefix + problem.path, problem.message) for problem in config.check()]
    if problems:
        raise ConfigError(problems)
    return config


def choices(name: str, known: Iterable[str]) -> str:
    """Text for an error about a name that is not in `known`: the nearest name, and all of them."""
    names = list(known)
    like = nearest(name, names)
    return f"{f'did you mean {like}? ' if like else ''}known: {', '.join(names)}"


def _unknown_option(more: str, path: str, section: type, value: Any) -> list[Problem]:
    return [unknown(path, choices(path.rpartition(".")[2], declared(section)) + more)]

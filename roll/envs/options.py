"""An `env_config` section as checked options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeVar

from roll.configs.errors import ConfigError, Problem
from roll.configs.schema import Converter, declared
from roll.configs.suggestions import nearest, unknown


class Checkable(Protocol):
    """Options that know what does not go together."""

    def check(self) -> Iterable[Problem]:
        """Problems whose path is an option's name."""


Options = TypeVar("Options", bound=Checkable)


def read_config(config_class: type[Options], env_config: Mapping[str, Any], path: str = "") -> Options:
    """Options of an environment, from what the YAML says and defaults for the rest.

    Args:
        config_class: the dataclass of the options; all fields have defaults.
        env_config: option names and values; not changed.
        path: where the section stands, for errors, such as `custom_envs.Lake.env_config`.

    Raises:
        ConfigError: every unknown option, wrong type and value out of bounds, with the path; when there is none, what
            does not go together.
    """
    converter = Converter(_suggest)
    config = converter.overlay(env_config, config_class(), path)
    problems = converter.problems
    if not problems:
        prefix = f"{path}." if path else ""
        problems = [Problem(prefix + problem.path, problem.message) for problem in config.check()]
    if problems:
        raise ConfigError(problems)
    return config


def choices(name: str, known: Iterable[str]) -> str:
    """What could have been meant by a name that is none of `known`, and all that is known."""
    names = list(known)
    like = nearest(name, names)
    return f"{f'did you mean {like}? ' if like else ''}known: {', '.join(names)}"


def _suggest(path: str, section: type, value: Any) -> list[Problem]:
    return [unknown(path, choices(path.rpartition(".")[2], declared(section)))]

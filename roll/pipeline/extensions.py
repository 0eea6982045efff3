"""Parts of a run that a configuration replaces by naming a class."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from roll.configs.errors import ConfigError, Problem
from roll.configs.pipeline import BaseConfig, RLConfig


def _rollouter() -> type:
    from roll.pipeline.rollouter import Rollouter

    return Rollouter


def _learner() -> type:
    from roll.pipeline.learner import RLLearner

    return RLLearner


def _metrics() -> type:
    from roll.trackers.base import Metrics

    return Metrics


def _monitor() -> type:
    from roll.pipeline.health import Monitor

    return Monitor


BASES: dict[str, Callable[[], type]] = {
    "rollouter_class": _rollouter,
    "trainer_class": _learner,
    "metrics_class": _metrics,
    "monitor_class": _monitor,
}
"""Key of `async_training` -> what its class must be; imported only where the key is given, since it brings torch."""


@dataclass(frozen=True)
class Extensions:
    """The classes a configuration names; None where it names none."""

    rollouter: type | None = None
    trainer: type | None = None
    metrics: type | None = None
    monitor: type | None = None


def load_extensions(config: BaseConfig) -> Extensions:
    """Imports every class that `async_training` names.

    Raises:
        ConfigError: a module cannot be imported, or a class is missing or of another kind.
    """
    if not isinstance(config, RLConfig):
        return Extensions()
    found: dict[str, type] = {}
    problems: list[Problem] = []
    for key, base in BASES.items():
        name = getattr(config.async_training, key)
        if name is None:
            continue
        try:
            found[key.removesuffix("_class")] = load_class(name, base())
        except ValueError as error:
            problems.append(Problem(f"async_training.{key}", str(error)))
    if problems:
        raise ConfigError(problems, config.source.file)
    return Extensions(**found)


def load_class(name: str, base: type) -> type:
    """The class `module:Class`, which must be a subclass of `base` (or have its methods, if that is a protocol).

    Modules are looked for in the current folder too, which the command `roll` by itself does not search.

    Raises:
        ValueError: with what is wrong, and what the module does offer.
    """
    module_name, colon, class_name = name.partition(":")
    if not (module_name and colon and class_name):
        raise ValueError(f"{name!r} names no class; write module:Class")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(f"{name}: importing {module_name} failed: {error!r}") from error
    found: Any = getattr(module, class_name, None)
    if _fits(found, base):
        return found
    own = [value for value in vars(module).values() if getattr(value, "__module__", None) == module_name]
    offered = [value.__name__ for value in own if _fits(value, base)]
    there = f"is not in {module_name}" if found is None else f"is not a {base.__module__}.{base.__name__}"
    hint = f"; it has {', '.join(offered)}" if offered else ""
    raise ValueError(f"{name}: {class_name} {there}{hint}")


def _fits(found: Any, base: type) -> bool:
    """Whether it is a class that can be made and used as a `base`."""
    return isinstance(found, type) and issubclass(found, base) and not getattr(found, "_is_protocol", False)

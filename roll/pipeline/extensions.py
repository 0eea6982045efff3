"""User-defined classes that a configuration names in place of built-in ones."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from roll.configs.errors import ConfigError, Problem
from roll.configs.pipeline import BaseConfig, RLConfig
from roll.configs.user_code import failure_text

if TYPE_CHECKING:
    from roll.pipeline.health import Monitor
    from roll.pipeline.learner import RLLearner
    from roll.pipeline.rollouter import Rollouter
    from roll.pipeline.training_loop import BatchHook
    from roll.trackers.base import Metrics


def _rollouter() -> type[Rollouter]:
    from roll.pipeline.rollouter import Rollouter

    return Rollouter


def _learner() -> type[RLLearner]:
    from roll.pipeline.learner import RLLearner

    return RLLearner


def _metrics() -> type[Metrics]:
    from roll.trackers.base import Metrics

    return Metrics


def _monitor() -> type[Monitor]:
    from roll.pipeline.health import Monitor

    return Monitor


def _batch_hook() -> type[BatchHook]:
    from roll.pipeline.training_loop import BatchHook

    return BatchHook


BASES: dict[str, Callable[[], type]] = {
    "rollouter_class": _rollouter,
    "trainer_class": _learner,
    "metrics_class": _metrics,
    "monitor_class": _monitor,
    "batch_hook_class": _batch_hook,
}
"""Key of `async_training` -> base class or protocol; imported only where the key is given, since it imports torch."""


@dataclass(frozen=True)
class Extensions:
    """The classes a configuration names; None where it names none."""

    rollouter: type[Rollouter] | None = None
    trainer: type[RLLearner] | None = None
    metrics: Callable[[BaseConfig], Metrics] | None = None
    monitor: Callable[[BaseConfig], Monitor] | None = None
    batch_hook: Callable[[BaseConfig], BatchHook] | None = None


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
            found[key] = load_class(name, base())
        except ValueError as error:
            problems.append(Problem(f"async_training.{key}", str(error)))
    if problems:
        raise ConfigError(problems, config.source.file)
    return Extensions(
        rollouter=cast("type[Rollouter] | None", found.get("rollouter_class")),
        trainer=cast("type[RLLearner] | None", found.get("trainer_class")),
        metrics=cast("Callable[[BaseConfig], Metrics] | None", found.get("metrics_class")),
        monitor=cast("Callable[[BaseConfig], Monitor] | None", found.get("monitor_class")),
        batch_hook=cast("Callable[[BaseConfig], BatchHook] | None", found.get("batch_hook_class")),
    )


def load_class(name: str, base: type) -> type:
    """The class `module:Class`, which must be a subclass of `base`, or have its methods if `base` is a protocol.

    Raises:
        ValueError: the name is wrong; the message lists the classes of the module that fit.
    """
    module_name, colon, class_name = name.partition(":")
    if not (module_name and colon and class_name):
        raise ValueError(f"{name!r} is not of the form module:Class")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(f"{name}: importing {module_name} failed: {failure_text(error)}") from error
    found: object = getattr(module, class_name, None)
    if isinstance(found, type) and _fits(found, base):
        return found
    own = [value for value in vars(module).values() if getattr(value, "__module__", None) == module_name]
    offered = [value.__name__ for value in own if isinstance(value, type) and _fits(value, base)]
    problem = f"is not in {module_name}" if found is None else f"is not a {base.__module__}.{base.__name__}"
    hint = f"; it has {', '.join(offered)}" if offered else ""
    raise ValueError(f"{name}: {class_name} {problem}{hint}")


def _fits(found: type, base: type) -> bool:
    """Whether the class can be constructed and used as a `base`."""
    return issubclass(found, base) and not getattr(found, "_is_protocol", False)

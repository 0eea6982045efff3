"""User-defined classes that a configuration names in place of built-in ones."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roll.base.errors import ConfigError, Problem, RunError
from roll.configs.asynchronous import AsyncOptions
from roll.configs.run_options import ProcessOptions
from roll.configs.user_code import UserCodeError, import_named

if TYPE_CHECKING:
    from roll.base.timers import StepClock
    from roll.pipeline.health import Monitor
    from roll.pipeline.learning.learner import RLLearner
    from roll.pipeline.parts import BatchHook
    from roll.rollout.rollouter import Rollouter
    from roll.rollout.source import SampleBatch
    from roll.trackers.base import Metrics


BASES = {
    "rollouter_class": "roll.rollout.rollouter:Rollouter",
    "trainer_class": "roll.pipeline.learning.learner:RLLearner",
    "metrics_class": "roll.trackers.base:Metrics",
    "monitor_class": "roll.pipeline.health:Monitor",
    "batch_hook_class": "roll.pipeline.parts:BatchHook",
}
"""Key of `async_training` -> base class or protocol; imported only where the key is given, since it imports torch."""


@dataclass(frozen=True)
class Extensions:
    """The classes a configuration names, made with that configuration; None where it names none."""

    rollouter: type[Rollouter] | None = None
    trainer: type[RLLearner] | None = None
    metrics: Callable[[Any], Metrics] | None = None
    monitor: Callable[[Any], Monitor] | None = None
    batch_hook: Callable[[Any], BatchHook] | None = None


def load_extensions(config: ProcessOptions) -> Extensions:
    """Imports every class that `async_training` names.

    Raises:
        ConfigError: a module cannot be imported, or a class is missing or of another kind.
    """
    if not isinstance(config, AsyncOptions):
        return Extensions()
    found: dict[str, Any] = {}
    problems: list[Problem] = []
    for key, base in BASES.items():
        name = getattr(config.async_training, key)
        if name is None:
            continue
        try:
            found[key.removesuffix("_class")] = load_class(name, base)
        except ValueError as error:
            problems.append(Problem(f"async_training.{key}", str(error)))
    if problems:
        raise ConfigError(problems, config.source.file)
    return Extensions(**found)


def load_class(name: str, base: str) -> type:
    """The class `module:Class`, which must be a subclass of `base`, or have its methods if `base` is a protocol.

    Raises:
        ValueError: the name is wrong; the message lists the classes of the module that fit.
    """
    wanted: type = import_named(base, lambda value: isinstance(value, type))[1]
    try:
        found: type = import_named(name, lambda value: isinstance(value, type) and _fits(value, wanted))[1]
    except UserCodeError as error:
        needed = "" if error.missing else f" (needed: a {base.replace(':', '.')})"
        raise ValueError(f"{error}{needed}") from error
    return found


def _fits(found: type, base: type) -> bool:
    return issubclass(found, base) and not getattr(found, "_is_protocol", False)


def call_hook(hook: BatchHook | None, batch: SampleBatch, step: int, clock: StepClock) -> dict[str, float]:
    """`batch_hook/...` of the user's hook, if there is one.

    Raises:
        RunError: it failed, or it added or removed samples.
    """
    if hook is None:
        return {}
    name, samples = type(hook).__name__, len(batch.data)
    with clock.measure("batch_hook"):
        try:
            metrics = dict(hook.before_learning(batch, step) or {})
            metrics = {f"batch_hook/{key}": float(value) for key, value in metrics.items()}
        except Exception as error:
            cause = f"{_line_of_hook(error)}{error!r}"
            raise RunError(f"async_training.batch_hook_class: {name} failed in step {step}: {cause}") from error
    if len(batch.data) != samples:
        raise RunError(
            f"async_training.batch_hook_class: {name} changed the batch of step {step} from {samples} to "
            f"{len(batch.data)} samples, which do not fill its optimizer steps; to leave a sample out of the loss, "
            "set its response_mask to false"
        )
    return metrics


def _line_of_hook(error: Exception) -> str:
    """File and line of the hook's own code where an error came from; empty if the hook could not be called."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f"{own[-1].filename}, line {own[-1].lineno}: " if own else ""

"""The side of a reward process: imports the reward function once and scores chunks of samples."""

from __future__ import annotations

import importlib
import math
import numbers
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import parent_process
from types import ModuleType
from typing import Any, Literal

from roll.configs.pipeline import RewardConfig

Item = tuple[str, str]
"""(response, ground truth)."""

SelfTest = tuple[tuple[str, str, bool], ...]
"""(response, ground truth, whether the response is right) of known samples; a module offers them as SELF_TEST."""

RewardFunction = Callable[[str, str, RewardConfig], float]
"""function(response, ground_truth, config) -> score."""

Reason = Literal["raised", "timeout", "not_finite", "wrong_type"]

DETAIL_LENGTH = 200
"""Longest error text that is returned to the driver, in characters."""


class RewardFunctionError(ValueError):
    """The configured reward function does not exist or cannot be imported."""


@dataclass(frozen=True)
class RewardOutcome:
    """The score of a sample, or the reason why it has none; a failure is never a score of zero.

    Attributes:
        score: the reward, or None.
        reason: None if there is a score. `raised`: the function raised or its process died; `timeout`: it passed its
            deadline; `not_finite`: it returned NaN or infinity; `wrong_type`: it did not return one number.
        detail: one line for the log.
    """

    score: float | None
    reason: Reason | None = None
    detail: str = ""


class _Loaded:
    """The reward function of this process; `error` is set if it could not be loaded."""

    config: RewardConfig
    function: RewardFunction
    module: ModuleType | None = None
    error: str | None = None


def start(config: RewardConfig) -> None:
    """Initializes a reward process: ends it with its parent, imports the function, calls `warm_up` of its module.

    An error is kept for `probe`, because the pool would start processes forever if the initializer raised.
    """
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _Loaded.config = config
    try:
        _Loaded.module, _Loaded.function = load_reward_function(config.function)
        if hasattr(_Loaded.module, "warm_up"):
            _Loaded.module.warm_up()
    except Exception as error:
        _Loaded.error = str(error) if isinstance(error, RewardFunctionError) else f"{config.function}: {error!r}"


def probe() -> tuple[str | None, SelfTest]:
    """The error of `start`, or None, and SELF_TEST of the reward's module, if it has one."""
    return _Loaded.error, tuple(getattr(_Loaded.module, "SELF_TEST", ()))


def score_chunk(items: Sequence[Item]) -> list[RewardOutcome]:
    """One outcome per item, in order. An exception affects only its own item."""
    return [_score(response, ground_truth) for response, ground_truth in items]


def load_reward_function(name: str) -> tuple[ModuleType, RewardFunction]:
    """Imports `module:function`.

    Raises:
        RewardFunctionError: with the reason, and the functions that the module has.
    """
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise RewardFunctionError(f"reward function {name!r}: write module:function")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise RewardFunctionError(f"reward function {name!r}: importing {module_name} failed: {error!r}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise RewardFunctionError(
            f"reward function {name!r}: {module_name} has no function {attribute}; it has {', '.join(functions)}"
        )
    return module, function


def _score(response: str, ground_truth: str) -> RewardOutcome:
    try:
        return _outcome_of(_Loaded.function(response, ground_truth, _Loaded.config))
    except (Exception, SystemExit) as error:
        return RewardOutcome(None, "raised", f"{type(error).__name__}: {error}"[:DETAIL_LENGTH])


def _outcome_of(value: Any) -> RewardOutcome:
    """Outcome of a returned value: a finite real number is a score, everything else a failure."""
    if not isinstance(value, numbers.Real):
        size = f" of length {len(value)}" if hasattr(value, "__len__") else ""
        return RewardOutcome(None, "wrong_type", f"returned {type(value).__name__}{size}, not one number")
    if not math.isfinite(value):
        return RewardOutcome(None, "not_finite", f"returned {value}")
    return RewardOutcome(float(value))


def _exit_with_parent() -> None:
    """Ends this process when the driver has ended for any reason, even while a reward function hangs."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)

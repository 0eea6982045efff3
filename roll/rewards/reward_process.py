"""What became of one sample's reward, and the judgement of what a reward function returned."""

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

Reason = Literal["raised", "timeout", "not_finite", "wrong_type"]


@dataclass(frozen=True)
class RewardOutcome:
    """A score, or why there is none; a failure is never a score of zero.

    Attributes:
        score: the reward, or None.
        reason: why there is no score: the function `raised` (or its process died), passed its deadline (`timeout`),
            returned NaN or infinity (`not_finite`), or something that is not one number (`wrong_type`).
        detail: one line for the log.
    """

    score: float | None
    reason: Reason | None = None
    detail: str = ""


def judge(value: Any) -> RewardOutcome:
    """The outcome of a returned value: one finite real number is a score, anything else a failure."""
    if not isinstance(value, numbers.Real):
        size = f" of length {len(value)}" if hasattr(value, "__len__") else ""
        return RewardOutcome(None, "wrong_type", f"returned {type(value).__name__}{size}, not one number")
    if not math.isfinite(value):
        return RewardOutcome(None, "not_finite", f"returned {value}")
    return RewardOutcome(float(value))


Item = tuple[str, str]
"""(response, ground truth)."""

DETAIL_LENGTH = 200
"""Characters of an error that travel back: enough for a log line."""

RewardFunction = Callable[[str, str, RewardConfig], float]


class RewardFunctionError(ValueError):
    """The configured reward function does not exist, or cannot be imported."""


def resolve(name: str) -> tuple[ModuleType, RewardFunction]:
    """Module and function of `module:function`.

    Raises:
        RewardFunctionError: with what is wrong and what the module does offer.
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
        offered = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise RewardFunctionError(
            f"reward function {name!r}: {module_name} has no function {attribute}; it has {', '.join(offered)}"
        )
    return module, function


class _Loaded:
    """The reward of this process; `error` instead of `function` when it could not be resolved."""

    config: RewardConfig
    function: RewardFunction
    module: ModuleType | None = None
    error: str | None = None


def start(config: RewardConfig) -> None:
    """Initializer of a process: ends it with its parent, resolves the function, and calls the module's `warm_up`.

    An error is kept for `probe` to report: raised here it would only make the pool start processes for ever.
    """
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _Loaded.config = config
    try:
        _Loaded.module, _Loaded.function = resolve(config.function)
        if hasattr(_Loaded.module, "warm_up"):
            _Loaded.module.warm_up()
    except Exception as error:
        _Loaded.error = str(error) if isinstance(error, RewardFunctionError) else f"{config.function}: {error!r}"


def probe() -> tuple[str | None, tuple[tuple[str, str, bool], ...]]:
    """What went wrong in `start` (None: nothing), and the module's SELF_TEST pairs if it offers any."""
    return _Loaded.error, tuple(getattr(_Loaded.module, "SELF_TEST", ()))


def score_chunk(items: Sequence[Item]) -> list[RewardOutcome]:
    """One outcome per item, in order; whatever a sample does to its reward stays with that sample."""
    return [_score(response, ground_truth) for response, ground_truth in items]


def _score(response: str, ground_truth: str) -> RewardOutcome:
    try:
        return judge(_Loaded.function(response, ground_truth, _Loaded.config))
    except (Exception, SystemExit) as error:
        return RewardOutcome(None, "raised", f"{type(error).__name__}: {error}"[:DETAIL_LENGTH])


def _die_with_parent() -> None:
    """Ends this process, hanging reward and all, when the driver is gone, however it went."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)

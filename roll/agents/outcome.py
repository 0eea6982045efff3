"""Checks of what an agent returns, or of the last line that a program prints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from numbers import Real
from typing import Any

from roll.agents.agent import Result
from roll.configs.scoring.rewards import LARGEST_REWARD, is_trainable
from roll.configs.user_code import definition_of
from roll.envs.base import RESERVED_METRICS

SHOWN_OUTPUT = 200
"""Characters of a wrong last line that are shown."""


class OutcomeError(ValueError):
    """What an agent returned or printed is no result."""


def checked_result(found: Any, run: Any = None) -> Result:
    """The result that `run` returned, with plain numbers.

    Raises:
        OutcomeError: it is none; the message begins with the file and line of `run`.
    """
    problem = _problem(found)
    if problem:
        raise OutcomeError(f"{definition_of(run)}: {problem}".removeprefix(": "))
    return Result(float(found.reward), {name: float(value) for name, value in found.metrics.items()})


def _problem(found: Any) -> str:
    if not isinstance(found, Result):
        return f"run returned {'None' if found is None else f'a {type(found).__name__}'}; return Result(reward=1.0)"
    if not isinstance(found.reward, Real):
        return f"the reward is {type(found.reward).__name__}, not a number"
    if not is_trainable(found.reward):
        return f"the reward is {found.reward}; it must be at most {LARGEST_REWARD:g} in size"
    if not isinstance(found.metrics, Mapping):
        return f"the metrics are {type(found.metrics).__name__}; return a dict of numbers"
    for name, value in found.metrics.items():
        if not isinstance(name, str):
            return f"the metrics have the name {name!r}; use text"
        if name in RESERVED_METRICS:
            return f"the metrics have {name!r}, which a run reports itself; use another name"
        if not isinstance(value, Real) or not is_trainable(value):
            return f"the metric {name} is {value!r}; it must be a finite number"
    return ""


def result_of_line(line: str) -> Result:
    """The result in the last line that a program printed: `{"reward": 1.0}`, with "metrics" if it likes.

    Raises:
        OutcomeError: it holds none.
    """
    wanted = 'print {"reward": 1.0} as the last line'
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        shown = line if len(line) <= SHOWN_OUTPUT else f"{line[:SHOWN_OUTPUT]}..."
        raise OutcomeError(f"the last line of its output is {shown!r}; {wanted}") from None
    if not isinstance(found, dict) or "reward" not in found or found.keys() - {"reward", "metrics"}:
        raise OutcomeError(f"the last line of its output is {line[:SHOWN_OUTPUT]!r}; {wanted}")
    return checked_result(Result(found["reward"], found.get("metrics") or {}))

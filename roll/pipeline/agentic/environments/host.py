"""The worker's side of the pool of environments: makes them, resets them, steps them. Imports no torch."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from roll.distributed.processes import end_with_parent, print_to
from roll.envs import TextEnv, make_env
from roll.pipeline.agentic.environments.types import Opened, Raised, Stepped

AnswerT = TypeVar("AnswerT")


class EnvHost:
    """Many environments in one process; every call runs in a thread of its own, so one that hangs delays no other.

    Of one environment there is one call at a time. One that raises is dropped, whatever it raised: `sys.exit` in an
    environment is its own failure, not the end of the process.
    """

    def __init__(self, log: str | None) -> None:
        """Ends with its parent; what environments print goes to the log, where there is one."""
        end_with_parent()
        if log is not None:
            print_to(log)
        self._envs: dict[int, TextEnv] = {}

    def open(self, key: int, env_type: str, env_config: Mapping[str, Any], seed: int) -> Opened | Raised:
        """Makes an environment and resets it."""
        return self._guarded(key, lambda: self._reset(key, env_type, env_config, seed))

    def step(self, key: int, text: str) -> Stepped | Raised:
        """What the action leads to."""
        return self._guarded(key, lambda: _step(self._envs[key], text))

    def replay(
        self, key: int, env_type: str, env_config: Mapping[str, Any], seed: int, actions: Sequence[str]
    ) -> tuple[Opened, list[Stepped]] | Raised:
        """Makes an environment, resets it and takes these actions."""

        def play() -> tuple[Opened, list[Stepped]]:
            opened = self._reset(key, env_type, env_config, seed)
            return opened, [_step(self._envs[key], text) for text in actions]

        return self._guarded(key, play)

    def close(self, key: int) -> Raised | None:
        """Closes an environment; one that is not here is closed already."""
        env = self._envs.get(key)
        answer = self._guarded(key, env.close) if env is not None else None
        self._envs.pop(key, None)
        return answer

    def _reset(self, key: int, env_type: str, env_config: Mapping[str, Any], seed: int) -> Opened:
        env = make_env(env_type, env_config)
        self._envs[key] = env
        observation, _ = env.reset(seed=seed)
        return Opened(_text(env.instruction, "instruction"), _text(observation, "observation"), dict(env.METRICS))

    def _guarded(self, key: int, answer: Callable[[], AnswerT]) -> AnswerT | Raised:
        try:
            return answer()
        except BaseException as error:
            traceback.print_exc(file=sys.stderr)
            self._envs.pop(key, None)
            frame = traceback.extract_tb(error.__traceback__)[-1]
            return Raised(f"{type(error).__name__}: {error}", f"{frame.filename}:{frame.lineno} in {frame.name}")


def _step(env: TextEnv, text: str) -> Stepped:
    observation, reward, terminated, truncated, info = env.step(text)
    if not math.isfinite(reward):
        raise ValueError(f"{type(env).__name__}.step: the reward is {reward}")
    metrics = {name: float(value) for name, value in info["metrics"].items()}
    return Stepped(_text(observation, "observation"), float(reward), bool(terminated), bool(truncated), metrics)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"the {what} is {type(value).__name__}, not text")
    return str(value)

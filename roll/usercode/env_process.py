"""The side of a process of environments: makes, resets and steps them. Imports no torch, so it starts quickly."""

from __future__ import annotations

import faulthandler
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

from roll.configs.scoring.rewards import LARGEST_REWARD, is_trainable
from roll.configs.user_code import failure_text
from roll.envs import TextEnv, make_env
from roll.envs.base import Aggregation
from roll.usercode.containment import contain
from roll.usercode.server import CallError

P = ParamSpec("P")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class ResetResult:
    """Result of a reset; `metric_rules` is that of `TextEnv`: how values of a metric are aggregated over an episode."""

    instruction: str
    observation: str
    metric_rules: Mapping[str, Aggregation]


@dataclass(frozen=True)
class StepResult:
    """Result of a step; fields as `TextEnv.step` returns them. Comparison ignores the metrics."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    metrics: Mapping[str, float] = field(compare=False)


class EnvServer:
    """The environments of one process, by key.

    Methods are called from several threads at a time, but for each environment by one. An environment that raises is
    removed, and the exception, also a SystemExit, which must not end the process, becomes a CallError.
    """

    def __init__(self) -> None:
        self._envs: dict[int, TextEnv] = {}

    def __len__(self) -> int:
        return len(self._envs)

    def open(self, key: int, env_type: str, env_config: Mapping[str, Any], seed: int) -> ResetResult:
        return self.replay(key, env_type, env_config, seed, ())[0]

    def replay(
        self, key: int, env_type: str, env_config: Mapping[str, Any], seed: int, actions: Sequence[str]
    ) -> tuple[ResetResult, list[StepResult]]:
        """Makes an environment, resets it with `seed` and repeats the actions of an episode."""
        with self._removed_if_it_raises(key):
            env = self._envs[key] = make_env(env_type, env_config)
            observation = _text(env.reset(seed=seed)[0], "observation")
            reset = ResetResult(_text(env.instruction, "instruction"), observation, dict(env.metric_rules))
            return reset, [_step(env, text) for text in actions]

    def step(self, key: int, text: str) -> StepResult:
        with self._removed_if_it_raises(key):
            return _step(self._envs[key], text)

    def close(self, key: int) -> None:
        """Closes an environment; does nothing for a key that is not here."""
        with self._removed_if_it_raises(key):
            if key in self._envs:
                self._envs[key].close()
                del self._envs[key]

    @contextmanager
    def _removed_if_it_raises(self, key: int) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            traceback.print_exc(file=sys.stderr)
            self._envs.pop(key, None)
            raise CallError(failure_text(error)) from error


SERVER = EnvServer()


def contain_environments() -> None:
    """Contains a process of environments; SIGUSR1 prints the stack of every thread."""
    contain(adopt=False)  # nothing waits for the exit codes of orphans
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def serve_call(method: Callable[Concatenate[EnvServer, P], ResultT], *args: P.args, **kwargs: P.kwargs) -> ResultT:
    return method(SERVER, *args, **kwargs)


def _step(env: TextEnv, text: str) -> StepResult:
    observation, reward, terminated, truncated, info = env.step(text)
    if not is_trainable(reward):
        limit = f"at most {LARGEST_REWARD:g} in size"
        raise ValueError(f"{type(env).__name__}.step: the reward is {reward}, it must be {limit}")
    metrics = {name: float(value) for name, value in info["metrics"].items()}
    return StepResult(_text(observation, "observation"), float(reward), bool(terminated), bool(truncated), metrics)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"the {name} is {type(value).__name__}, not text")
    return str(value)

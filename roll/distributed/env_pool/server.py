"""The side of a worker process: makes, resets and steps environments. Imports no torch, so it starts quickly."""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from roll.configs.rewards import LARGEST_REWARD, is_trainable
from roll.configs.user_code import users_frame
from roll.distributed.env_pool.types import EnvError, ResetResult, StepResult
from roll.distributed.processes import end_with_parent, print_to
from roll.distributed.rpc_batching import RpcActor
from roll.envs import TextEnv, make_env
from roll.usercode.containment import WATCH_INTERVAL_S, start_watchdog

ResultT = TypeVar("ResultT")


class EnvServer:
    """The environments of one worker process, by key.

    Methods are called from several threads at a time, but for each environment by one. An environment that raises is
    removed and the exception returned as an `EnvError`; that includes `SystemExit`, which must not end the process.
    """

    def __init__(self) -> None:
        self._envs: dict[int, TextEnv] = {}

    def __len__(self) -> int:
        return len(self._envs)

    def open(self, key: int, env_type: str, env_config: Mapping[str, Any], seed: int) -> ResetResult | EnvError:
        """Makes an environment and resets it with `seed`."""
        return self._guarded(key, lambda: self._reset(key, env_type, env_config, seed))

    def step(self, key: int, text: str) -> StepResult | EnvError:
        """Steps an environment with the text that the model wrote."""
        return self._guarded(key, lambda: _step(self._envs[key], text))

    def replay(
        self, key: int, env_type: str, env_config: Mapping[str, Any], seed: int, actions: Sequence[str]
    ) -> tuple[ResetResult, list[StepResult]] | EnvError:
        """Makes an environment, resets it with `seed` and repeats the actions of an episode."""

        def repeat() -> tuple[ResetResult, list[StepResult]]:
            reset = self._reset(key, env_type, env_config, seed)
            return reset, [_step(self._envs[key], text) for text in actions]

        return self._guarded(key, repeat)

    def close(self, key: int) -> EnvError | None:
        """Closes an environment; does nothing for a key that is not here."""
        env = self._envs.get(key)
        error = self._guarded(key, env.close) if env is not None else None
        self._envs.pop(key, None)
        return error

    def _reset(self, key: int, env_type: str, env_config: Mapping[str, Any], seed: int) -> ResetResult:
        env = make_env(env_type, env_config)
        self._envs[key] = env
        observation, _ = env.reset(seed=seed)
        return ResetResult(_text(env.instruction, "instruction"), _text(observation, "observation"), dict(env.METRICS))

    def _guarded(self, key: int, call: Callable[[], ResultT]) -> ResultT | EnvError:
        try:
            return call()
        except BaseException as error:
            traceback.print_exc(file=sys.stderr)
            self._envs.pop(key, None)
            frame = users_frame(error) or traceback.extract_tb(error.__traceback__)[-1]
            return EnvError(f"{type(error).__name__}: {error}", f"{frame.filename}:{frame.lineno} in {frame.name}")


class EnvActor(RpcActor):
    """Ray actor around an `EnvServer`. Each call runs in a thread, so an environment that hangs delays no other."""

    def __init__(self, capacity: int, log: str | None) -> None:
        """Args as in `RayEnvWorker`. The process ends with the one that started it, and what it starts with it."""
        end_with_parent()
        start_watchdog(interval_s=WATCH_INTERVAL_S)
        if log is not None:
            print_to(log)
        os.environ.pop("PYTHONSAFEPATH", None)  # for scripts that an environment starts
        self._env_server = EnvServer()
        self._threads = ThreadPoolExecutor(capacity)
        super().__init__(self._run)

    async def process_id(self) -> int:
        """The process id."""
        return os.getpid()

    async def _run(self, method: str, *args: Any) -> Any:
        if method == "watch":  # never returns, so the call fails when the process ends
            await asyncio.Event().wait()
        return await asyncio.get_running_loop().run_in_executor(self._threads, getattr(self._env_server, method), *args)


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

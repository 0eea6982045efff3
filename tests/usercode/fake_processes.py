"""Processes of environments that are no processes, and an event loop whose clock jumps to the next deadline."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from roll.usercode.env_process import ResetResult, StepResult
from roll.usercode.process import ProcessEndedError
from roll.usercode.server import CallError


class Processes:
    """Launches processes and keeps all of them."""

    def __init__(self, before_exit: Callable[[FakeProcess], None] = lambda process: None) -> None:
        self.all: list[FakeProcess] = []
        self.before_exit = before_exit
        self.waits_end = False

    def answer_waiting(self) -> None:
        """Answers the calls whose action was `wait`, and later ones at once while `waits_end`."""
        self.waits_end = True
        for process in self.all:
            process.answer_waiting()

    def launch(self) -> FakeProcess:
        self.all.append(FakeProcess(len(self.all), self))
        return self.all[-1]

    @property
    def alive(self) -> list[FakeProcess]:
        return [process for process in self.all if not process.ended]


class FakeProcess:
    """A process whose environments count their steps and do what the action says: raise, hang, exit, wait, or go.

    An environment of type `not_reproducible` observes the number of its process, so its episode cannot be replayed.
    """

    def __init__(self, number: int, processes: Processes) -> None:
        self.pid, self.processes = number, processes
        self.envs: dict[int, list[int]] = {}
        self.open_calls: list[tuple[asyncio.Future[Any], Any]] = []
        self.ended = self.killed = self.joined = self.stopped = False
        self.calls = 0
        self.ready: Future[None] = Future()
        self.ready.set_result(None)

    @property
    def alive(self) -> bool:
        return not self.ended

    def call(self, function: Any, method: Any, *args: Any) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        if self.ended:
            future.set_exception(ProcessEndedError(3))
            return future
        self.calls += 1
        own = getattr(self, method.__name__)
        action = args[1] if method.__name__ in ("step", "open") else ""
        if action == "exit":
            self.processes.before_exit(self)
            self.die()
            future.set_exception(ProcessEndedError(3))
        elif self.stopped or action == "hang" or (action == "wait" and not self.processes.waits_end):
            self.open_calls.append((future, own(*args) if action == "wait" else None))
        else:
            try:
                future.set_result(own(*args))
            except CallError as error:
                future.set_exception(error)
        return future

    def is_stopped(self) -> bool:
        return self.stopped and not self.ended

    def kill(self) -> None:
        self.killed = True
        self.die()

    def join(self) -> None:
        assert self.killed
        self.joined = True

    def die(self) -> None:
        self.ended = True
        for future, _ in self.open_calls:
            if not future.done():
                future.set_exception(ProcessEndedError(-9))

    def answer_waiting(self) -> None:
        """Answers the calls whose action was `wait`."""
        for future, answer in self.open_calls:
            if answer is not None and not future.done():
                future.set_result(answer)

    def open(self, key: int, env_type: str, env_config: dict[str, Any], seed: int) -> ResetResult:
        if env_type == "raise":
            raise CallError("env.py:1: ValueError: no")
        self.envs[key] = [seed, 0]
        return ResetResult("rules", f"{seed} on {self.pid}" if env_type == "not_reproducible" else f"{seed}", {})

    def step(self, key: int, text: str) -> StepResult:
        if text == "raise":
            del self.envs[key]
            raise CallError("env.py:2: ValueError: no")
        env = self.envs[key]
        env[1] += 1
        return StepResult(f"{env[0]} after {env[1]} with {text}", 0.0, False, False, {})

    def replay(
        self, key: int, env_type: str, env_config: dict[str, Any], seed: int, actions: Sequence[str]
    ) -> tuple[Any, list[Any]]:
        reset = self.open(key, env_type, env_config, seed)
        return reset, [self.step(key, text) for text in actions]

    def close(self, key: int) -> None:
        self.envs.pop(key, None)


LONGEST_S = 1e4
"""What takes longer waits for something that does not happen, since a pool looks at its workers again and again."""


class JumpingSelector(selectors.SelectSelector):
    """Advances the clock instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            assert timeout is not None and self.now < LONGEST_S, "all tasks wait without a deadline"
            self.now += max(0.0, timeout)
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop in which waiting takes no real time."""

    def __init__(self) -> None:
        self.jumping = JumpingSelector()
        super().__init__(self.jumping)

    def time(self) -> float:
        return self.jumping.now

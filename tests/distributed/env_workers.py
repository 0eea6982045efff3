"""Environment workers without processes, and an event loop whose clock jumps to the next deadline."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Sequence
from typing import Any

from roll.distributed.env_pool.types import EnvError, ResetResult, StepResult


class Ended(Exception):
    """A call to a process that has ended."""


class Workers:
    """Launches workers and keeps all of them."""

    worker_class: type[FakeWorker]

    def __init__(self, before_exit: Callable[[FakeWorker], None] = lambda worker: None) -> None:
        self.all: list[FakeWorker] = []
        self.before_exit = before_exit
        self.waits_end = False

    def answer_waiting(self) -> None:
        """Answers the calls whose action was `wait`, and later ones at once while `waits_end`."""
        self.waits_end = True
        for worker in self.all:
            worker.answer_waiting()

    def launch(self) -> FakeWorker:
        worker = self.worker_class(len(self.all), self.before_exit)
        worker.workers = self
        self.all.append(worker)
        return worker

    @property
    def alive(self) -> list[FakeWorker]:
        return [worker for worker in self.all if not worker.ended]


class FakeWorker:
    """A worker whose environments count their steps and do what the action says: raise, hang, exit, wait, or go.

    An environment of type `not_reproducible` observes the number of its worker, so its episode cannot be replayed.
    """

    def __init__(self, number: int, before_exit: Callable[[FakeWorker], None]) -> None:
        self.number, self.before_exit = number, before_exit
        self.envs: dict[int, list[int]] = {}
        self.open_calls: list[tuple[asyncio.Future[Any], Any]] = []
        self.ended = self.killed = self.joined = self.stopped = False
        self.calls = 0
        self.workers = Workers()

    async def ready(self) -> None:
        if self.ended:
            raise Ended

    def call(self, method: str, *args: Any) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        if self.ended:
            future.set_exception(Ended())
            return future
        self.calls += 1
        action = args[1] if method in ("step", "open") else ""
        if action == "exit":
            self.before_exit(self)
            self.die()
            future.set_exception(Ended())
        elif self.stopped or action == "hang" or (action == "wait" and not self.workers.waits_end) or method == "watch":
            answer = getattr(self, method)(*args) if action == "wait" else None
            self.open_calls.append((future, answer))
        else:
            future.set_result(getattr(self, method)(*args))
        return future

    def exit_reason(self, error: BaseException) -> str | None:
        return "exit requested" if isinstance(error, Ended) else None

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
                future.set_exception(Ended())

    def answer_waiting(self) -> None:
        """Answers the calls whose action was `wait`."""
        for future, answer in self.open_calls:
            if answer is not None and not future.done():
                future.set_result(answer)

    def open(self, key: int, env_type: str, env_config: dict[str, Any], seed: int) -> ResetResult | EnvError:
        if env_type == "raise":
            return EnvError("ValueError: no", "env.py:1 in reset")
        self.envs[key] = [seed, 0]
        return ResetResult("rules", f"{seed} on {self.number}" if env_type == "not_reproducible" else f"{seed}", {})

    def step(self, key: int, text: str) -> StepResult | EnvError:
        if text == "raise":
            del self.envs[key]
            return EnvError("ValueError: no", "env.py:2 in step")
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


Workers.worker_class = FakeWorker


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

"""Test setup of agents: engines whose responses depend on the request alone, and environments in this process."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from examples.tiny_math.prepare import make_tokenizer
from roll.configs.pipeline import role_seed
from roll.datasets.stop_strings import text_until_stop
from roll.datasets.templates import ConversationEncoder
from roll.envs.base import EnvConfig, TextEnv, Turn
from roll.rollout.agents.episode import Episode, Task
from roll.rollout.agents.runner import RolloutRunner
from roll.rollout.engine_pool import EnginePool
from roll.rollout.types import GenerateRequest, GenerateResult, SamplingParams
from roll.usercode.env_pool import EnvPool, EnvSpec
from roll.usercode.env_process import EnvServer
from tests.usercode.fake_processes import JumpingLoop

SAMPLING = SamplingParams(max_new_tokens=64)
STEP_TIMEOUT_S = 10.0
TRAJECTORY_TIMEOUT_S = 100.0


class Steps(TextEnv):
    """`gold` gives reward 1 and terminates, `fall` terminates, `boom` raises, anything else gives a small reward.

    Two `treasure` are more than training can hold.
    """

    config_class = EnvConfig
    METRICS = {"letters": "sum", "gold": "last"}

    def rules(self) -> str:
        return "Walk."

    def begin(self) -> str:
        return f"start {int(self.np_random.integers(1000))}"

    def act(self, text: str) -> Turn:
        if "boom" in text:
            raise ArithmeticError("the ground gave way")
        gold = "gold" in text
        metrics = {"letters": float(len(text)), "gold": float(gold)}
        if "treasure" in text:
            return Turn("saw too much", 0.6e18, metrics=metrics)
        return Turn(f"saw {text}", 1.0 if gold else 0.125, gold or "fall" in text, metrics)


class InThisProcess:
    """A process of environments that is this one; it answers after `pause(method, *arguments)` seconds."""

    pid, ended, alive = 0, False, True

    def __init__(self, pause: Callable[..., float]) -> None:
        self.server, self.pause = EnvServer(), pause
        self.ready: Future[None] = Future()
        self.ready.set_result(None)

    def call(self, function: Any, method: Any, *args: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._answer(method, *args))

    async def _answer(self, method: Any, *args: Any) -> Any:
        await asyncio.sleep(self.pause(method.__name__, *args))
        return method(self.server, *args)

    def is_stopped(self) -> bool:
        return False

    def kill(self) -> None:
        pass

    join = kill


def one_of(*texts: str) -> Callable[[GenerateRequest], str]:
    """The response follows from prompt and seed, as in a deterministic engine."""
    return lambda request: texts[role_seed(request.seed or 0, request.prompt_ids) % len(texts)]


def in_turn(*texts: str) -> Callable[[GenerateRequest], str]:
    """The first text in the first turn, and so on; the name of a request ends with its turn."""
    return lambda request: texts[int(request.request_id.rpartition("-")[2])]


@dataclass
class Engines:
    """Responds with the text of `respond`, cut at the limit of the request; `None` is an abort."""

    respond: Callable[[GenerateRequest], str | None]
    seconds: Callable[[GenerateRequest], float] = lambda request: 0.0
    world_size: int = 1
    version: int = 0
    calls: list[list[GenerateRequest]] = field(default_factory=list)
    by_engine: Counter[int] = field(default_factory=Counter)

    async def generate(self, rank: int, requests: list[GenerateRequest]) -> list[GenerateResult]:
        self.calls.append(requests)
        self.by_engine[rank] += len(requests)
        await asyncio.sleep(max(map(self.seconds, requests)))
        return [await self.answer(request) for request in requests]

    async def answer(self, request: GenerateRequest) -> GenerateResult:
        text = self.respond(request)
        if text is None:
            return GenerateResult(request.request_id, [], [], [], "abort", error="out of memory")
        tokens = tokenizer()
        whole = [*tokens.encode(text, add_special_tokens=False), tokens.eos_token_id]
        ids = whole[: request.sampling.max_new_tokens]
        log_probs = [-0.25 - index / 64 for index in range(len(ids))]
        reason = "stop" if ids == whole else "length"
        return GenerateResult(request.request_id, ids, log_probs, [self.version] * len(ids), reason)

    @property
    def requests(self) -> list[GenerateRequest]:
        return [request for call in self.calls for request in call]


@cache
def tokenizer() -> Any:
    return make_tokenizer()


@cache
def chat() -> ConversationEncoder:
    return ConversationEncoder(tokenizer(), "native")


def decode(ids: list[int], stops: tuple[str, ...] = ()) -> str:
    return text_until_stop(str(tokenizer().decode(ids, skip_special_tokens=True)), stops)


def task(
    env_type: str = "tests.rollout.agents.agent_setup:Steps", max_steps: int = 3, max_tokens: int = 32, **options: Any
) -> Task:
    spec = EnvSpec(env_type, {"max_steps": max_steps, **options})
    return Task("Steps", spec, max_steps, max_tokens, "", "{turn_idx}: {observation}")


class Setup:
    """An environment pool and a runner; `open` counts environments that are not closed."""

    def __init__(
        self,
        engines: Engines,
        pause: Callable[..., float] = lambda *call: 0.0,
        sequence_length: int = 1000,
        timeout_s: float = TRAJECTORY_TIMEOUT_S,
        capacity: int = 256,
    ) -> None:
        self.engines, self.workers = engines, []
        self.pool = EnvPool(1, STEP_TIMEOUT_S, 30.0, capacity=capacity, launch=lambda: self._launch(pause))
        self.runner = RolloutRunner(EnginePool(engines, 0, 64), self.pool, chat(), decode, sequence_length, timeout_s)

    def _launch(self, pause: Callable[..., float]) -> InThisProcess:
        self.workers.append(InThisProcess(pause))
        return self.workers[-1]

    async def all_left(self) -> None:
        """Waits for the environments that are being closed, as the runner does not."""
        while self.pool._closing:
            await asyncio.wait(self.pool._closing)

    @property
    def open(self) -> int:
        return sum(len(worker.server) for worker in self.workers)


VERSION = 3
"""Of the weights when the environment of `episode` was submitted."""


def episode(what: Task, sequence_length: int = 1000, sampling: SamplingParams = SAMPLING) -> Episode:
    return Episode("train-0-0", what, 7, 1, sampling, sequence_length, VERSION, chat())


async def run_episode(one: Episode, setup: Setup) -> Episode:
    """Runs an episode to its end, without a runner."""
    try:
        await one.begin(setup.pool)
        while (request := one.request()) is not None:
            [answer] = await setup.engines.generate(0, [request])
            await one.add_response(request, answer, decode(answer.response_ids))
    finally:
        one.start_close()
        await setup.all_left()
    assert setup.open == 0
    return one


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine on an event loop whose clock jumps instead of waiting."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(coroutine)

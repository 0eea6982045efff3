"""The side of a reward process: imports the reward function once and scores chunks of samples."""

from __future__ import annotations

import asyncio
import inspect
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from roll.configs.scoring.built_in_rewards import built_in_of, is_comparison
from roll.configs.scoring.rewards import DEFAULT_CONCURRENCY, RewardConfig
from roll.configs.user_code import (
    UserCodeError,
    failure_text,
    import_named,
    report_if_slow,
    shown_path,
    users_frame,
)
from roll.rewards.calling import (
    NO_OUTCOME,
    RewardFunction,
    RewardFunctionError,
    RewardOutcome,
    RewardRequest,
    SelfTest,
    checked,
)
from roll.usercode.containment import contain
from roll.usercode.server import CallError

Call = tuple[RewardRequest, int | None]
"""A request, and which of its responses to score; None scores all in one call."""

SAMPLE = "(response, ground truth, whether the response is right)"
"""What an item of SELF_TEST is, for errors."""


@dataclass(frozen=True)
class LoadedReward:
    """What the driver needs to know of the reward function of a process, in the words of `RewardFunction`.

    Attributes:
        error: why it could not be loaded; the other attributes have no meaning then.
        missing: the error is that a module is not on this machine.
        where: `file:line` of the function.
    """

    error: str | None = None
    missing: bool = False
    where: str = ""
    self_test: SelfTest = ()
    is_async: bool = False
    per_group: bool = False
    sees_group: bool = False
    reads: frozenset[str] = frozenset()


class _Process:
    """The reward function of this process; `loaded.error` is set if it could not be loaded."""

    config: RewardConfig
    function: RewardFunction
    loaded: LoadedReward
    loop: asyncio.Runner | None = None
    """One loop for all calls of a coroutine function, so that its connections outlive a call."""


def contain_reward(config: RewardConfig) -> None:
    """Contains a reward process; it has no threads yet."""
    memory_bytes = config.process_memory_limit_mb * 2**20
    is_own = built_in_of(config.function) is None  # the built-in rewards limit what they start themselves
    contain(config.child_process_limit if is_own else None, memory_bytes if is_own else None)
    _limit_memory(memory_bytes)


def start(config: RewardConfig) -> None:
    """Imports the function and calls `warm_up` of its module; an error is kept for `probe`."""
    _Process.config = config
    try:
        with report_if_slow(f"the import of {config.function}"):
            module, function = load_reward_function(config)
            _warm_up(module)
        _Process.function = function
        _Process.loaded = LoadedReward(
            where=function.where,
            self_test=self_test_of(module, config),
            is_async=function.is_async,
            per_group=function.per_group,
            sees_group=function.sees_group,
            reads=function.reads,
        )
    except UserCodeError as error:
        _Process.loaded = LoadedReward(str(error), error.missing)
    except RewardFunctionError as error:
        _Process.loaded = LoadedReward(str(error))
    except BaseException as error:
        _Process.loaded = LoadedReward(failure_text(error))


def _limit_memory(num_bytes: int) -> None:
    """Lets this process and each of its children fail to allocate more; shared mappings are not counted.

    Only a privileged process may raise the limit again.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _warm_up(module: ModuleType) -> None:
    warm_up = getattr(module, "warm_up", None)
    if warm_up is None:
        return
    try:
        warm_up()
    except Exception as error:
        raise RewardFunctionError(failure_text(error, warm_up)) from error


def self_test_of(module: ModuleType, config: RewardConfig) -> SelfTest:
    """SELF_TEST of a module, a list or a function of `config` that returns one; none where it has none.

    Raises:
        RewardFunctionError: it is not a list of three values each.
    """
    samples = getattr(module, "SELF_TEST", None)
    if samples is None:
        return ()
    if callable(samples):
        samples = samples(config)
    file = getattr(module, "__file__", None)
    where = f"{shown_path(file) if file else module.__name__}: SELF_TEST"
    if not isinstance(samples, list | tuple):
        raise RewardFunctionError(f"{where} is a {type(samples).__name__}; write a list of {SAMPLE}")
    for number, sample in enumerate(samples, start=1):
        if not isinstance(sample, list | tuple) or len(sample) != 3 or not isinstance(sample[0], str):
            raise RewardFunctionError(f"{where}: item {number} is {sample!r}; write {SAMPLE}")
    return tuple(samples)


def probe() -> LoadedReward:
    return _Process.loaded


def load_reward_function(config: RewardConfig) -> tuple[ModuleType, RewardFunction]:
    """Imports the function of a reward.

    Raises:
        UserCodeError: it cannot be imported, or does not exist.
        RewardFunctionError: it cannot be called.
    """
    module, function = import_named(config.function, callable)
    return module, RewardFunction(function, config)


def score_chunk(calls: Sequence[Call]) -> list[list[RewardOutcome]]:
    """The outcomes of each call, in order. An exception in a call affects only that call.

    Raises:
        CallError: an exception outside a call, such as a SystemExit in a task that a coroutine has started, stopped the
            event loop. It ends all calls of the chunk; so does `loop.stop()`.
    """
    try:
        return _outcomes(calls)
    except BaseException as error:
        raise CallError(_text(error)) from error


def checked_answer(answer: Any, calls: Sequence[Call]) -> list[list[RewardOutcome]]:
    """What `score_chunk` returned, as the driver may use it: the code of the user may have replaced that function."""
    found = answer if isinstance(answer, list) and len(answer) == len(calls) else [None] * len(calls)
    return [
        [checked(outcome) for outcome in of_call]
        if isinstance(of_call, list) and len(of_call) == (_count(*call) or 1)
        else failed(NO_OUTCOME, *call)
        for call, of_call in zip(calls, found, strict=True)
    ]


def _outcomes(calls: Sequence[Call]) -> list[list[RewardOutcome]]:
    if not _Process.loaded.is_async:
        return [_score(request, index) for request, index in calls]
    if _Process.loop is None:
        _Process.loop = asyncio.Runner()
    return _Process.loop.run(_score_together(calls))


def try_chunk(calls: Sequence[Call]) -> list[list[RewardOutcome]]:
    """As `score_chunk`; prints where a call is that takes long."""
    with report_if_slow(f"a call of {_Process.config.function}"):
        return score_chunk(calls)


async def _score_together(calls: Sequence[Call]) -> list[list[RewardOutcome]]:
    """Outcomes of coroutines, `max_concurrent_calls` at a time; the deadline of a call starts when the call does."""
    slots = asyncio.Semaphore(concurrency(_Process.config))

    async def score(request: RewardRequest, index: int | None) -> list[RewardOutcome]:
        async with slots:
            return await _score_within_deadline(request, index)

    return list(await asyncio.gather(*(score(request, index) for request, index in calls)))


def concurrency(config: RewardConfig) -> int:
    """Calls of a coroutine function that one process makes at a time."""
    return config.max_concurrent_calls or DEFAULT_CONCURRENCY


async def _score_within_deadline(request: RewardRequest, index: int | None) -> list[RewardOutcome]:
    deadline = asyncio.timeout(_Process.config.timeout_s)
    try:
        async with deadline:
            value = await _Process.function.call(request, index)
        return _Process.function.outcomes(value, _count(request, index))
    except BaseException as error:  # extensions in Rust raise panics that are no Exception
        if deadline.expired():
            return failed(timed_out(_Process.loaded.where, _Process.config, error), request, index)
        return failed(RewardOutcome(None, "raised", _text(error)), request, index)


def _score(request: RewardRequest, index: int | None) -> list[RewardOutcome]:
    try:
        value = _Process.function.call(request, index)
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        return _Process.function.outcomes(value, _count(request, index))
    except BaseException as error:  # extensions in Rust raise panics that are no Exception
        return failed(RewardOutcome(None, "raised", _text(error)), request, index)


async def _awaited(value: Any) -> Any:
    return await value


def timed_out(where: str, config: RewardConfig, error: BaseException | None = None) -> RewardOutcome:
    """The outcome of a call that passed its deadline.

    Args:
        where: `file:line` of the function; empty if it is not known.
        config: of the reward.
        error: as asyncio raised it, which knows where the call waited. Nothing knows it of a process that was killed.
    """
    frame = users_frame(error.__cause__) if error is not None and error.__cause__ is not None else None
    if frame is not None:
        where, call = f"{shown_path(frame.filename)}:{frame.lineno}", "the call, which waited here,"
    else:
        call = "a call of the function that begins here" if where else "the call"
    text = f"{where}: {call} took longer than timeout_s = {config.timeout_s:g}; put slow one-time work in warm_up()"
    return RewardOutcome(None, "timeout", text.removeprefix(": "))


def failed(outcome: RewardOutcome, request: RewardRequest, index: int | None) -> list[RewardOutcome]:
    return [outcome] * (_count(request, index) or 1)


def _count(request: RewardRequest, index: int | None) -> int | None:
    return len(request.responses) if index is None else None


def _text(error: BaseException) -> str:
    is_of_data = isinstance(error, ValueError) and is_comparison(_Process.config.function)
    plain = is_of_data or isinstance(error, RewardFunctionError)
    return str(error) if plain else failure_text(error, _Process.function.function)

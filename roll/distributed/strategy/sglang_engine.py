"""One SGLang engine and the processes it runs: start, watch, stop. Nothing of it outlives its owner."""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import os
import signal
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import psutil

T = TypeVar("T")

WATCH_INTERVAL_S = 0.5
"""How often the engine's processes are looked at."""

STOP_TIMEOUT_S = 20.0
"""Killed processes get this long to disappear; a process holding much memory needs seconds."""


class EngineError(RuntimeError):
    """The engine refused, died, or did not answer in time; the message says which, and what was asked of it."""


class Engine:
    """SGLang's scheduler processes, seen from the process that owns them.

    SGLang asks the kernel to kill its processes when the thread that started them ends, so they are started by a
    thread that lives as long as this object: they end with the owner, however it ends.
    """

    def __init__(self, name: str, arguments: dict[str, Any], environment: dict[str, str]) -> None:
        """Remembers what to start.

        Args:
            name: how errors call this engine, such as `actor_infer[0]`.
            arguments: SGLang's ServerArgs.
            environment: variables of the engine's processes; they stay set in this process.
        """
        self.name = name
        self.arguments = arguments
        self._environment = environment
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sglang-owner")
        self._engine: Any = None
        self._processes: list[psutil.Process] = []
        self._death: asyncio.Future[str] | None = None
        self._watcher: asyncio.Task[None] | None = None

    @property
    def manager(self) -> Any:
        """SGLang's tokenizer manager, which takes requests and control messages.

        Raises:
            EngineError: the engine was not started, or was stopped.
        """
        if self._engine is None:
            raise EngineError(f"{self.name}: the engine is not running; initialize() starts it")
        return self._engine.tokenizer_manager

    async def start(self, arguments: dict[str, Any], timeout_s: float) -> None:
        """Starts the processes and waits until the model is loaded; after a failure it may be tried again.

        Args:
            arguments: further ServerArgs, for this start.
            timeout_s: longest wait.

        Raises:
            EngineError: SGLang failed, with its reason, or was not up within `timeout_s`.
        """
        loop = asyncio.get_running_loop()
        before = set(psutil.Process().children(recursive=True))
        start = loop.run_in_executor(self._thread, self._launch, {**self.arguments, **arguments})
        try:
            self._engine = await asyncio.wait_for(asyncio.shield(start), timeout_s)
        except TimeoutError as error:
            raise EngineError(f"{self.name}: SGLang was not up after {timeout_s:g} s (start_timeout_s)") from error
        except Exception as error:
            raise EngineError(f"{self.name}: SGLang did not start: {error}") from error
        finally:
            self._processes = list(set(psutil.Process().children(recursive=True)) - before)
            if self._engine is None:
                self._kill()
        self._death = loop.create_future()
        self._watcher = asyncio.create_task(self._watch())

    def _launch(self, arguments: dict[str, Any]) -> Any:
        os.environ.update(self._environment)
        _ignore_quit_signal()
        engine = _engine_class()(**arguments)
        atexit.unregister(engine.shutdown)  # it would kill every child of this process, ours or not
        watchdog = engine.tokenizer_manager._subprocess_watchdog
        if watchdog is not None:
            watchdog.stop()  # `_watch` replaces it
        return engine

    async def guard(self, answer: Awaitable[T], what: str, timeout_s: float | None) -> T:
        """Awaits the engine's `answer`, but no longer than the engine lives or `timeout_s` seconds.

        None leaves the deadline to the caller.

        Raises:
            EngineError: the engine died, or there was no answer in time; `what` is named.
        """
        if self._death is None:
            raise EngineError(f"{self.name}: {what}: the engine is not running")
        task = asyncio.ensure_future(answer)
        waited: set[asyncio.Future[Any]] = {task, self._death}
        await asyncio.wait(waited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        if self._death.done():
            raise EngineError(f"{self.name}: {what}: {self._death.result()}")
        raise EngineError(f"{self.name}: {what}: no answer within {timeout_s:g} s")

    def processes(self) -> list[int]:
        """Ids of the engine's processes that still run."""
        return [process.pid for process in self._processes if _alive(process)]

    async def _watch(self) -> None:
        assert self._death is not None
        while True:
            dead = [process.pid for process in self._processes if not _alive(process)]
            if dead:
                self._death.set_result(f"process {dead[0]} of the engine died; its last words are in the worker's log")
                return
            await asyncio.sleep(WATCH_INTERVAL_S)

    def stop(self) -> None:
        """Ends the engine and waits until its processes are gone; may be called twice.

        Raises:
            EngineError: a process did not go.
        """
        if self._watcher is not None:
            self._watcher.cancel()
        if self._death is not None and not self._death.done():
            self._death.set_result("the engine was stopped")
        if self._engine is not None:
            for task in self._engine.tokenizer_manager.asyncio_tasks:
                task.cancel()
            self._engine = None
        self._kill()
        self._thread.shutdown(wait=False)

    def _kill(self) -> None:
        for process in self._processes:
            if _alive(process):
                process.kill()
        _, alive = psutil.wait_procs(self._processes, timeout=STOP_TIMEOUT_S)
        if alive:
            raise EngineError(
                f"{self.name}: processes {[p.pid for p in alive]} live on {STOP_TIMEOUT_S:g} s after SIGKILL"
            )
        self._processes = []


def _engine_class() -> Any:
    """SGLang's engine without its detokenizer: token ids come out, so that process would start and do nothing."""
    from sglang.srt.entrypoints.engine import Engine as SGLangEngine

    class TokenEngine(SGLangEngine):
        @classmethod
        def _launch_detokenizer_subprocesses(cls, *_: Any, **__: Any) -> tuple[list[Any], list[str]]:
            return [], []

    return TokenEngine


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _ignore_quit_signal() -> None:
    """Keeps this process alive when an engine process fails.

    SGLang's processes report a failure by SIGQUIT to their parent, whose default is to die without a word; and
    Python installs handlers in the main thread only, where a Ray actor's code does not run.
    """
    ctypes.CDLL(None).signal(signal.SIGQUIT, ctypes.c_void_p(1))

"""A process that runs the user's code, as the driver sees it: it is started, called and killed."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from roll.usercode.server import READY, CallError
from roll.usercode.stopped import is_stopped

BOOT = (
    "import sys; from multiprocessing.connection import Connection; driver = Connection(int(sys.argv.pop())); "
    "sys.path[:] = driver.recv(); from roll.usercode.server import serve; serve(driver)"
)
"""What the interpreter of a process runs; the last argument is the descriptor of its socket."""

TERMINATION_S = 3.0
"""A process that gets SIGTERM ends what it has started; one that has not ended after so many seconds is killed."""


class ProcessEndedError(Exception):
    """The process ended before it answered.

    Attributes:
        exit_code: negative for a signal.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code


def do_nothing() -> None:
    """What a process does that needs no preparation."""


class UserProcess:
    """A new interpreter that searches modules where this one does; it ends with this process.

    It prints to stderr, since stdout has the output of a command. A script that the user's code starts finds the
    modules in its own folder. It has a session of its own, so that Ctrl-C is the driver's alone.

    Attributes:
        ready: done when `start` has returned in the process, with what it raised as a CallError.
    """

    def __init__(
        self,
        prepare: Callable[[], Any] = do_nothing,
        start: Callable[[], Any] = do_nothing,
        *,
        threads: int = 0,
        output: int = 2,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Returns before the process has started.

        Args:
            prepare: called in the process before it has threads.
            start: called in the process before it takes calls.
            threads: that make calls; 0 makes them one by one in the main thread.
            output: file descriptor for what the process prints.
            variables: environment variables besides those of this process.
        """
        environment = {**os.environ, **(variables or {})}
        environment.pop("PYTHONSAFEPATH", None)
        self._socket, other = socket.socketpair()
        with other:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-c", BOOT, str(other.fileno())],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        self._connection: Connection[Any, Any] = Connection(os.dup(self._socket.fileno()))
        self._numbers, self._lock = itertools.count(READY + 1), threading.Lock()
        self._calls: dict[int, Future[Any]] = {}
        self._killer: threading.Timer | None = None
        self.ready = self._expect(READY)
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._outbox.put(pickle.dumps(sys.path))
        self._outbox.put(pickle.dumps((prepare, start, threads)))
        self._reader = threading.Thread(target=self._receive, name=f"answers of {self.pid}", daemon=True)
        threading.Thread(target=self._send, name=f"calls of {self.pid}", daemon=True).start()
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def ended(self) -> bool:
        """Whether the process has ended or was asked to."""
        return self._killer is not None or not self.alive or self._popen.poll() is not None

    @property
    def alive(self) -> bool:
        return self._reader.is_alive()

    def is_stopped(self) -> bool:
        return is_stopped(self.pid)

    def call(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Calls a function in the process.

        The future raises a CallError if the call did, or its result cannot be pickled, and a ProcessEndedError if the
        process ended.
        """
        number = next(self._numbers)
        message = pickle.dumps((number, pickle.dumps((function, args))))
        future = self._expect(number)
        self._outbox.put(message)
        return future

    def kill(self) -> None:
        """Ends the process and what it has started, without waiting for it. Safe to call twice."""
        with self._lock:
            if self._killer is not None:
                return
            self._killer = threading.Timer(TERMINATION_S, self._popen.kill)
            self._killer.daemon = True
        if self.is_stopped():
            self._popen.kill()
        else:
            self._popen.terminate()
            self._killer.start()

    def join(self) -> None:
        self._reader.join()

    def _expect(self, number: int) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # so that nobody cancels it while it is set
        with self._lock:
            self._calls[number] = future
        if number != READY and not self._reader.is_alive():
            self._fail_calls()
        return future

    def _send(self) -> None:
        with contextlib.suppress(OSError):
            while (message := self._outbox.get()) is not None:
                self._connection.send_bytes(message)

    def _receive(self) -> None:
        """Sets the results of calls until the process ends; its children may keep its socket open."""
        sentinel, found = os.pidfd_open(self.pid), select.poll()
        found.register(sentinel, select.POLLIN)
        found.register(answers := self._connection.fileno(), select.POLLIN)
        with contextlib.suppress(EOFError, OSError):
            while any(number == answers for number, _ in found.poll()):
                self._set(self._connection.recv_bytes())
        self._popen.wait()
        os.close(sentinel)
        if self._killer is not None:
            self._killer.cancel()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # a send may wait
        self._outbox.put(None)
        self._socket.close()
        self._fail_calls()

    def _set(self, message: bytes) -> None:
        number, succeeded, answer = pickle.loads(message)
        with self._lock:
            future = self._calls.pop(number)
        try:
            result = pickle.loads(answer)
        except Exception as error:
            succeeded, result = False, f"its result cannot be read: {type(error).__name__}: {error}"
        if succeeded:
            future.set_result(result)
        else:
            future.set_exception(CallError(result))

    def _fail_calls(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, {}
        for future in calls.values():
            future.set_exception(ProcessEndedError(self._popen.wait()))


class OneProcess:
    """One process for calls one after another, which is replaced when a call kills it or hangs."""

    def __init__(self) -> None:
        self._process: UserProcess | None = None

    def start_call(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """As `UserProcess.call`."""
        if self._process is None or self._process.ended:
            self._process = UserProcess()
        return self._process.call(function, *args)

    def wait(self, future: Future[Any], timeout_s: float) -> Any:
        """The result of a call; raises what it raised, or a TimeoutError after which its process is killed."""
        try:
            return future.result(timeout_s)
        except TimeoutError:
            self.close()
            raise

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()

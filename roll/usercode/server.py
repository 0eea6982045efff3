"""The side of a process that runs the user's code: makes the calls that arrive, and ends with the driver."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import TextIOWrapper
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, cast

from roll.configs.user_code import failure_text
from roll.usercode.containment import kill_descendants

READY = 0
"""Number of the answer that the process has started; calls have later numbers."""

MAX_ANSWER_BYTES = 2**28
"""Limit of a pickled result, which the driver holds several times while it reads it."""


class CallError(Exception):
    """An exception escaped a call; the message begins with the user's file and line where they are known."""


def serve(connection: Connection[Any, Any]) -> None:
    """Prepares the process and makes calls, in this thread or in as many threads as the driver asks for."""
    prepare, start, threads = connection.recv()
    for stream in (sys.stdout, sys.stderr):
        cast(TextIOWrapper, stream).reconfigure(line_buffering=True)  # what a killed process printed is not lost
    prepare()  # it may fork, so there are no threads yet
    server, calls = _Server(connection), SimpleQueue[bytes]()
    take: Callable[[bytes], object] = calls.put
    if threads:
        take = partial(_submit, ThreadPoolExecutor(threads), server)
    threading.Thread(target=_receive, args=(connection, take), daemon=True).start()
    server.answer(READY, start)
    while True:
        server.make(calls.get())


def _submit(threads: ThreadPoolExecutor, server: _Server, call: bytes) -> None:
    threads.submit(server.make, call)


def _receive(connection: Connection[Any, Any], take: Callable[[bytes], object]) -> None:
    try:
        while True:
            take(connection.recv_bytes())
    except (EOFError, OSError):  # the driver has ended
        kill_descendants()
    finally:
        os._exit(1)


class _Server:
    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def make(self, message: bytes) -> None:
        number, call = pickle.loads(message)
        self.answer(number, lambda: _made(call))

    def answer(self, number: int, call: Callable[[], Any]) -> None:
        try:
            answer = True, pickle.dumps(call())
            if len(answer[1]) > MAX_ANSWER_BYTES:
                raise CallError(f"its result has {len(answer[1])} bytes; return at most {MAX_ANSWER_BYTES}")
        except CallError as error:
            answer = False, pickle.dumps(str(error))
        except BaseException as error:  # sys.exit, and panics of extensions in Rust
            answer = False, pickle.dumps(failure_text(error))
        with self._lock, contextlib.suppress(OSError):  # the driver has ended
            self._connection.send_bytes(pickle.dumps((number, *answer)))


def _made(call: bytes) -> Any:
    function, args = pickle.loads(call)
    return function(*args)

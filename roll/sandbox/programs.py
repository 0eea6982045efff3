"""What runs inside of a process of a program: the program itself, or calls of its functions.

Tests never run in the process of the program. `answer_calls` calls the program's functions for `assertions`, which is
another process and sees plain values only, so that a program cannot change a comparison or end before it.
"""

from __future__ import annotations

import bisect
import collections
import functools
import heapq
import itertools
import json
import math
import os
import random
import re
import socket
import string
import struct
import sys
import threading
import types
import typing
from collections.abc import Callable
from typing import Any

from roll.sandbox.values import NotPlain, decode, encode

MODULES = (bisect, collections, functools, heapq, itertools, json, math, random, re, string, sys)
PRELUDE: dict[str, Any] = {
    **{module.__name__: module for module in MODULES},
    **{
        name: getattr(typing, name) for name in ("Any", "Callable", "Dict", "List", "Optional", "Set", "Tuple", "Union")
    },
    **{name: getattr(collections, name) for name in ("Counter", "OrderedDict", "defaultdict", "deque")},
    **{name: getattr(itertools, name) for name in ("accumulate", "combinations", "permutations", "product")},
    **{name: getattr(heapq, name) for name in ("heapify", "heappop", "heappush")},
    **{name: getattr(bisect, name) for name in ("bisect_left", "bisect_right")},
    **{name: getattr(functools, name) for name in ("cache", "cmp_to_key", "lru_cache", "reduce")},
    "inf": math.inf,
}
"""Names that every program has without importing them, as data sets of programming tasks expect."""

MAX_FRAME = 64 * 2**20
HEAD = struct.Struct(">I")


def read_exactly(fd: int, size: int) -> bytes:
    """The next `size` bytes.

    Raises:
        EOFError: the other side has closed.
    """
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            raise EOFError("the other side has closed")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def read_frame(fd: int) -> bytes:
    """The next message.

    Raises:
        EOFError: the other side has closed, or announces more than MAX_FRAME bytes.
    """
    size = HEAD.unpack(read_exactly(fd, HEAD.size))[0]
    if size > MAX_FRAME:
        raise EOFError(f"a message of {size} bytes")
    return read_exactly(fd, size)


def write_frame(fd: int, content: bytes) -> None:
    view = memoryview(HEAD.pack(len(content)) + content)
    while view:
        view = view[os.write(fd, view) :]


def _load(code: str) -> dict[str, Any]:
    """Executes a program as the main module; returns its names."""
    main = types.ModuleType("__main__")
    main.__dict__.update(PRELUDE)
    sys.modules["__main__"] = main
    exec(compile(code, "<program>", "exec"), main.__dict__)
    return main.__dict__


def run_program(code: str) -> int:
    """Runs a program with the standard streams of this process; returns its exit status."""
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")
    stdout, status = sys.stdout, 0
    try:
        _load(code)
    except SystemExit as end:
        status = 0 if end.code in (None, 0) else 1
    except BaseException:
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    stdout.flush()
    return status


def _resolve(names: dict[str, Any], name: str) -> Any:
    """The function that a dotted name such as `f`, `Solution.f` or `Solution().f` stands for."""
    head, *rest = name.replace("()", "").split(".")
    if head not in names and "Solution" in names:
        head, rest = "Solution", [head, *rest]
    found = names[head]
    if rest and isinstance(found, type):
        found = found()
    for part in rest:
        found = getattr(found, part)
    return found


def call_function(code: str, name: str, arguments: list[str], results: int) -> int:
    """Calls a function of a program with each list of arguments.

    Args:
        code: the program.
        name: of the function; a method of the class `Solution` where there is no function of this name.
        arguments: `encode`d lists.
        results: file descriptor; one message for each call, its `encode`d result.
    """
    function = _resolve(_load(code), name)
    for each in arguments:
        write_frame(results, encode(function(*decode(each))).encode())
    return 0


# Calls between the process of a program and the process of its tests


def answer_calls(code: str, link: int) -> int:
    """Loads a program, tells its names, and answers calls until the other side closes."""
    objects: list[Any] = []
    numbers: dict[int, int] = {}

    def reference(value: Any) -> dict[str, Any]:
        if id(value) not in numbers:
            numbers[id(value)] = len(objects)
            objects.append(value)
        return {"type": "object", "items": numbers[id(value)]}

    def resolved(item: dict[str, Any]) -> Any:
        return objects[item["items"]]

    names = _load(code)
    told = {name: _described(value, reference) for name, value in names.items() if _is_own(name, value)}
    write_frame(link, json.dumps(told).encode())
    while True:
        try:
            request = json.loads(read_frame(link))
        except EOFError:
            return 0
        try:
            arguments = decode(request["arguments"], resolved)
            keywords = decode(request["keywords"], resolved)
            value = _performed(objects[request["target"]], request["action"], arguments, keywords)
            answer = {"value": encode(value, reference)}
            if any(isinstance(item, list | dict | set | bytearray) for item in arguments):
                answer["arguments"] = encode(arguments, reference)
        except BaseException as error:
            bases = [base.__name__ for base in type(error).__mro__]
            answer = {"raised": json.dumps([bases, str(error)[:1000]])}
        write_frame(link, json.dumps(answer).encode())


def _is_own(name: str, value: Any) -> bool:
    return not name.startswith("__") and PRELUDE.get(name, PRELUDE) is not value


def _described(value: Any, reference: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """What the tests learn of a name of a program: a module, an exception, or a value or reference."""
    if isinstance(value, types.ModuleType):
        return {"module": value.__name__}
    if isinstance(value, type) and issubclass(value, BaseException):
        return {"exception": [base.__name__ for base in value.__mro__], **reference(value)}
    try:
        return {"value": encode(value, reference)}
    except NotPlain:
        return {"value": encode(None)}


def _performed(target: Any, action: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
    if action == "call":
        return target(*arguments, **keywords)
    if action == "get":
        return getattr(target, arguments[0])
    if action == "set":
        return setattr(target, *arguments)
    if action == "isinstance":
        return isinstance(arguments[0], target)
    if action == "bool":
        return bool(target)
    if not hasattr(type(target), action):
        raise TypeError(f"{type(target).__name__} has no {action}")
    return getattr(target, action)(*arguments)


def socket_pair() -> tuple[int, int]:
    first, second = socket.socketpair()
    return first.detach(), second.detach()

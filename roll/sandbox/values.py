"""Plain values as JSON, between processes that do not trust each other: decoding never runs code of the other side."""

from __future__ import annotations

import collections
import json
from typing import Any

MAX_DEPTH = 200
"""Nesting of lists and dictionaries; deeper values are refused on both sides."""

COLLIDING = 64
"""Keys for each different hash in a set or dictionary, at most."""

LISTS: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque}
DICTIONARIES = (collections.defaultdict, collections.OrderedDict, collections.Counter)
"""Sent as a dictionary, to which they are equal."""


class NotPlain(ValueError):
    """A value that is not made of numbers, texts and containers of them."""


def encode(value: Any, reference: Any = None) -> str:
    """A value as JSON.

    Args:
        value: None, bool, int, float, complex, text, bytes, and lists, tuples, sets, deques and dictionaries of them,
            of exactly these types; a `range` is a list, and arrays and numbers of numpy are lists and numbers.
        reference: makes JSON of any other value, or raises NotPlain.

    Raises:
        NotPlain: the value is another.
    """
    return json.dumps(_packed(value, reference, 0))


def _packed(value: Any, reference: Any, depth: int) -> Any:
    kind = type(value)
    if depth > MAX_DEPTH:
        raise NotPlain("nested too deeply")
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list or kind is range:
        return [_packed(item, reference, depth + 1) for item in value]
    for name, known in LISTS.items():
        if kind is known:
            return {"type": name, "items": [_packed(item, reference, depth + 1) for item in value]}
    if kind is dict or kind in DICTIONARIES:
        pairs = [
            [_packed(key, reference, depth + 1), _packed(item, reference, depth + 1)] for key, item in value.items()
        ]
        return {"type": "dict", "items": pairs}
    if kind is bytes or kind is bytearray:
        return {"type": "bytes", "items": value.hex()}
    if kind is complex:
        return {"type": "complex", "items": [value.real, value.imag]}
    if kind.__module__ == "numpy" and hasattr(kind, "tolist"):
        return _packed(value.tolist(), reference, depth + 1)
    if reference is None:
        raise NotPlain(f"a {kind.__name__} is not a plain value")
    return reference(value)


def decode(text: str | bytes, reference: Any = None) -> Any:
    """The value of `encode`.

    Args:
        text: as received; nothing about it is trusted.
        reference: makes a value of JSON objects that this module does not make.

    Raises:
        NotPlain: it is not what `encode` returns.
    """
    try:
        return _unpacked(json.loads(text), reference, 0)
    except (ValueError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise NotPlain(f"{type(error).__name__}: {error}"[:200]) from None


def _spread(keys: list[Any]) -> list[Any]:
    """Keys of a set or dictionary; NotPlain where many have equal hashes, since adding them takes quadratic time.

    Raises:
        NotPlain: many have equal hashes, as only numbers that were chosen for it have.
    """
    if len(keys) > COLLIDING * len(set(map(hash, keys))):
        raise NotPlain("keys with equal hashes")
    return keys


def _unpacked(value: Any, reference: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise NotPlain("nested too deeply")
    if isinstance(value, list):
        return [_unpacked(item, reference, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    kind, items = value.get("type"), value.get("items")
    if kind in LISTS:
        members = [_unpacked(item, reference, depth + 1) for item in items or ()]
        return LISTS[kind](members if kind in ("tuple", "deque") else _spread(members))
    if kind == "dict":
        keys = _spread([_unpacked(key, reference, depth + 1) for key, _ in items or ()])
        return dict(zip(keys, (_unpacked(item, reference, depth + 1) for _, item in items or ()), strict=True))
    if kind == "bytes":
        return bytes.fromhex(items or "")
    if kind == "complex":
        return complex(*(items or ()))
    if reference is None:
        raise NotPlain(f"no plain value: {kind!r}")
    return reference(value)

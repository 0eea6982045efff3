"""Plain mappings laid over dataclass defaults: strict about keys, types and bounds, telling every problem at once."""

from __future__ import annotations

import math
import re
import reprlib
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import is_dataclass
from typing import Any, TypeVar

from roll.configs.errors import Problem
from roll.configs.schema import SECTION, Key, declared, describe

Instance = TypeVar("Instance")

LARGEST = 2**63 - 1
"""Of whole numbers: what tensors and engines hold; a slip of the keyboard is explained instead of overflowing."""

NO_TEXT = re.compile("[\0\ud800-\udfff]")
"""Characters that YAML lets one write, but that stand in no path and in no UTF-8."""

Unknown = Callable[[str, type, Any], list[Problem]]
"""Says what an unknown path may have been meant to be, given the section it stands in and its value."""


class Converter:
    """Converts one file, collecting every problem instead of stopping at the first."""

    def __init__(self, suggest: Unknown, overridden: Collection[str] = ()) -> None:
        """Takes what to say about unknown keys, and the paths whose values come from a command line."""
        self.problems: list[Problem] = []
        self._suggest = suggest
        self._overridden = overridden

    def overlay(self, data: Any, default: Instance, path: str = "") -> Instance:
        """`default`, changed in place where `data` says something."""
        cls = type(default)
        if not isinstance(data, Mapping):
            self._fail(path, data, SECTION)
            return default
        keys = declared(cls)  # type: ignore[arg-type]
        for name, value in data.items():
            where = f"{path}.{name}" if path else str(name)
            if name not in keys:
                self.problems += self._suggest(where, cls, value)
                continue
            setattr(default, name, self._field(value, keys[name], getattr(default, name), where))
        return default

    def _field(self, value: Any, key: Key, default: Any, path: str) -> Any:
        parse = key.field.metadata.get("parse")
        if parse is not None:
            try:
                value = parse(value)
            except ValueError as error:
                self.problems.append(Problem(path, str(error)))
                return default
        before = len(self.problems)
        converted = self._value(value, key.hint, default, path)
        if len(self.problems) > before:
            return default
        self._text(converted, path)
        self._bounds(converted, key, path)
        return converted

    def _value(self, value: Any, hint: Any, default: Any, path: str) -> Any:
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if hint is Any:
            return value
        if isinstance(hint, type) and is_dataclass(hint):
            return self.overlay(value, default if isinstance(default, hint) else hint(), path)
        if origin is typing.Literal:
            return self._literal(value, hint, path)
        if origin in (typing.Union, types.UnionType):
            return self._union(value, hint, path)
        if origin is list:
            return self._list(value, hint, path)
        if hint is dict or origin is dict:
            return self._dict(value, arguments[1] if arguments else Any, path)
        return self._scalar(value, hint, path)

    def _scalar(self, value: Any, hint: type, path: str) -> Any:
        if hint is float and isinstance(value, int | float | str) and not isinstance(value, bool):
            try:
                return float(value)
            except ValueError:
                return self._fail(path, value, describe(hint))
            except OverflowError:
                return self._too_large(path, value)  # type: ignore[arg-type]
        if type(value) is hint:
            return value
        advice = ""
        if hint is int and isinstance(value, float) and value.is_integer():
            advice = f"; write {int(value)}"
        if hint is str and isinstance(value, bool | int | float):
            advice = f"; {self._quoted(value, path)}"
        return self._fail(path, value, describe(hint) + advice)

    def _quoted(self, value: bool | int | float, path: str) -> str:
        """How a value is made text; a shell takes the outer quotes for itself."""
        text = f"'{str(value).lower() if isinstance(value, bool) else value}'"
        if path in self._overridden:
            return f'put it in quotes, and these in others for the shell: {path}="{text}"'
        if path.partition("[")[0] in self._overridden:
            return f'put it in quotes, and these in others for the shell: "{text}"'
        return f"put it in quotes: {text}"

    def _literal(self, value: Any, hint: Any, path: str) -> Any:
        for item in typing.get_args(hint):
            if value == item and type(value) is type(item):
                return item
        return self._fail(path, value, describe(hint))

    def _union(self, value: Any, hint: Any, path: str) -> Any:
        attempt = Converter(self._suggest, self._overridden)
        for member in typing.get_args(hint):
            if member is type(None):
                if value is None:
                    return None
                continue
            before = len(attempt.problems)
            converted = attempt._value(value, member, None, path)
            if len(attempt.problems) == before:
                return converted
        return self._fail(path, value, describe(hint))

    def _list(self, value: Any, hint: Any, path: str) -> Any:
        if not isinstance(value, list):
            return self._fail(path, value, describe(hint))
        (item_hint,) = typing.get_args(hint)
        items = [self._value(item, item_hint, None, f"{path}[{index}]") for index, item in enumerate(value)]
        for index, item in enumerate(items):
            self._text(item, f"{path}[{index}]")
        return items

    def _dict(self, value: Any, item_hint: Any, path: str) -> Any:
        if not isinstance(value, Mapping):
            return self._fail(path, value, SECTION)
        return {str(key): self._value(item, item_hint, None, f"{path}.{key}") for key, item in value.items()}

    def _text(self, value: Any, path: str) -> None:
        if value == "":
            self.problems.append(Problem(path, "'' is empty; give it a value, or leave it out"))
        elif isinstance(value, str) and NO_TEXT.search(value):
            self.problems.append(
                Problem(path, f"{value!r} holds a character that no file or tokenizer takes; remove it")
            )

    def _bounds(self, value: Any, key: Key, path: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return
        limits = key.field.metadata
        if isinstance(value, int) and abs(value) > LARGEST:
            self._too_large(path, value)
        elif not math.isfinite(value):
            self.problems.append(Problem(path, f"{value} is not a finite number"))
        elif limits.get("minimum") is not None and value < limits["minimum"]:
            self.problems.append(Problem(path, f"{value} is too small; the least allowed is {limits['minimum']}"))
        elif limits.get("above") is not None and value <= limits["above"]:
            self.problems.append(Problem(path, f"{value} is too small; it must be above {limits['above']}"))
        elif limits.get("maximum") is not None and value > limits["maximum"]:
            self.problems.append(Problem(path, f"{value} is too large; the most allowed is {limits['maximum']}"))

    def _too_large(self, path: str, value: int) -> None:
        self.problems.append(Problem(path, f"{reprlib.repr(value)} is too large; nothing here is beyond {LARGEST}"))

    def _fail(self, path: str, value: Any, expected: str) -> None:
        shown = "null" if value is None else repr(value)
        self.problems.append(Problem(path, f"{shown} is not {expected}"))

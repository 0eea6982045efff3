"""A registry of functions by the name that the YAML uses for them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Registry(Mapping[str, F]):
    """A mapping from names to functions, filled with the decorator `register` and otherwise read-only.

    Args:
        key: the YAML key whose values are the names; used in error messages.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._functions: dict[str, F] = {}

    def register(self, name: str) -> Callable[[F], F]:
        """Decorator that registers a function under `name`.

        Raises:
            ValueError: the name is already registered.
        """
        if name in self._functions:
            raise ValueError(f"{self._key} {name!r} is registered twice")

        def add(function: F) -> F:
            self._functions[name] = function
            return function

        return add

    def __getitem__(self, name: str) -> F:
        """The function registered under `name`.

        Raises:
            KeyError: unknown name; the message lists the known names and suggests the closest.
        """
        if name in self._functions:
            return self._functions[name]
        near = difflib.get_close_matches(str(name), self._functions, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise KeyError(f"{self._key}: {name!r} is none of {', '.join(self._functions)}{hint}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __len__(self) -> int:
        return len(self._functions)

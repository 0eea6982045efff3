"""Named functions: the one way a YAML name becomes code."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

F = TypeVar("F", bound=Callable)


class Registry(Mapping[str, F], Generic[F]):
    """A read-only mapping from names to functions that grows by decoration.

    Args:
        key: the YAML key the names stand for; errors speak of it.
    """

    def __init__(self, key: str) -> None:
        """Starts empty."""
        self._key = key
        self._functions: dict[str, F] = {}

    def register(self, name: str) -> Callable[[F], F]:
        """Decorator that files a function under `name`.

        Raises:
            ValueError: the name is taken.
        """
        if name in self._functions:
            raise ValueError(f"{self._key} {name!r} is registered twice")

        def file(function: F) -> F:
            self._functions[name] = function
            return function

        return file

    def __getitem__(self, name: str) -> F:
        """The function of that name.

        Raises:
            KeyError: no such name; the message lists the known ones and the nearest.
        """
        if name in self._functions:
            return self._functions[name]
        near = difflib.get_close_matches(str(name), self._functions, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise KeyError(f"{self._key}: {name!r} is none of {', '.join(self._functions)}{hint}")

    def __iter__(self) -> Iterator[str]:
        """Names in order of registration."""
        return iter(self._functions)

    def __len__(self) -> int:
        """How many names there are."""
        return len(self._functions)

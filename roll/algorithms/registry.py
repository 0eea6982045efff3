"""Algorithms by the name that the YAML uses for them."""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

from roll.base.errors import Finding
from roll.base.schema import option

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Algorithm:
    """A formula with its options.

    Attributes:
        name: in the YAML.
        formula: its docstring is the entry in docs/algorithms.
        options: dataclass of its keys. Those of an algorithm of the user are in `custom_options.<name>` of the YAML.
        check: f(options, configuration) -> what is wrong with them.
    """

    name: str
    formula: Callable[..., Any]
    options: type = object
    check: Callable[[Any, Any], Iterator[Finding]] | None = None

    @property
    def built_in(self) -> bool:
        """Whether its options are keys at the top of the YAML."""
        return self.formula.__module__.startswith("roll.")


@dataclass
class UserOptions:
    """Options of losses and estimators of the user."""

    custom_options: dict[str, Any] = option(
        factory=dict,
        help="Options of losses and estimators of `custom_modules`, by their names: `custom_options.<name>.<option>`.",
    )

    def options_of(self, algorithm: Algorithm) -> Any:
        """The options of one algorithm: these settings have the keys of all that belong to the package."""
        return self if algorithm.built_in else self.custom_options.get(algorithm.name) or algorithm.options()


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


def import_all(package: str, path: Iterable[str]) -> None:
    """Imports the modules of a package, which register what they define."""
    for module in pkgutil.iter_modules(path, f"{package}."):
        import_module(module.name)

"""The one way a configuration field is declared: default, help text, and the values it allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, field
from typing import Any


def option(
    default: Any = MISSING,
    help: str = "",
    *,
    factory: Callable[[], Any] | Any = MISSING,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    parse: Callable[[Any], Any] | None = None,
) -> Any:
    """A dataclass field whose metadata carries the help text and the bounds that loading enforces.

    Args:
        default: value when the YAML is silent; give `factory` instead for a mutable one.
        help: one sentence with the unit; the configuration reference is generated from it.
        factory: makes the default of a mutable field.
        minimum: smallest value allowed.
        above: value that must be exceeded.
        maximum: largest value allowed.
        parse: turns what the YAML holds into the field's type, raising ValueError with a reason.
    """
    metadata = {"help": help, "minimum": minimum, "above": above, "maximum": maximum, "parse": parse}
    if factory is not MISSING:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def internal(factory: Callable[[], Any]) -> Any:
    """A dataclass field that loading fills and no YAML may name."""
    return field(default_factory=factory, metadata={"internal": True}, repr=False, compare=False)


def one_or_many(value: Any) -> Any:
    """A single name as a list of one; anything else as it is, for the type check to judge."""
    return [value] if isinstance(value, str) else value


def environment(value: Any) -> Any:
    """Environment variables with numbers written as text; a bool is refused because nobody agrees on its spelling.

    Raises:
        ValueError: a value is a bool, a list or a mapping, or the system takes no variable of that name or value.
    """
    if not isinstance(value, dict):
        return value
    for name, item in value.items():
        if not str(name) or "=" in str(name) or "\0" in f"{name}{item}":
            raise ValueError(f"{name!r} cannot name an environment variable, or {item!r} not be the value of one")
        if isinstance(item, bool) or not isinstance(item, str | int | float):
            raise ValueError(f"{name} is {item!r}; write the text the variable shall hold in quotes, such as '1'")
    return {str(name): str(item) for name, item in value.items()}

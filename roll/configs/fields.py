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
        minimum: smallest value allowed.
        above: value that must be exceeded.
        maximum: largest value allowed.
        parse: turns what the YAML holds into the field's type, raising ValueError with a reason.
    """
    metadata = {"help": help, "minimum": minimum, "above": above, "maximum": maximum, "parse": parse}
    if factory is not MISSING:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)

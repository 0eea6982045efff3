"""Shared by the tools: argument types and errors about an option."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TypeVar

from roll.base.errors import ConfigError, Problem

T = TypeVar("T")


def option_error(option: str, message: str) -> ConfigError:
    """An error about one option or argument, to be raised."""
    return ConfigError([Problem(option, message)])


def number(minimum: float = -math.inf, unit: str = "") -> Callable[[str], float]:
    """Argument type for finite numbers of at least `minimum`; the unit appears in the error."""
    expected = "a number" + (f" of {unit}" if unit else "") + (f" >= {minimum:g}" if minimum > -math.inf else "")

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= minimum):
            raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
        return value

    return parse


def integer(minimum: int) -> Callable[[str], int]:
    """Argument type for integers of at least `minimum`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= {minimum}")
        return value

    return parse


def comma_separated(parse_item: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Argument type for lists such as `1,2`."""

    def parse(text: str) -> list[T]:
        items = [item.strip() for item in text.split(",")]
        if "" in items:
            raise argparse.ArgumentTypeError(f"{text!r} has an empty entry; remove the extra comma")
        try:
            return [parse_item(item) for item in items]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 1,2") from None

    return parse

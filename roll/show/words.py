"""Numbers as they are shown everywhere: scores, advantages, weight versions."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

MOST_SCORES = 16
"""Scores of a group that are listed; the mean is of all."""


def counted(count: int, noun: str) -> str:
    """`1 group`, `2 trajectories`."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun.removesuffix('y')}ies" if noun.endswith("y") else f"{count:,} {noun}s"


def number(value: float) -> str:
    """Four digits, no zeros at the end."""
    return f"{value:.4g}"


def scores(values: Sequence[float]) -> str:
    """`1 0 0 1, mean 0.5`, shortened with a count."""
    listed = " ".join(number(value) for value in values[:MOST_SCORES])
    more = f" and {len(values) - MOST_SCORES} more" if len(values) > MOST_SCORES else ""
    return f"{listed}{more}, mean {number(sum(values) / len(values))}"


def advantage(value: float | None, name: str = "advantage") -> Text:
    """Signed, green above zero and red below."""
    if value is None:
        return Text(f"{name} not in the dump", "dim")
    return Text.assemble(f"{name} ", (f"{value:+.3f}", "green" if value > 0 else "red" if value < 0 else ""))


def versions(values: Sequence[int]) -> Text:
    """`version 3`; several stand out, since weights changed while the model wrote."""
    if len(values) == 1:
        return Text(f"version {values[0]}", "dim")
    return Text(f"versions {', '.join(map(str, values)) or 'unknown'}", "yellow")

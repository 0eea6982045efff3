"""Arithmetic too long for the head: nested sums, differences and products of large numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Expression:
    """As it is written, its exact value, and whether it stands as a factor without parentheses."""

    text: str
    value: int
    tight: bool

    @property
    def guarded(self) -> str:
        """With parentheses where a neighbour would otherwise take part of it."""
        return self.text if self.tight else f"({self.text})"


def draw_problem(generator: np.random.Generator, terms: int, digits: int) -> Expression:
    """An expression of `terms` numbers with `digits` digits each, such as (4711+8150)*(9032-1234).

    No number begins with 0. At least one operation is a product: sums alone can be done in the head, digit by digit.
    """
    while True:
        expression = _draw(generator, terms, digits)
        if "*" in expression.text:
            return expression


def _draw(generator: np.random.Generator, terms: int, digits: int) -> Expression:
    """Any expression; the terms are divided anywhere into two parts, so trees of all shapes occur."""
    if terms == 1:
        number = int(generator.integers(10 ** (digits - 1), 10**digits))
        return Expression(str(number), number, True)
    first = int(generator.integers(1, terms))
    left, right = (_draw(generator, part, digits) for part in (first, terms - first))
    match "+-*"[generator.integers(3)]:
        case "+":
            return Expression(f"{left.text}+{right.text}", left.value + right.value, False)
        case "-":
            return Expression(f"{left.text}-{right.guarded}", left.value - right.value, False)
        case _:
            return Expression(f"{left.guarded}*{right.guarded}", left.value * right.value, True)

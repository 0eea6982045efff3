"""Problems of the agent, and its tool; needs the standard library only, so agents in other environments import it."""

from __future__ import annotations

import random


def problem(seed: int) -> tuple[str, str]:
    """A product of two numbers of two digits, and its value."""
    draw = random.Random(seed)
    left, right = draw.randint(10, 99), draw.randint(10, 99)
    return f"{left}*{right}", str(left * right)


def calculator(expression: str) -> str:
    """The value of a product of two numbers, or what is wrong with the text."""
    left, _, right = expression.partition("*")
    if not (left.isdecimal() and right.isdecimal() and len(expression) < 20):
        return "error"
    return str(int(left) * int(right))

"""A calculator that nothing a model writes can hurt: exact, bounded in time and memory, and without names or calls."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

MAX_LENGTH = 200
"""Characters of an expression; it bounds the depth of the tree and the count of operations too."""

MAX_DIGITS = 100
"""Digits of any number on the way, in numerator and denominator: a tower of exponents stops before it is computed."""

DECIMALS = 12
"""Decimals of a result that is not whole; it is rounded to these, and trailing zeros are left out."""

LIMIT = 10**MAX_DIGITS

CHARACTERS = re.compile(r"[0-9.+\-*/%() ]*")
"""With nothing else in it, an expression can hold no name, no text, no attribute and no comparison."""

OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class CalculatorError(ValueError):
    """The expression has no value here; the message says why and holds nothing of the expression."""


def calculate(expression: str) -> str:
    """The value of an expression, written out: whole numbers exactly, others to DECIMALS decimals.

    Numbers, `+ - * / // % **`, signs and parentheses, with Python's precedence. Decimals are exact: 0.1 + 0.2 is 0.3.

    Raises:
        CalculatorError: not arithmetic, too long, too large, or divided by zero.
    """
    value = evaluate(expression)
    shown = round(abs(value) * 10**DECIMALS)
    whole, part = divmod(shown, 10**DECIMALS)
    sign = "-" if value < 0 < shown else ""
    return sign + f"{whole}.{part:0{DECIMALS}d}".rstrip("0").rstrip(".")


def evaluate(expression: str) -> Fraction:
    """The exact value of an expression.

    Raises:
        CalculatorError: as `calculate`.
    """
    text = " ".join(expression.split())
    if len(text) > MAX_LENGTH:
        raise CalculatorError(f"the expression is longer than {MAX_LENGTH} characters")
    if not CHARACTERS.fullmatch(text):
        raise CalculatorError("an expression holds numbers, + - * / // % ** and parentheses only")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise CalculatorError("this is not a complete expression") from None
    return _value(tree.body, text)


def _value(node: ast.expr, text: str) -> Fraction:
    """Value of a part; MAX_LENGTH keeps the recursion shallow."""
    if isinstance(node, ast.Constant):
        try:
            number = Fraction(ast.get_source_segment(text, node) or "")
        except ValueError:  # such as ..., which Python reads as a constant of its own
            raise CalculatorError("this is not a complete expression") from None
        return _bounded(number)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand, text)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, text), _value(node.right, text)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        try:
            return _bounded(Fraction(OPERATIONS[type(node.op)](left, right)))
        except ZeroDivisionError:
            raise CalculatorError("division by zero") from None
    raise CalculatorError("write * between factors; there are no functions here")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    """A whole power, its size known to be bounded before it is computed."""
    if exponent.denominator != 1:
        raise CalculatorError("exponents must be whole numbers")
    if base == 0 and exponent < 0:
        raise CalculatorError("division by zero")
    if base in (0, 1, -1):
        return base ** (int(exponent) % 2 if base == -1 else int(exponent != 0))
    larger = max(abs(base.numerator), base.denominator)
    if abs(exponent) * (larger.bit_length() - 1) > LIMIT.bit_length():
        raise CalculatorError(f"the result has more than {MAX_DIGITS} digits")
    return _bounded(base ** int(exponent))


def _bounded(value: Fraction) -> Fraction:
    if abs(value.numerator) >= LIMIT or value.denominator >= LIMIT:
        raise CalculatorError(f"a number has more than {MAX_DIGITS} digits")
    return value

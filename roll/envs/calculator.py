"""Arithmetic with a tool: call the calculator as often as you like, then answer."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np

from roll.configs.fields import option
from roll.envs.base import Aggregation, EnvConfig, TextEnv, Turn

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


TAGGED = re.compile(r"<(tool|answer)>(.*?)</\1>", re.IGNORECASE | re.DOTALL)

NUMBER = re.compile(rf"[-+]?\d{{1,{MAX_DIGITS}}}(?:\.\d{{1,{MAX_DIGITS}}})?", re.ASCII)
"""An answer. An expression is none, or the problem itself would be the answer to it."""

RULES = """Work out an expression exactly. You have a calculator: write <tool>12*(3+4)</tool>, and you read its result
next. It knows + - * / // % ** and parentheses. When you are sure, write <answer>84</answer>, the number alone.
One turn holds one tool call or one answer; what comes after the first is not read."""

WRITE_ONE = "Error: write <tool>an expression</tool> or <answer>a number</answer>."


@dataclass
class CalculatorConfig(EnvConfig):
    """Options of the problems."""

    max_steps: int = option(5, "Turns, the answer included, after which the episode is cut off.", minimum=1)
    terms: int = option(5, "Numbers in the expression.", minimum=2, maximum=8)
    digits: int = option(4, "Digits of each of them.", minimum=1, maximum=6)
    format_penalty: float = option(0.0, "Reward of a text with neither call nor answer; zero or below.", maximum=0)


class Calculator(TextEnv):
    """Reward 1 for the right answer, 0 for a wrong one and for calls; an answer ends the episode.

    The problem is a function of the seed of `reset`, `terms` and `digits` alone, and always fits the tool's bounds.
    """

    config_class = CalculatorConfig
    config: CalculatorConfig
    METRICS: ClassVar[Mapping[str, Aggregation]] = {
        "action_is_valid": "mean",
        "success": "last",
        "format_penalty": "mean",
        "tool_calls": "sum",
        "tool_errors": "sum",
    }

    def rules(self) -> str:
        """The same for every problem."""
        return RULES

    def begin(self) -> str:
        """A new problem."""
        problem = draw_problem(self.np_random, self.config.terms, self.config.digits)
        self._value = problem.value
        return f"Compute {problem.text}"

    def act(self, text: str) -> Turn:
        """The first tool call or answer of the text; anything else costs `format_penalty` and a step."""
        match = TAGGED.search(text)
        tag, content = (match[1].lower(), match[2].strip()) if match else ("", "")
        if tag == "tool":
            return self._call(content)
        number = content.replace(",", "")
        if tag == "answer" and NUMBER.fullmatch(number):
            right = Fraction(number) == self._value
            return Turn("Right." if right else "Wrong.", float(right), True, self._metrics(success=float(right)))
        penalty = self.config.format_penalty
        return Turn(WRITE_ONE, penalty, False, self._metrics(action_is_valid=0.0, format_penalty=penalty))

    def _call(self, expression: str) -> Turn:
        try:
            result = calculate(expression)
        except CalculatorError as error:
            return Turn(f"Error: {error}.", 0.0, False, self._metrics(tool_calls=1.0, tool_errors=1.0))
        return Turn(f"Result: {result}", 0.0, False, self._metrics(tool_calls=1.0))

    def _metrics(self, **said: float) -> dict[str, float]:
        """Those of a valid turn without success, where nothing else is said."""
        return {name: 0.0 for name in self.METRICS} | {"action_is_valid": 1.0} | said

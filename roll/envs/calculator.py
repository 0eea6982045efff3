"""Long arithmetic with a calculator tool: the safe evaluator of the tool, the problems, and the environment."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np

from roll.base.schema import option
from roll.envs.base import Aggregation, EnvConfig, TextEnv, Turn

MAX_LENGTH = 200
"""Longest expression in characters; this also bounds the depth of its tree and the number of operations."""

MAX_DIGITS = 100
"""Most digits of the numerator and denominator of every intermediate result; powers are checked before evaluation."""

DECIMALS = 12
"""Decimals to which a result that is not an integer is rounded; trailing zeros are removed."""

LIMIT = 10**MAX_DIGITS

CHARACTERS = re.compile(r"[0-9.+\-*/%() ]*")
"""The characters allowed; they cannot form a name, a string, an attribute or a comparison."""

OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class CalculatorError(ValueError):
    """The expression cannot be evaluated. The message gives the reason and repeats no part of the expression."""


def calculate(expression: str) -> str:
    """The value of an expression as text: integers exactly, others rounded to DECIMALS decimals.

    Accepts numbers, `+ - * / // % **`, signs and parentheses, with Python's precedence. Arithmetic is exact: 0.1 + 0.2
    is 0.3. Time and memory are bounded by MAX_LENGTH and MAX_DIGITS.

    Raises:
        CalculatorError: not arithmetic, too long, too large, or a division by zero.
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
    """Value of a subexpression; MAX_LENGTH bounds the depth of the recursion."""
    if isinstance(node, ast.Constant):
        try:
            number = Fraction(ast.get_source_segment(text, node) or "")
        except ValueError:  # `...` is a constant in Python
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
    """An integer power; its size is checked before it is computed."""
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
    """An arithmetic expression with its exact value, and whether it can be a factor without parentheses."""

    text: str
    value: int
    is_factor: bool

    @property
    def factor(self) -> str:
        """The text, in parentheses if it needs them as a factor."""
        return self.text if self.is_factor else f"({self.text})"


def draw_problem(generator: np.random.Generator, terms: int, digits: int) -> Expression:
    """Draws an expression of `terms` numbers with `digits` digits each, such as (4711+8150)*(9032-1234).

    No number begins with 0. At least one operation is a product, because a model can add digit by digit without a tool.
    """
    while True:
        expression = _draw(generator, terms, digits)
        if "*" in expression.text:
            return expression


def _draw(generator: np.random.Generator, terms: int, digits: int) -> Expression:
    """Splits the terms at random into two subexpressions, so trees of all shapes occur."""
    if terms == 1:
        number = int(generator.integers(10 ** (digits - 1), 10**digits))
        return Expression(str(number), number, True)
    first = int(generator.integers(1, terms))
    left, right = (_draw(generator, part, digits) for part in (first, terms - first))
    match "+-*"[generator.integers(3)]:
        case "+":
            return Expression(f"{left.text}+{right.text}", left.value + right.value, False)
        case "-":
            return Expression(f"{left.text}-{right.factor}", left.value - right.value, False)
        case _:
            return Expression(f"{left.factor}*{right.factor}", left.value * right.value, True)


TAGGED = re.compile(r"<(tool|answer)>(.*?)</\1>", re.IGNORECASE | re.DOTALL)

NUMBER = re.compile(rf"[-+]?\d{{1,{MAX_DIGITS}}}(?:\.\d{{1,{MAX_DIGITS}}})?", re.ASCII)
"""An answer is a number, not an expression, because the problem itself would be a correct answer otherwise."""

RULES = """Work out an expression exactly. You have a calculator: write <tool>12*(3+4)</tool>, and you read its result
next. It knows + - * / // % ** and parentheses. When you are sure, write <answer>84</answer>, the number alone.
One turn holds one tool call or one answer; what comes after the first is not read."""

NO_ACTION = "Error: write <tool>an expression</tool> or <answer>a number</answer>."


@dataclass
class CalculatorConfig(EnvConfig):
    """Options of the calculator environment."""

    max_steps: int = option(5, "Turns, including the answer, after which the episode is truncated.", ge=1)
    terms: int = option(5, "Numbers in the expression.", ge=2, le=8)
    digits: int = option(4, "Digits of each of them.", ge=1, le=6)
    format_penalty: float = option(0.0, "Reward of a text with neither tool call nor answer; zero or below.", le=0)


class Calculator(TextEnv):
    """Reward 1 for the right answer, 0 for a wrong one and for tool calls; an answer ends the episode.

    The problem depends only on the seed of `reset`, `terms` and `digits`, and is always within the limits of the tool.
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
        return RULES

    def begin(self) -> str:
        problem = draw_problem(self.np_random, self.config.terms, self.config.digits)
        self._value = problem.value
        return f"Compute {problem.text}"

    def act(self, text: str) -> Turn:
        """Executes the first tool call or answer in the text; a text with neither has the reward `format_penalty`."""
        match = TAGGED.search(text)
        tag, content = (match[1].lower(), match[2].strip()) if match else ("", "")
        if tag == "tool":
            return self._call(content)
        number = content.replace(",", "")
        if tag == "answer" and NUMBER.fullmatch(number):
            right = Fraction(number) == self._value
            return Turn("Right." if right else "Wrong.", float(right), True, self._metrics(success=float(right)))
        penalty = self.config.format_penalty
        return Turn(NO_ACTION, penalty, False, self._metrics(action_is_valid=0.0, format_penalty=penalty))

    def _call(self, expression: str) -> Turn:
        try:
            result = calculate(expression)
        except CalculatorError as error:
            return Turn(f"Error: {error}.", 0.0, False, self._metrics(tool_calls=1.0, tool_errors=1.0))
        return Turn(f"Result: {result}", 0.0, False, self._metrics(tool_calls=1.0))

    def _metrics(self, **changes: float) -> dict[str, float]:
        return {name: 0.0 for name in self.METRICS} | {"action_is_valid": 1.0} | changes

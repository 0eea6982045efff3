"""Arithmetic with a tool: call the calculator as often as you like, then answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from roll.configs.schema import option
from roll.envs.arithmetic import MAX_DIGITS, CalculatorError, calculate
from roll.envs.arithmetic_problems import draw_problem
from roll.envs.base import EnvConfig, TextEnv, Turn
from roll.envs.metrics import Aggregation

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

    max_steps: int = option(5, "Turns, the answer included, after which the episode is cut off.", ge=1)
    terms: int = option(5, "Numbers in the expression.", ge=2, le=8)
    digits: int = option(4, "Digits of each of them.", ge=1, le=6)
    format_penalty: float = option(0.0, "Reward of a text with neither call nor answer; zero or below.", le=0)


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

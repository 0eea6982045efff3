r"""Evaluates expressions such as `2\sqrt{x}`: rational ones exactly, others with as many bits as their parts need."""

from __future__ import annotations

import math
import operator
import random
import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from mpmath import mp

DEEPEST_ANSWER = 60
"""Brackets inside of each other in an answer that is compared."""

MOST_BITS = 30_000
"""Bits of a numerator or a denominator, and the exponent of two of an irrational number, that are evaluated."""

WORKING_BITS, MOST_WORKING_BITS, POINTS = 400, 8_192, 3
"""Bits of an irrational number beyond the range of sizes in its expression, the most of them with this range, and
values that each letter gets."""


class TooLongError(ValueError):
    """An answer is too long, too deep or too large a number to be compared."""


class _Unknown(ValueError):
    """A text is no expression that can be evaluated."""


TOKEN = re.compile(r"\s*(?:(\d+\.?\d*|(?<![\d.])\.\d+)|\\([A-Za-z]+)|([A-Za-z]+)|(\S))")
SYMBOLS = frozenset(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta kappa lambda mu nu xi rho sigma tau phi varphi "
    "chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega infty ell".split()
)
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    **{name: getattr(mp, name) for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")},
    **{f"arc{name}": getattr(mp, f"a{name}") for name in ("sin", "cos", "tan")},
    **{"ln": mp.log, "log": lambda x: mp.log(x) / mp.log(10), "exp": lambda x: _power(mp.e, x)},
}
BRACKETS = ("(", "[", "{")


def real(value: Any) -> Any:
    return mp.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def apply(function: Callable[[Any, Any], Any], one: Any, other: Any) -> Any:
    """A function of two numbers, exactly if both are rational."""
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return function(one, other)
    return function(real(one), real(other))


def equal(one: Any, other: Any, tolerance: Any) -> bool:
    """Whether two values are equal: rational ones exactly, others up to an error of rounding."""
    if one is None or other is None or isinstance(one, Fraction) and isinstance(other, Fraction):
        return bool(one == other)
    return bool(abs(real(one) - real(other)) <= tolerance)


def _bits(value: Any) -> int:
    if isinstance(value, Fraction):
        return max(value.numerator.bit_length(), value.denominator.bit_length())
    return abs(mp.mag(value)) if value else 0


def _bounded(value: Any, bits: int = MOST_BITS) -> Any:
    if _bits(value) > bits:
        raise TooLongError("a number of this size")
    return value


def _power(base: Any, exponent: Any) -> Any:
    exact = isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1
    if base and abs(real(exponent)) * (_bits(base) + (not exact)) > MOST_BITS:
        raise TooLongError("a power of this size")
    return base ** int(exponent) if exact else mp.power(real(base), real(exponent))


def _natural(value: Any) -> int:
    if real(_bounded(value, 12)) != mp.nint(real(value)) or mp.re(real(value)) < 0:
        raise _Unknown("no natural number")
    return int(mp.re(real(value)))


class _Values(NamedTuple):
    """The value of an expression at each point, and the exponents of two of its smallest and largest part."""

    values: tuple[Any, ...]
    least: int
    most: int


@lru_cache(maxsize=1024)
def _values(text: str, bits: int) -> _Values | None:
    """The values of an expression with so many bits where they are irrational; None of a text without any."""
    values: list[Any] = []
    sizes = [0]
    for point in range(POINTS):
        try:
            expression = _Expression(text, point)
            with mp.workprec(bits):
                value = expression.value()
        except TooLongError:
            raise
        except _Unknown:
            return None
        except (ArithmeticError, ValueError, mp.NoConvergence):
            value = None
        values.append(value)
        if not isinstance(value, Fraction):
            sizes += expression.sizes
        if not expression.has_letters:
            break
    return None if set(values) == {None} else _Values(tuple(values * (POINTS // len(values))), min(sizes), max(sizes))


def evaluated(one: str, other: str) -> tuple[list[tuple[Any, ...]], Any, int] | None:
    """The values of two expressions at POINTS values of each letter, None where one has no value.

    With them the difference that is an error of rounding, and the bits to compare them with. The answer is None if a
    text is no expression.
    """
    bits = WORKING_BITS
    while True:
        found = [_values(text, bits) for text in (one, other)]
        if found[0] is None or found[1] is None:
            return None
        least, most = min(each.least for each in found if each), max(each.most for each in found if each)
        if most - least + WORKING_BITS <= bits or bits > WORKING_BITS:
            return [each.values for each in found if each], mp.ldexp(1, least - WORKING_BITS // 2), bits
        bits = 1 << (most - least + WORKING_BITS).bit_length()
        if bits > MOST_WORKING_BITS:
            raise TooLongError("numbers of these sizes")


class _Expression:
    """Evaluates an expression from left to right, with the values that letters have at a point."""

    def __init__(self, text: str, point: int) -> None:
        self._tokens: list[tuple[str, str]] = []
        self._at, self._depth, self._point = 0, 0, point
        self.sizes: list[int] = []
        self.has_letters = self._in_function = False
        for number, command, letters, other in TOKEN.findall(text.replace("‡", " ")):
            name = command or (letters if letters in FUNCTIONS or letters in ("pi", "sqrt") else "")
            if number or name:
                kind = "number" if number else "function" if name in FUNCTIONS else "name"
                self._tokens.append((kind, number or name))
            elif len(letters) > 3:
                raise _Unknown(letters)
            else:
                self._tokens += [("letter", letter) for letter in letters] or [(other, other)]

    def value(self) -> Any:
        result = self._sum()
        if self._take("="):
            result = apply(operator.sub, result, self._sum())
        if self._kind() or result != result:
            raise _Unknown(self._kind())
        return self._seen(result)

    def _seen(self, value: Any) -> Any:
        if _bounded(value):
            self.sizes.append(mp.mag(real(value)))
        return value

    def _kind(self) -> str:
        return self._tokens[self._at][0] if self._at < len(self._tokens) else ""

    def _take(self, *kinds: str) -> str:
        if self._kind() not in kinds:
            return ""
        self._at += 1
        return self._tokens[self._at - 1][1]

    def _sum(self) -> Any:
        result = self._product()
        while sign := self._take("+", "-"):
            result = self._seen(apply(operator.add if sign == "+" else operator.sub, result, self._product()))
        return result

    def _product(self, of_function: bool = False) -> Any:
        """Factors with or without a sign between them; the argument of a function ends at a sign or a function."""
        factors = ("number", "letter", "name", *BRACKETS, *(() if of_function else ("function",)))
        result = self._factor()
        while True:
            if not of_function and (sign := self._take("×", "/")):
                result = self._seen(apply(operator.mul if sign == "×" else operator.truediv, result, self._factor()))
            elif self._kind() in factors:
                result = self._seen(apply(operator.mul, result, self._factor()))
            else:
                return result

    def _factor(self) -> Any:
        negative = False
        while sign := self._take("+", "-"):
            negative ^= sign == "-"
        result = self._base()
        while sign := self._take("^", "!", "°"):
            if sign == "°":
                result = self._degrees(result)
                continue
            result = Fraction(math.factorial(_natural(result))) if sign == "!" else _power(result, self._argument())
            self._seen(result)
        return -result if negative else result

    def _argument(self) -> Any:
        """What a power or a fraction applies to: one token, or an expression in brackets."""
        return -self._base() if self._take("-") else self._base()

    def _base(self) -> Any:
        self._depth += 1
        if self._depth > DEEPEST_ANSWER:
            raise TooLongError("expressions inside of each other")
        if number := self._take("number"):
            result = Fraction(number)
        elif letter := self._take("letter"):
            result = self._letter(letter)
        elif name := self._take("function"):
            result = self._function(name)
        elif name := self._take("name"):
            result = self._named(name)
        else:
            result = self._in_brackets()
        self._depth -= 1
        return self._seen(result)

    def _in_brackets(self) -> Any:
        opening = self._take(*BRACKETS, "|")
        if not opening:
            raise _Unknown(self._kind())
        result = self._sum()
        if not self._take({"(": ")", "[": "]", "{": "}", "|": "|"}[opening]):
            raise _Unknown(self._kind())
        return abs(result) if opening == "|" else result

    def _named(self, name: str) -> Any:
        if name == "frac":
            return apply(operator.truediv, self._argument(), self._argument())
        if name == "binom":
            return Fraction(math.comb(_natural(self._argument()), _natural(self._argument())))
        if name == "sqrt":
            degree = self._base() if self._kind() == "[" else Fraction(2)
            return _power(self._base(), 1 / degree)
        if name == "pi":
            return +mp.pi
        if name not in SYMBOLS:
            raise _Unknown(name)
        return self._letter(name)

    def _function(self, name: str) -> Any:
        base = self._base() if name == "log" and self._take("_") else None
        power = self._argument() if self._take("^") else Fraction(1)
        if power == -1 and f"arc{name}" in FUNCTIONS:
            name, power = f"arc{name}", Fraction(1)
        outer, self._in_function = self._in_function, True
        argument = self._base() if self._kind() in BRACKETS else self._product(of_function=True)
        argument = self._degrees(argument) if self._take("°") else argument
        self._in_function = outer
        result = FUNCTIONS[name](real(_bounded(argument, MOST_BITS if name in ("ln", "log") else 1000)))
        return _power(result if base is None else result * mp.log(10) / mp.log(real(base)), power)

    def _degrees(self, value: Any) -> Any:
        """Degrees are radians in a trigonometric function, elsewhere a unit."""
        return real(value) * mp.pi / 180 if self._in_function else value

    def _letter(self, name: str) -> Any:
        if self._take("_"):
            start = self._at
            self._base()
            name += "".join(text for _, text in self._tokens[start : self._at] if text not in BRACKETS and text != "}")
        if name in ("e", "i"):
            return +mp.e if name == "e" else mp.mpc(0, 1)
        self.has_letters = True
        return Fraction(random.Random(f"{name} {self._point}").randrange(50, 250), 97) * (-1) ** self._point

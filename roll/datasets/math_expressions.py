"""Sums, differences and small products with whole answers that are never negative."""

from __future__ import annotations

import random
from dataclasses import dataclass

LEVELS = (1, 2, 3, 4)
"""1: two terms of two digits, nothing to carry or borrow. 2: two terms of two digits. 3: three terms below 100. 4: a
product, alone or with a term."""


@dataclass(frozen=True)
class Term:
    """A product of one or two factors, added or subtracted."""

    sign: int
    factors: tuple[int, ...]

    @property
    def value(self) -> int:
        """With its sign."""
        product = 1
        for factor in self.factors:
            product *= factor
        return self.sign * product

    @property
    def text(self) -> str:
        """Without its sign, such as 3*14."""
        return "*".join(map(str, self.factors))


@dataclass(frozen=True)
class Expression:
    """Terms in the order they are written; the first is positive."""

    terms: tuple[Term, ...]

    @property
    def value(self) -> int:
        """The exact answer."""
        return sum(term.value for term in self.terms)

    @property
    def text(self) -> str:
        """As written, such as 12+34-5."""
        first, *rest = self.terms
        return first.text + "".join("+-"[term.sign < 0] + term.text for term in rest)

    @property
    def canonical(self) -> str:
        """The same for all orders of terms and factors: 12+34 and 34+12 are one problem."""
        return " ".join(sorted("+-"[term.sign < 0] + "*".join(map(str, sorted(term.factors))) for term in self.terms))


def draw(source: random.Random, level: int) -> Expression:
    """A random expression of a level; every prefix of it is at least 0, so a story about it can be told."""
    expression = _draw(source, level)
    while not _never_negative(expression):
        expression = _draw(source, level)
    return expression


def _draw(source: random.Random, level: int) -> Expression:
    if level == 1:
        return _without_carry(source)
    if level == 2:
        return _sum(source, count=2, low=10, high=99)
    if level == 3:
        return _sum(source, count=3, low=1, high=99)
    product = Term(1, (source.randint(2, 12), source.randint(2, 30)))
    if source.random() < 0.5:
        return Expression((product,))
    return Expression((product, Term(source.choice((1, -1)), (source.randint(1, 99),))))


def _sum(source: random.Random, count: int, low: int, high: int) -> Expression:
    first, *rest = (source.randint(low, high) for _ in range(count))
    return Expression((Term(1, (first,)), *(Term(source.choice((1, -1)), (number,)) for number in rest)))


def _without_carry(source: random.Random) -> Expression:
    """Two terms of two digits that can be added or subtracted digit by digit."""
    while True:
        expression = _sum(source, count=2, low=10, high=99)
        first, second = expression.terms
        pairs = zip(divmod(first.value, 10), divmod(abs(second.value), 10), strict=True)
        if all(0 <= one + second.sign * other <= 9 for one, other in pairs):
            return expression


def _never_negative(expression: Expression) -> bool:
    total = 0
    for term in expression.terms:
        total += term.value
        if total < 0:
            return False
    return True

"""Word problems around an expression: someone has things, gets some, gives some away."""

from __future__ import annotations

import random

from roll.datasets.math_expressions import Expression, Term

NAMES = ("Ada", "Bo", "Cem", "Dia", "Eli", "Fay", "Gus", "Hana", "Ivo", "June")
THINGS = ("apples", "books", "cards", "coins", "eggs", "marbles", "pens", "plates", "shells", "stamps")
GAINS = ("finds {}", "buys {}", "is given {}", "wins {}")
LOSSES = ("loses {}", "gives away {}", "sells {}", "breaks {}")


def tell(expression: Expression, source: random.Random) -> str:
    """The problem in words, such as "Ada has 12 pens. Ada finds 5 more. How many pens does Ada have now?"."""
    name, things = source.choice(NAMES), source.choice(THINGS)
    first, *rest = expression.terms
    sentences = [f"{name} has {_amount(first, things)}."]
    sentences += [f"{name} {source.choice(LOSSES if term.sign < 0 else GAINS).format(_more(term))}." for term in rest]
    ending = f"How many {things} does {name} have{' now' if rest else ''}?"
    return " ".join([*sentences, ending])


def _amount(term: Term, things: str) -> str:
    if len(term.factors) == 1:
        return f"{term.factors[0]} {things if term.factors[0] != 1 else things[:-1]}"
    boxes, each = term.factors
    return f"{boxes} boxes with {each} {things} in each"


def _more(term: Term) -> str:
    return f"{term.factors[0]} more" if term.sign > 0 else f"{term.factors[0]}"

r"""Generates arithmetic and word problems of graded difficulty with exact integer answers, reproducible from a seed.

    python -m examples.tiny_math.problems --out DIR --train N --val N --levels 1-4 --seed S

writes DIR/train.jsonl and DIR/val.jsonl with the columns id, tag, level, prompt, solution and ground_truth.

A problem is in the training or validation split by the hash of its canonical form alone; one in HELD_OUT_ONE_IN forms
is held out for validation. A validation problem is therefore never trained on, whatever the order of its terms, the
style, the seed, the sizes of the files, and whether one call or several made them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

LEVELS = (1, 2, 3, 4)
"""1: two terms of two digits without carrying or borrowing. 2: two terms of two digits. 3: three terms below 100.
4: a product, alone or with one more term."""


@dataclass(frozen=True)
class Term:
    """A product of one or two factors, added or subtracted."""

    sign: int
    factors: tuple[int, ...]

    @property
    def value(self) -> int:
        """The product with its sign."""
        return self.sign * math.prod(self.factors)

    @property
    def text(self) -> str:
        """The product without its sign, such as 3*14."""
        return "*".join(map(str, self.factors))


@dataclass(frozen=True)
class Expression:
    """Terms in the order they are written; the first is positive."""

    terms: tuple[Term, ...]

    @property
    def value(self) -> int:
        return sum(term.value for term in self.terms)

    @property
    def text(self) -> str:
        """As written, such as 12+34-5."""
        first, *rest = self.terms
        return first.text + "".join("+-"[term.sign < 0] + term.text for term in rest)

    @property
    def canonical(self) -> str:
        """A form that does not depend on the order of terms and factors: 12+34 and 34+12 are the same problem."""
        return " ".join(sorted("+-"[term.sign < 0] + "*".join(map(str, sorted(term.factors))) for term in self.terms))


def draw_expression(source: random.Random, level: int) -> Expression:
    """Draws an expression of a level. No partial sum is negative, so that a word problem can describe it."""
    expression = _draw_unchecked(source, level)
    while not _never_negative(expression):
        expression = _draw_unchecked(source, level)
    return expression


def _draw_unchecked(source: random.Random, level: int) -> Expression:
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
    """Two terms of two digits that are added or subtracted without carrying or borrowing."""
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


NAMES = ("Ada", "Bo", "Cem", "Dia", "Eli", "Fay", "Gus", "Hana", "Ivo", "June")
THINGS = ("apples", "books", "cards", "coins", "eggs", "marbles", "pens", "plates", "shells", "stamps")
GAIN_VERBS = ("finds {}", "buys {}", "is given {}", "wins {}")
LOSS_VERBS = ("loses {}", "gives away {}", "sells {}", "breaks {}")


def word_problem(expression: Expression, source: random.Random) -> str:
    """A word problem, such as "Ada has 12 pens. Ada finds 5 more. How many pens does Ada have now?"."""
    name, things = source.choice(NAMES), source.choice(THINGS)
    first, *rest = expression.terms
    sentences = [f"{name} has {_amount(first, things)}."]
    for term in rest:
        verbs = LOSS_VERBS if term.sign < 0 else GAIN_VERBS
        sentences.append(f"{name} {source.choice(verbs).format(_more(term))}.")
    ending = f"How many {things} does {name} have{' now' if rest else ''}?"
    return " ".join([*sentences, ending])


def _amount(term: Term, things: str) -> str:
    if len(term.factors) == 1:
        return f"{term.factors[0]} {things if term.factors[0] != 1 else things[:-1]}"
    boxes, each = term.factors
    return f"{boxes} boxes with {each} {things} in each"


def _more(term: Term) -> str:
    return f"{term.factors[0]} more" if term.sign > 0 else f"{term.factors[0]}"


Style = Literal["compact", "words", "mixed"]

HELD_OUT_ONE_IN = 8
"""One canonical form in this many is held out for validation."""

MAX_REPEATS = 2000
"""Consecutive draws of known problems after which a level counts as exhausted. With 1 % of the problems left, the
probability of stopping too early is below 1e-8."""

TAG = "math_rule"
"""Tag of the problems; the reward of this name scores them."""


@dataclass(frozen=True)
class Problem:
    """One line of the files; `level` is one of LEVELS."""

    id: str
    tag: str
    level: int
    prompt: str
    solution: str
    ground_truth: str


def generate(
    count: int,
    *,
    split: Literal["train", "val"],
    seed: int,
    levels: Sequence[int] = (1, 2),
    style: Style = "compact",
    words_share: float = 0.5,
    boxed: bool = True,
) -> list[Problem]:
    r"""Generates problems with distinct texts, alternating between the levels until a level is exhausted.

    Args:
        count: number of problems.
        split: the split from which the canonical forms are drawn.
        seed: seed; the same arguments give the same problems.
        levels: levels in LEVELS.
        style: `compact`, such as "12+34=" with the solution "46"; `words`, a word problem with a worked solution; or
            `mixed`, where `words_share` of the problems are word problems.
        words_share: in [0, 1]; used by `mixed`.
        boxed: worked solutions end with `\boxed{46}` instead of "46".

    Raises:
        ValueError: a level is unknown, or fewer than `count` problems exist.
    """
    unknown = sorted(set(levels) - set(LEVELS))
    if unknown or not levels:
        raise ValueError(f"levels {unknown or list(levels)}: the levels are {', '.join(map(str, LEVELS))}")
    source = random.Random(f"{seed}/{split}/{style}/{','.join(map(str, levels))}")
    share = {"compact": 0.0, "words": 1.0, "mixed": words_share}[style]
    problems: dict[str, Problem] = {}
    open_levels, misses = list(levels), dict.fromkeys(levels, 0)
    while len(problems) < count:
        if not open_levels:
            raise ValueError(
                f"{split}: levels {list(levels)} in style {style} have {len(problems)} problems, fewer than the "
                f"{count} requested; request fewer or add a level"
            )
        level = open_levels[len(problems) % len(open_levels)]
        expression = draw_expression(source, level)
        if held_out(expression) != (split == "val"):
            continue
        prompt, solution = _render(expression, source.random() < share, boxed, source)
        if prompt in problems:
            misses[level] += 1
            if misses[level] >= MAX_REPEATS:
                open_levels.remove(level)
            continue
        misses[level] = 0
        number = len(problems)
        problems[prompt] = Problem(f"{split}-{seed}-{number}", TAG, level, prompt, solution, str(expression.value))
    return list(problems.values())


def held_out(expression: Expression) -> bool:
    """Whether the problem belongs to the validation split; independent of the seed."""
    digest = hashlib.sha256(expression.canonical.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def write_problems(folder: Path, *, seed: int, train: int = 4000, val: int = 200, **options: Any) -> None:
    """Writes `train` training problems to folder/train.jsonl and `val` validation problems to folder/val.jsonl.

    Args:
        folder: created if needed; existing files are overwritten.
        seed: seed of both files.
        train: number of training problems.
        val: number of validation problems.
        options: further arguments of `generate`.

    Raises:
        ValueError: as `generate`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    problems = {
        "train": generate(train, split="train", seed=seed, **options),
        "val": generate(val, split="val", seed=seed, **options),
    }
    for split, lines in problems.items():
        text = "".join(json.dumps(asdict(problem)) + "\n" for problem in lines)
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")


def _render(expression: Expression, as_word_problem: bool, boxed: bool, source: random.Random) -> tuple[str, str]:
    if not as_word_problem:
        return f"{expression.text}=", str(expression.value)
    answer = rf"\boxed{{{expression.value}}}" if boxed else str(expression.value)
    return word_problem(expression, source), f"{expression.text}={expression.value}. The answer is {answer}"


def parse_levels(text: str) -> list[int]:
    """Parses levels such as "1-4", "2" or "1,3-4"."""
    levels: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        levels += range(int(first), int(last or first) + 1)
    return levels


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(description="Write math problems as JSONL.")
    parser.add_argument("--out", type=Path, required=True, help="folder of train.jsonl and val.jsonl")
    parser.add_argument("--train", type=int, required=True, help="number of training problems")
    parser.add_argument("--val", type=int, required=True, help="number of validation problems")
    parser.add_argument("--levels", type=parse_levels, default=[1, 2], help="such as 1-4 or 1,3 (default: 1-2)")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--style", choices=["compact", "words", "mixed"], default="compact")
    parser.add_argument("--words-share", type=float, default=0.5, help="share of word problems in style mixed")
    parser.add_argument("--plain-answer", action="store_true", help=r"worked solutions end in 46, not \boxed{46}")
    options = parser.parse_args(arguments)
    write_problems(
        options.out,
        seed=options.seed,
        train=options.train,
        val=options.val,
        levels=options.levels,
        style=options.style,
        words_share=options.words_share,
        boxed=not options.plain_answer,
    )
    print(f"{options.out}: {options.train} problems in train.jsonl, {options.val} in val.jsonl")


if __name__ == "__main__":
    main()

r"""Arithmetic and word problems of graded difficulty with exact whole answers, deterministic from a seed.

    python -m roll.datasets.math_problems --out DIR --train N --val N --levels 1-4 --seed S

writes DIR/train.jsonl and DIR/val.jsonl with the columns id, tag, prompt, solution and ground_truth.

Whether a problem may be trained on depends on its canonical form alone: one in HELD_OUT_SHARE of all forms, by hash, is
held out for validation. So no validation problem is ever trained on, in whatever order of terms, style, seed or size
the two files, or the files of two calls, were made.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from roll.datasets.math_expressions import LEVELS, Expression, draw
from roll.datasets.math_stories import tell

Style = Literal["compact", "words", "mixed"]

HELD_OUT_SHARE = 8
"""One canonical form in so many is kept for validation."""

PATIENCE = 2000
"""Draws in a row that only repeat problems before a level counts as exhausted: with 1 % left, the chance to stop too
early is below one in a hundred million."""

TAG = "math_rule"
"""The reward that scores these problems."""


@dataclass(frozen=True)
class Problem:
    """One line of the files; `level` is its difficulty."""

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
    r"""Problems with different texts, the levels in equal shares as long as they last.

    Args:
        count: how many.
        split: the part of all canonical forms they are drawn from.
        seed: the same arguments give the same problems.
        levels: of LEVELS.
        style: `compact` such as "12+34=" with the solution "46"; `words` with a story and a worked solution;
            `mixed`: words for `words_share` of the problems.
        words_share: in [0, 1]; for `mixed`.
        boxed: worked solutions end in `\boxed{46}` instead of plain "46".

    Raises:
        ValueError: a level is unknown, or there are fewer problems than `count`.
    """
    unknown = sorted(set(levels) - set(LEVELS))
    if unknown or not levels:
        raise ValueError(f"levels {unknown or list(levels)}: there are {', '.join(map(str, LEVELS))}")
    source = random.Random(f"{seed}/{split}/{style}/{','.join(map(str, levels))}")
    share = {"compact": 0.0, "words": 1.0, "mixed": words_share}[style]
    problems: dict[str, Problem] = {}
    open_levels, misses = list(levels), dict.fromkeys(levels, 0)
    while len(problems) < count:
        if not open_levels:
            raise ValueError(
                f"{split}: levels {list(levels)} in style {style} hold {len(problems)} problems, {count} were asked "
                "for; ask for fewer or add a level"
            )
        level = open_levels[len(problems) % len(open_levels)]
        expression = draw(source, level)
        if held_out(expression) != (split == "val"):
            continue
        prompt, solution = _render(expression, source.random() < share, boxed, source)
        if prompt in problems:
            misses[level] += 1
            if misses[level] >= PATIENCE:
                open_levels.remove(level)
            continue
        misses[level] = 0
        number = len(problems)
        problems[prompt] = Problem(f"{split}-{seed}-{number}", TAG, level, prompt, solution, str(expression.value))
    return list(problems.values())


def held_out(expression: Expression) -> bool:
    """Whether the problem belongs to validation, whatever the seed."""
    digest = hashlib.sha256(expression.canonical.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_SHARE == 0


def write_problems(folder: Path, *, seed: int, train: int = 4000, val: int = 200, **options: Any) -> None:
    """Writes `train` problems to folder/train.jsonl and `val` held-out ones to folder/val.jsonl.

    Args:
        folder: made where needed; files of an earlier call are overwritten.
        seed: of both files.
        train: problems to train on.
        val: problems held out.
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


def _render(expression: Expression, words: bool, boxed: bool, source: random.Random) -> tuple[str, str]:
    if not words:
        return f"{expression.text}=", str(expression.value)
    answer = rf"\boxed{{{expression.value}}}" if boxed else str(expression.value)
    return tell(expression, source), f"{expression.text}={expression.value}. The answer is {answer}"


def parse_levels(text: str) -> list[int]:
    """Levels from "1-4", "2" or "1,3-4"."""
    levels: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        levels += range(int(first), int(last or first) + 1)
    return levels


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write math problems as JSONL.")
    parser.add_argument("--out", type=Path, required=True, help="folder of train.jsonl and val.jsonl")
    parser.add_argument("--train", type=int, required=True, help="problems to train on")
    parser.add_argument("--val", type=int, required=True, help="problems held out")
    parser.add_argument("--levels", type=parse_levels, default=[1, 2], help="such as 1-4 or 1,3 (default 1-2)")
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
    print(f"{options.out}: {options.train} problems in train.jsonl, {options.val} held out in val.jsonl")


if __name__ == "__main__":
    main()

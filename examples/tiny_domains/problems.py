"""Problems of four domains for a small model, and questions for its judge; each from a seed, each split for itself.

A problem of validation is never trained on: the hash of its prompt decides on its split.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from roll.datasets.math_problems import draw_expression

LETTERS = "abcdefgh"
WORD = 4
"""Letters of a word."""

HELD_OUT_ONE_IN = 10
"""Of the prompts of every domain, the share that is held out for validation."""


def total(source: random.Random) -> tuple[str, str]:
    """A sum or difference of two numbers."""
    expression = draw_expression(source, level=1)
    return f"{expression.text}=", str(expression.value)


def choice(source: random.Random) -> tuple[str, str]:
    """The letter of the largest of three numbers."""
    numbers = source.sample(range(10, 100), 3)
    options = " ".join(f"{letter}{number}" for letter, number in zip("ABC", numbers, strict=True))
    return f"max {options}:", "ABC"[numbers.index(max(numbers))]


def ordered(source: random.Random) -> tuple[str, str]:
    """A word with its letters in the order of the alphabet."""
    letters = source.sample(LETTERS, WORD)
    return f"sort {''.join(letters)}:", "".join(sorted(letters))


def backwards(source: random.Random) -> tuple[str, str]:
    """A word read from its end."""
    word = "".join(source.sample(LETTERS, WORD))
    return f"back {word}:", word[::-1]


Make = Callable[[random.Random], tuple[str, str]]
"""Draws a prompt and its answer."""

DOMAINS: dict[str, Make] = {
    "sum": total,
    "choice": choice,
    "ordered": ordered,
    "judged": backwards,
}
"""By tag."""


def judgement(source: random.Random) -> tuple[str, str]:
    """A reference answer and a response as a judge reads them, and its grade: 1 where they are the same, else 0."""
    word = source.sample(LETTERS, WORD)
    other = list(word)
    kind = source.choice(("same", "same", "letter", "swapped", "other", "short", "long"))
    if kind == "letter":
        other[source.randrange(WORD)] = source.choice(LETTERS)
    elif kind == "swapped":
        first, second = source.sample(range(WORD), 2)
        other[first], other[second] = other[second], other[first]
    elif kind == "other":
        other = source.choices(LETTERS, k=WORD)
    elif kind == "short":
        other = other[: source.randrange(WORD)]
    elif kind == "long":
        other += source.choices(LETTERS, k=source.randint(1, 3))
    return f"{''.join(word)}~{''.join(other)}", str(int(other == word))


def draw(make: Make, source: random.Random) -> Iterator[tuple[bool, str, str]]:
    """Different problems without end: whether it is held out, prompt, answer."""
    seen: set[str] = set()
    while True:
        prompt, answer = make(source)
        if prompt not in seen:
            seen.add(prompt)
            digest = int(hashlib.sha256(prompt.encode()).hexdigest(), 16)
            yield digest % HELD_OUT_ONE_IN == 0, prompt, answer


def write(folder: Path, seed: int, train: int, val: int) -> None:
    """Writes train.jsonl and val.jsonl with the problems of all domains, and those of the judge in judge-*.jsonl.

    Args:
        folder: made when missing.
        seed: of the problems.
        train: problems of each domain, and of the judge for each domain.
        val: the same for validation.
    """
    folder.mkdir(parents=True, exist_ok=True)
    domains = {tag: (make, train, val) for tag, make in DOMAINS.items()}
    _write(folder, "", domains, seed)
    _write(folder, "judge-", {"judgement": (judgement, len(domains) * train, len(domains) * val)}, seed)


def _write(folder: Path, prefix: str, domains: dict[str, tuple[Make, int, int]], seed: int) -> None:
    rows: dict[bool, list[dict[str, str]]] = {False: [], True: []}
    for tag, (make, train, val) in domains.items():
        missing = {False: train, True: val}
        for held_out, prompt, answer in draw(make, random.Random(f"{tag}/{seed}")):
            if missing[held_out]:
                missing[held_out] -= 1
                row = {"id": f"{tag}-{prompt}", "tag": tag, "prompt": prompt}
                rows[held_out].append(row | {"solution": answer, "ground_truth": answer})
            if not any(missing.values()):
                break
    for held_out, name in ((False, "train"), (True, "val")):
        with (folder / f"{prefix}{name}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows[held_out])

"""Problems of four domains for a small model, and questions for its judge, each from a seed.

A problem occurs in validation or in training, never in both: the hash of its prompt decides. The
questions for the judge are not held out: the judge has to be right about every pair of answers, and few are equal.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path

LETTERS = "abcdefgh"
WORD = 4
"""Letters of a word."""

HELD_OUT_ONE_IN = 10
"""One in so many prompts of every domain is held out for validation."""


def total(source: random.Random) -> tuple[str, str]:
    """A number of two digits and one of one digit, added without carrying."""
    tens, ones = source.randint(1, 9), source.randint(0, 9)
    other = source.randint(0, 9 - ones)
    return f"{tens}{ones}+{other}=", f"{tens}{ones + other}"


def choice(source: random.Random) -> tuple[str, str]:
    """The letter of the largest of three numbers."""
    numbers = source.sample(range(10, 100), 3)
    options = " ".join(f"{letter}{number}" for letter, number in zip("ABC", numbers, strict=True))
    return f"max {options}:", "ABC"[numbers.index(max(numbers))]


def ordered(source: random.Random) -> tuple[str, str]:
    """A word with its letters in the order of the alphabet."""
    letters = source.sample(LETTERS, WORD)
    return f"sort {''.join(letters)}:", "".join(sorted(letters))


def ends(source: random.Random) -> tuple[str, str]:
    """The first and the last letter of a word."""
    word = "".join(source.sample(LETTERS, WORD))
    return f"ends {word}:", word[0] + word[-1]


Make = Callable[[random.Random], tuple[str, str]]
"""Draws a prompt and its answer."""

DOMAINS: dict[str, Make] = {
    "sum": total,
    "choice": choice,
    "ordered": ordered,
    "judged": ends,
}
"""By tag."""


def judgement(source: random.Random) -> tuple[str, str]:
    """A reference answer and a response as a judge reads them, and its grade: 1 where they are the same, else 0."""
    truth = "".join(source.sample(LETTERS, 2))
    kind = source.choice(("same", "same", "letter", "swapped", "other", "shorter", "longer", "strange"))
    response = truth
    if kind == "letter":
        response = source.choice((truth[0] + source.choice(LETTERS), source.choice(LETTERS) + truth[1]))
    elif kind == "swapped":
        response = truth[::-1]
    elif kind == "other":
        response = "".join(source.choices(LETTERS, k=2))
    elif kind == "shorter":
        response = source.choice(("", *truth))
    elif kind == "longer":
        response += "".join(source.choices(LETTERS, k=source.randint(1, 3)))
    elif kind == "strange":
        response = "".join(source.choices(LETTERS + "ABC0123456789", k=source.randint(1, 4)))
    return f"{truth}~{response}", str(int(response == truth))


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
    rows: dict[str, list[dict[str, str]]] = {"train": [], "val": []}
    for tag, (make, train, val) in domains.items():
        source, missing = random.Random(f"{tag}/{seed}"), {"train": train, "val": val}
        while any(missing.values()):
            prompt, answer = make(source)
            split = split_of(prompt) if tag in DOMAINS else source.choice(("train", "val"))
            if missing[split]:
                missing[split] -= 1
                row = {"id": f"{tag}-{split}-{missing[split]}", "tag": tag, "prompt": prompt}
                rows[split].append(row | {"solution": answer, "ground_truth": answer})
    for split, of_split in rows.items():
        with (folder / f"{prefix}{split}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in of_split)


def split_of(prompt: str) -> str:
    """`val` for one prompt in HELD_OUT_ONE_IN, by its hash alone; `train` for the others."""
    held_out = int(hashlib.sha256(prompt.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0
    return "val" if held_out else "train"

"""Writes conversations about sums, as Tinker's cookbook reads them: one per line, with the question of its arithmetic.

python -m examples.tinker.sums --out output/tinker/sums.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path


def write_sums(file: Path, count: int, seed: int = 0) -> Path:
    """Writes `count` conversations, each with one worked sum before the one that is asked, and returns the file."""
    draw = random.Random(seed)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8") as out:
        for _ in range(count):
            turns = [(4, 5), (draw.randint(0, 100), draw.randint(0, 100))]
            messages = [
                {"role": role, "content": content}
                for one, other in turns
                for role, content in (("user", f"What is {one} + {other}?"), ("assistant", str(one + other)))
            ]
            out.write(json.dumps({"messages": messages}) + "\n")
    return file


def main() -> None:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--count", type=int, default=4096)
    arguments = parser.parse_args()
    print(f"wrote {write_sums(arguments.out, arguments.count)}")


if __name__ == "__main__":
    main()

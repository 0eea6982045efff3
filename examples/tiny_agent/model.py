"""Creates a small random model whose template shows tools: `python -m examples.tiny_agent.model --out my_model`."""

from __future__ import annotations

import argparse
from pathlib import Path

from examples.tiny_agent.episodes import CHAT_TEMPLATE, WORDS

POSITIONS = 4096
"""Tokens of the longest conversation; every character is one."""


def make_model(folder: Path, seed: int = 42, words: tuple[str, ...] = WORDS) -> Path:
    """Writes model and tokenizer to `folder` and returns it; each of `words` is one token."""
    from examples.tiny_math.prepare import prepare

    return prepare(folder, seed, words, CHAT_TEMPLATE, POSITIONS)


def main() -> None:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    print(f"wrote {make_model(parser.parse_args().out)}")


if __name__ == "__main__":
    main()

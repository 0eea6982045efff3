"""A tool that searches files of the user by BM25; the index is made once in each process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

from roll.base.errors import Problem, RunError
from roll.base.schema import one_or_many, option
from roll.envs.tools.bm25 import Bm25Index
from roll.envs.tools.calls import ToolCall, function_schema, text_argument, text_parameter

DESCRIPTION = "Searches a collection of texts for the passages that share most words with a query."

COLUMNS = ("text", "contents")
"""Columns that may hold the passage of a row; a column `title` comes before it."""

_making = threading.Lock()
_collections: dict[tuple[tuple[str, ...], int], PassageCollection] = {}


@dataclass
class SearchOptions:
    """Options of the tool."""

    files: list[str] = option(
        factory=list,
        parse=one_or_many,
        help="Files, or patterns such as docs/*.md: each row of a .jsonl file is a passage, other texts are divided.",
    )
    results: int = option(3, "Passages that a search returns.", ge=1)
    passage_words: int = option(
        100, "Words of a passage: paragraphs of a text are joined up to so many, longer ones are divided.", ge=1
    )

    def check(self) -> Iterator[Problem]:
        """Yields files that do not exist."""
        if not self.files:
            yield Problem("files", "is empty, so there is nothing to search; name files")
        for pattern in self.files:
            if not glob(pattern, recursive=True):
                yield Problem("files", f"{pattern} is no file of {Path.cwd()}; correct it")


@dataclass(frozen=True)
class PassageCollection:
    """Passages and their index."""

    passages: list[str]
    index: Bm25Index


class SearchTool:
    """The function `search`."""

    def __init__(self, options: SearchOptions) -> None:
        self._options = options

    def schemas(self) -> list[dict[str, Any]]:
        """Makes the index, so that a file that cannot be read is found before the first search."""
        _collection(tuple(self._options.files), self._options.passage_words)
        return [function_schema("search", DESCRIPTION, text_parameter("query", "What to look for, in a few words."))]

    def call(self, call: ToolCall) -> str:
        """The best passages, numbered.

        Raises:
            ToolError: the query is missing.
            RunError: a file cannot be read.
        """
        query = text_argument(call, "query")
        found = _collection(tuple(self._options.files), self._options.passage_words)
        best = [found.passages[at] for at in found.index.best(query, self._options.results)]
        return "\n\n".join(f"[{number}] {text}" for number, text in enumerate(best, 1)) or "(nothing was found)"

    def close(self) -> None:
        """Nothing to end: the index is that of the process."""


def _collection(patterns: tuple[str, ...], longest: int) -> PassageCollection:
    with _making:
        if (patterns, longest) not in _collections:
            files = dict.fromkeys(file for pattern in patterns for file in sorted(glob(pattern, recursive=True)))
            passages = [each for file in files if Path(file).is_file() for each in read_passages(Path(file), longest)]
            _collections[patterns, longest] = PassageCollection(passages, Bm25Index(passages))
        return _collections[patterns, longest]


def read_passages(file: Path, longest: int) -> Iterator[str]:
    """The passages of a file: its rows, or its paragraphs, joined up to `longest` words; a longer one is divided.

    Raises:
        RunError: a row is not JSON, or has no passage.
    """
    text = file.read_text(encoding="utf-8", errors="replace")
    if file.suffix == ".jsonl":
        yield from (_passage(line, f"{file}:{at}") for at, line in enumerate(text.splitlines(), 1) if line.strip())
        return
    joined: list[str] = []
    for paragraph in text.split("\n\n"):
        words = paragraph.split()
        if joined and len(joined) + len(words) > longest:
            yield " ".join(joined)
            joined = []
        joined += words
        while len(joined) > longest:
            yield " ".join(joined[:longest])
            joined = joined[longest:]
    if joined:
        yield " ".join(joined)


def _passage(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise RunError(f"{where}: is no JSON: {error}") from error
    text = next((row[name] for name in COLUMNS if isinstance(row.get(name), str)), None) if row else None
    if text is None:
        raise RunError(f"{where}: has no text; name it {' or '.join(COLUMNS)}")
    return f"{row['title']}: {text}" if row.get("title") else str(text)

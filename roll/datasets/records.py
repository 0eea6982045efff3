"""Rows of JSONL and parquet files, each knowing where it stands, so that an error can say so."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from roll.configs.errors import unreachable

SUFFIXES = (".jsonl", ".json", ".parquet")
"""Files that can be read; .json holds one object per line, like .jsonl."""

SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""Half of a character beyond U+FFFF as JSON writes it; without its other half it is no text."""


class DatasetError(ValueError):
    """A data file is missing, empty or not in the layout asked for; the message names file, line and column."""


@dataclass(frozen=True)
class Record:
    """One row of a data file.

    Attributes:
        file: the file's path.
        line: its line (JSONL) or row (parquet), from 1.
        row: its columns.
    """

    file: Path
    line: int
    row: dict[str, Any]

    @property
    def place(self) -> str:
        """`file:line`."""
        return f"{self.file}:{self.line}"

    def fail(self, message: str) -> NoReturn:
        """Raises a DatasetError about this row."""
        raise DatasetError(f"{self.place}: {message}")

    def fail_missing(self, *columns: str) -> NoReturn:
        """Raises a DatasetError about columns of which the row has none, or nothing but null."""
        for column in columns:
            if column.partition(".")[0] in self.row:
                self.fail(f"column {column!r} is empty (null); give it a value")
        wanted = " or ".join(repr(column) for column in columns)
        self.fail(f"no column {wanted}; the columns are {', '.join(self.row)}")


@contextmanager
def naming(source: str) -> Iterator[None]:
    """Puts `source` before the message of a DatasetError raised inside, which knows neither role nor file."""
    try:
        yield
    except DatasetError as error:
        raise DatasetError(f"{source}: {error}") from error


def read_records(files: str | Path | list[str] | list[Path]) -> list[Record]:
    """All rows of the files, in order; a single name is a list of one.

    Raises:
        DatasetError: no file is named, one is missing, unreadable, empty, of another kind, or has a line that is not
            an object of texts and numbers.
    """
    if isinstance(files, str | Path):
        files = [str(files)]
    if not files:
        raise DatasetError("data_args.file_name names no file")
    return [record for file in files for record in _read_file(Path(file))]


def _read_file(path: Path) -> list[Record]:
    why = unreachable(path)
    if why is not None:
        raise DatasetError(f"{path}: cannot be read: {why}")
    if not os.path.isfile(path):
        raise DatasetError(f"{path}: no such file (looked in {path.absolute().parent})")
    if path.suffix not in SUFFIXES:
        raise DatasetError(f"{path}: cannot read {path.suffix or 'a file without suffix'}; use {', '.join(SUFFIXES)}")
    reader = _parquet_rows if path.suffix == ".parquet" else _json_lines
    records = [Record(path, line, row) for line, row in reader(path)]
    if not records:
        raise DatasetError(f"{path}: the file is empty")
    return records


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, _json_row(line, f"{path}:{number}")


def _json_row(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode())
        if SURROGATE.search(line):
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise DatasetError(f"{place}: not UTF-8 at byte {error.start + 1}; save the file as UTF-8") from error
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise DatasetError(f"{place}: {half} is half a character; remove it, or write the other half too") from error
    except json.JSONDecodeError as error:
        raise DatasetError(f"{place}: not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise DatasetError(f"{place}: objects or lists stand inside each other too deep") from error
    except ValueError as error:
        raise DatasetError(f"{place}: a number has too many digits; put it in quotes") from error
    if not isinstance(row, dict):
        raise DatasetError(f"{place}: holds a {type(row).__name__}; write one JSON object per line")
    return row


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path}: not a parquet file, or a damaged one: {error}") from error
    yield from enumerate(rows, start=1)

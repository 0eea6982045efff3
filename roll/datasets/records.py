"""Rows of JSONL and parquet files, each knowing where it stands, so that an error can say so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

SUFFIXES = (".jsonl", ".json", ".parquet")
"""Files that can be read; .json holds one object per line, like .jsonl."""


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

    def fail(self, message: str) -> NoReturn:
        """Raises a DatasetError about this row."""
        raise DatasetError(f"{self.file}:{self.line}: {message}")

    def fail_missing(self, *columns: str) -> NoReturn:
        """Raises a DatasetError about columns of which the row has none."""
        wanted = " or ".join(repr(column) for column in columns)
        self.fail(f"no column {wanted}; the columns are {', '.join(self.row)}")


def read_records(files: str | Path | list[str] | list[Path]) -> list[Record]:
    """All rows of the files, in order; a single name is a list of one.

    Raises:
        DatasetError: no file is named, one is missing, empty, of another kind, or has a line that is not an object.
    """
    if isinstance(files, str | Path):
        files = [str(files)]
    if not files:
        raise DatasetError("data_args.file_name names no file")
    return [record for file in files for record in _read_file(Path(file))]


def _read_file(path: Path) -> list[Record]:
    if not path.is_file():
        raise DatasetError(f"{path}: no such file (looked in {path.absolute().parent})")
    if path.suffix not in SUFFIXES:
        raise DatasetError(f"{path}: cannot read {path.suffix or 'a file without suffix'}; use {', '.join(SUFFIXES)}")
    reader = _parquet_rows if path.suffix == ".parquet" else _json_lines
    records = [Record(path, line, row) for line, row in reader(path)]
    if not records:
        raise DatasetError(f"{path}: the file is empty")
    return records


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DatasetError(f"{path}:{number}: not JSON: {error.msg} at column {error.colno}") from error
            if not isinstance(row, dict):
                raise DatasetError(f"{path}:{number}: holds a {type(row).__name__}; write one JSON object per line")
            yield number, row


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowInvalid as error:
        raise DatasetError(f"{path}: not a parquet file: {error}") from error
    yield from enumerate(table.to_pylist(), start=1)

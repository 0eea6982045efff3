"""Rows of JSONL and parquet files with their location, so that errors name file and line."""

from __future__ import annotations

import json
import os
import re
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from roll.base.errors import RunError, git_lfs_pointer, unreachable
from roll.hub.names import local_file
from roll.hub.splits import READABLE

SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""A JSON escape of a surrogate; a surrogate without its pair is not valid text."""

LONGEST_LINE = 256 * 2**20
"""Bytes of the longest line of a JSONL file that is read; a longer one is no row."""

PARQUET_BATCH = 8192
"""Rows of a parquet file that are decoded at a time."""

ResultT = TypeVar("ResultT")


class DatasetError(RunError, ValueError):
    """A data file is missing, empty or has invalid content; the message names file, line and column."""


@dataclass(frozen=True)
class Record:
    """One row of a data file.

    Attributes:
        line: of the file (JSONL) or row (parquet), from 1.
        row: values by column.
    """

    file: Path
    line: int
    row: dict[str, Any]

    @property
    def location(self) -> str:
        return f"{self.file}:{self.line}"

    def fail(self, message: str) -> NoReturn:
        raise DatasetError(f"{self.location}: {message}")

    def fail_missing(self, *columns: str, key: str) -> NoReturn:
        """Raises a DatasetError: the row has none of the columns, or one that is null; `key` names the right column."""
        for column in columns:
            if column.partition(".")[0] in self.row:
                self.fail(f"column {column!r} is null; give it a value")
        wanted = " or ".join(repr(column) for column in columns)
        self.fail(f"no column {wanted}; the columns are {', '.join(self.row)}: name the right one in data_args.{key}")


@contextmanager
def prefix_errors(source: str) -> Iterator[None]:
    """Prefixes DatasetErrors raised inside with `source`, such as the role and its files."""
    try:
        yield
    except DatasetError as error:
        raise DatasetError(f"{source}: {error}") from error


def read_records(files: str | Path | list[str] | list[Path], limit: int | None = None) -> list[Record]:
    """Reads the rows of one file or of several, in order: all, or the first `limit` of each file.

    Raises:
        DatasetError: no file is given; a file is missing, unreadable, empty or of an unsupported kind; or a line is not
            a JSON object.
    """
    if isinstance(files, str | Path):
        files = [str(files)]
    if not files:
        raise DatasetError("data_args.file_name is empty")
    return [record for file in files for record in _read_file(local_file(file), limit)]


def read_first(
    file: str | Path, count: int, read: Callable[[Record], ResultT]
) -> tuple[list[ResultT], list[DatasetError]]:
    """What `read` makes of the first `count` rows, and the error of every broken row among them.

    Raises:
        DatasetError: the file is missing, unreadable, empty or of an unsupported kind.
    """
    found: list[ResultT] = []
    errors: list[DatasetError] = []
    for row in islice(_rows(Path(file)), count):
        try:
            found.append(read(_whole(row)))
        except DatasetError as error:
            errors.append(error)
    if not found and not errors:
        raise DatasetError(f"{file}: the file is empty")
    return found, errors


def _read_file(path: Path, limit: int | None) -> list[Record]:
    records = [_whole(row) for row in islice(_rows(path), limit)]
    if not records:
        raise DatasetError(f"{path}: the file is empty")
    return records


def _whole(row: Record | DatasetError) -> Record:
    if isinstance(row, DatasetError):
        raise row
    return row


def _rows(path: Path) -> Iterator[Record | DatasetError]:
    """The rows of a file, and an error in place of each that is broken."""
    try:
        yield from _reader(path)(path)
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error.strerror or error}") from error
    except MemoryError as error:
        raise DatasetError(f"{path}: does not fit the memory; split it into smaller files or shorter lines") from error


def _reader(path: Path) -> Callable[[Path], Iterator[Record | DatasetError]]:
    reason = unreachable(path)
    if reason is not None:
        raise DatasetError(f"{path}: cannot be read: {reason}")
    if os.path.isdir(path):
        raise DatasetError(f"{path}: is a folder; name the files in it")
    if not os.path.isfile(path):
        raise DatasetError(f"{path}: no such file (looked in {path.absolute().parent})")
    if path.suffix not in READABLE:
        raise DatasetError(f"{path}: cannot read {path.suffix or 'a file without suffix'}; use {', '.join(READABLE)}")
    if pointer := git_lfs_pointer(path):
        raise DatasetError(f"{path}: {pointer}")
    return _parquet_rows if path.suffix == ".parquet" else _json_list if _is_list(path) else _json_lines


def _json_lines(path: Path) -> Iterator[Record | DatasetError]:
    with path.open("rb") as lines:
        for number, line in enumerate(iter(partial(lines.readline, LONGEST_LINE + 1), b""), start=1):
            if len(line) > LONGEST_LINE:
                raise DatasetError(f"{path}:{number}: is longer than {LONGEST_LINE >> 20} MiB; write one row per line")
            if number == 1:
                line = line.removeprefix(BOM_UTF8)
            if line.strip():
                try:
                    yield Record(path, number, _json_row(line, f"{path}:{number}"))
                except DatasetError as error:
                    yield error


def _is_list(path: Path) -> bool:
    """Whether a .json file holds one list; a .jsonl file holds lines."""
    if path.suffix != ".json":
        return False
    with path.open("rb") as file:
        return file.read(4096).removeprefix(BOM_UTF8).lstrip().startswith(b"[")


def _json_list(path: Path) -> Iterator[Record | DatasetError]:
    rows = _parsed(path.read_bytes().removeprefix(BOM_UTF8), str(path))
    for number, row in enumerate(rows, start=1):
        if isinstance(row, dict):
            yield Record(path, number, row)
        else:
            yield DatasetError(f"{path}: item {number} of the list is a {type(row).__name__}; write objects")


def _json_row(line: bytes, location: str) -> dict[str, Any]:
    row = _parsed(line, location)
    if not isinstance(row, dict):
        raise DatasetError(f"{location}: holds a {type(row).__name__}; write one JSON object per line")
    return row


def _parsed(text: bytes, location: str) -> Any:
    try:
        value = json.loads(text.decode(), object_pairs_hook=partial(_object, location))
        if SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise DatasetError(f"{location}: not UTF-8 at byte {error.start + 1}; save the file as UTF-8") from error
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise DatasetError(f"{location}: {half} is half of a surrogate pair; add the other half") from error
    except DatasetError:
        raise
    except json.JSONDecodeError as error:
        raise DatasetError(f"{location}: not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise DatasetError(f"{location}: objects or lists are nested too deep") from error
    except ValueError as error:
        raise DatasetError(f"{location}: a number has too many digits; put it in quotes") from error
    return value


def _object(location: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise DatasetError(f"{location}: an object has the key {twice!r} more than once; keep one of them")
    return found


def _parquet_rows(path: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches(PARQUET_BATCH) for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                yield Record(path, number, row)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path}: not a parquet file, or a damaged one: {error}") from error

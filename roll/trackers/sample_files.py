"""The files of `rollout_dump_dir`: the samples of a step as parquet; JSON lines of older runs are read too."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.trackers.files import write_whole

if TYPE_CHECKING:
    import pyarrow

PARQUET, JSON_LINES = ".parquet", ".jsonl"

ABOUT = b"about"
"""Name of the metadata of a file."""

NAMED_BY = ("actor/grad_norm", "correction/behavior_k3")
"""Metrics of which a finding names the step with the largest value, so that its samples stay."""

AS_JSON = ("ground_truth", "parts", "episode")
"""Columns of any value, which are JSON text in the file."""


def dump_path(folder: Path, step: int) -> Path:
    """The file of a step: the one that is there, or the one to write."""
    older = folder / f"step-{step:06d}{JSON_LINES}"
    return older if older.exists() else older.with_suffix(PARQUET)


def dumped_steps(folder: Path) -> list[int]:
    """The steps with a file in the folder, in order; none if there is no folder."""
    files = (path for path in folder.glob("step-*") if path.suffix in (PARQUET, JSON_LINES))
    numbers = {path.stem.removeprefix("step-") for path in files}
    return sorted(int(number) for number in numbers if number.isdecimal())


def write_samples(
    folder: Path, step: int, columns: Mapping[str, pyarrow.Array | list[Any]], about: Mapping[str, Any]
) -> Path:
    """Writes the file of a step at once, in place of an earlier one; the columns AS_JSON have any JSON values.

    `about` is JSON that `read_about` gives: what all samples share.

    Raises:
        RunError: the file cannot be written.
    """
    import pyarrow
    from pyarrow import parquet

    path = dump_path(folder, step).with_suffix(PARQUET)
    found = {name: [*map(json.dumps, values)] if name in AS_JSON else values for name, values in columns.items()}
    table = pyarrow.table(found, metadata={ABOUT: json.dumps(about)})
    write_whole(path, lambda file: parquet.write_table(table, file, compression="zstd"), binary=True)
    path.with_suffix(JSON_LINES).unlink(missing_ok=True)
    return path


def read_samples(folder: Path, step: int) -> list[dict[str, Any]]:
    """The rows of a step by column, without columns that a row has no value of.

    Raises:
        OSError, ValueError: the file cannot be read.
    """
    path = dump_path(folder, step)
    if path.suffix == JSON_LINES:
        return [json.loads(line) for line in path.read_text().splitlines()]
    import pyarrow
    from pyarrow import parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: {error}") from error
    return [
        {name: json.loads(value) if name in AS_JSON else value for name, value in row.items() if value is not None}
        for row in rows
    ]


def read_about(folder: Path, step: int) -> dict[str, Any]:
    """What `write_samples` wrote about all samples of a step; empty for files of older runs."""
    path = dump_path(folder, step)
    if path.suffix == JSON_LINES:
        return {}
    from pyarrow import parquet

    about: dict[str, Any] = json.loads((parquet.read_schema(path).metadata or {}).get(ABOUT, b"{}"))
    return about


Largest = dict[str, tuple[float, int]]
"""Metric -> its largest value so far and the step of it."""


def larger_values(known: Largest, step: int, metrics: Mapping[str, float]) -> Largest:
    """The largest values of NAMED_BY after this step; one that is not finite is larger than all others."""
    found = {name: metrics[name] for name in NAMED_BY if name in metrics}
    values = {name: (value if math.isfinite(value) else math.inf, step) for name, value in found.items()}
    return known | {name: each for name, each in values.items() if each[0] > known.get(name, (-math.inf, 0))[0]}


def keep_samples(folder: Path, step: int, newest: int, every: int | None, named: Collection[int] = ()) -> None:
    """Deletes files but the `newest` up to this step, the first one, one in `every` steps, and those of `named` steps.

    Those of later steps, from an earlier run, are deleted too.
    """
    steps = dumped_steps(folder)
    past = [number for number in steps if number <= step]
    kept = {
        *past[:1],
        *past[-newest:],
        *(number for number in past if number in named or every and number % every == 0),
    }
    for number in set(steps) - kept:
        dump_path(folder, number).unlink(missing_ok=True)

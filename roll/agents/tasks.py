"""Task files: one row is one task."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from roll.configs.pipeline import role_seed
from roll.datasets.records import read_records


def read_tasks(files: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of all files, in order; none without a file.

    Raises:
        DatasetError: a file is missing or broken.
    """
    return [record.row for record in read_records(list(files))] if files else []


def task_of(rows: Sequence[dict[str, Any]], seed: int) -> dict[str, Any]:
    """The task of a seed: a row, or the seed itself where there are no rows."""
    return rows[seed % len(rows)] if rows else {"seed": seed}


def seed_of_place(rows: int, place: int, seed: int, run_seed: int) -> int:
    """A seed near `seed` whose task is the one at a place in the order of a run, in which every row comes once a round.

    Args:
        rows: number of rows; 0 leaves the seed as it is.
        place: how many tasks of this kind came before, over the whole run.
        seed: of the task.
        run_seed: decides the order, another one in each round.
    """
    if rows == 0:
        return seed
    rounds, place = divmod(place, rows)
    return seed - seed % rows + _order(rows, role_seed(run_seed, "tasks", rounds))[place]


@lru_cache(maxsize=8)
def _order(rows: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(rows), rows)

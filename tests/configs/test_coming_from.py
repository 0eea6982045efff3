"""The tables for people who come from elsewhere name keys that exist, and what may stay as it is does."""

from __future__ import annotations

import re
from pathlib import Path

from roll.configs.aliases import KEYS, PLACES
from roll.configs.pipeline import RLVRConfig
from roll.configs.schema import known_keys
from roll.configs.sglang_options import server_options

PAGE = Path(__file__).parents[2] / "docs" / "coming_from.md"
ENGINE = "actor_infer.strategy_args.strategy_config."


def rows() -> list[list[str]]:
    """Cells of every row, without headings."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|") and not line.startswith("|---")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "there"]


def test_every_key_of_the_tables_exists() -> None:
    known = {key.path for key in known_keys(RLVRConfig)}
    known |= {re.sub(r"^actor_train", "<role>", path) for path in known}
    known |= {f"{ENGINE}{name}" for name in server_options() or ()}
    named = [key for row in rows() for key in re.findall(r"`([^`]+)`", row[1])]
    assert len(named) > 100
    assert [key for key in named if key not in known] == []


def test_every_row_has_three_cells() -> None:
    assert [row for row in rows() if len(row) != 3] == []


def test_every_spelling_that_is_moved_stands_in_a_table() -> None:
    shown = {name for row in rows() for name in re.findall(r"`([^`]+)`", row[0])}
    moved = {path.rpartition(".")[2] for path in PLACES}
    assert moved <= shown
    assert {"num_gpus_per_node", "batch_timeout", "batch_generation_interval"} <= shown & set(KEYS)

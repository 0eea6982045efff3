"""TRL's completions of `log_completions`: `completions/completions_STEP.parquet` of GRPO and RLOO (read: 1.16.0)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from roll.tools.compare.batch_dump import BatchDump, required
from roll.tools.terminal import option_error

EXPECTED = "a file completions_STEP.parquet of TRL's log_completions"

OWN = ("step", "prompt", "completion", "advantage")
"""Columns that are no rewards; between completion and advantage stand rewards, then columns of `log_extra`."""


def read_trl(path: Path, rewards: list[str]) -> BatchDump:
    """The rows; scores are sums of the columns `rewards`, or of all columns of numbers, times their weights.

    A reward is `name` or `name:weight`; named twice it counts twice, as there. Rows whose rewards are all missing,
    which have the advantage 0 there, are left out.

    Raises:
        ConfigError: it is another file, or has no such reward.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise option_error("--with", f"{path} cannot be read ({error}); give {EXPECTED}") from None
    for number, row in enumerate(rows):
        required(row, number, OWN, EXPECTED)
    numeric = [name for name in (rows[0] if rows else {}) if name not in OWN and _is_numeric(rows, name)]
    weights = {} if rewards else dict.fromkeys(numeric, 1.0)
    for name, weight in (_weighted(text, numeric) for text in rewards):
        weights[name] = weights.get(name, 0.0) + weight
    chosen = list(weights)
    kept = [row for row in rows if any(_known(row[name]) for name in chosen)]
    if not kept:
        raise option_error("--with", f"{path} has no row with a reward; give {EXPECTED}")
    notes = [f"rewards: {' + '.join(_term(*each) for each in weights.items())}"]
    if len(chosen) > 1 and not rewards:
        notes.append(f"where reward_weights were given: --rewards {':WEIGHT,'.join(chosen)}:WEIGHT")
    if len(kept) < len(rows):
        notes.append(f"rows without a reward, left out: {len(rows) - len(kept)}")
    return BatchDump(
        system="TRL, completions",
        scores=[sum(weights[name] * row[name] for name in chosen if _known(row[name])) for row in kept],
        prompts=[row["prompt"] for row in kept],
        texts=[_text(row["completion"]) for row in kept],
        advantages=[row["advantage"] for row in kept],
        parts={name: [row[name] if _known(row[name]) else math.nan for row in kept] for name in chosen},
        weights=tuple(weights.values()),
        lacks=("token ids", "log-probs"),
        notes=notes,
    )


def _weighted(text: str, numeric: list[str]) -> tuple[str, float]:
    """The column and the weight of `name` or `name:weight`."""
    name, colon, weight = text.partition(":") if text not in numeric else (text, "", "")
    if name not in numeric:
        raise option_error("--rewards", f"{name} is no column of numbers; use {', '.join(numeric)}")
    try:
        number = float(weight) if colon else 1.0
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise option_error("--rewards", f"{text}: {weight!r} is no number; write {name}:0.5")
    return name, number


def _term(name: str, weight: float) -> str:
    return name if weight == 1 else f"{weight:g} {name}"


def _is_numeric(rows: list[dict[str, Any]], name: str) -> bool:
    values = [row[name] for row in rows if row[name] is not None]
    return bool(values) and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _known(value: float | None) -> bool:
    return value is not None and not math.isnan(value)


def _text(completion: Any) -> str:
    """The text of a completion: itself, or the content of the messages of the model."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message.get("content") or "") for message in completion)

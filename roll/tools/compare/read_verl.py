"""verl's `trainer.rollout_data_dir`: one JSON object a line, file STEP.jsonl (read: 0.10.0.dev, 0.8.0.dev)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from roll.tools.compare.batch_dump import BatchDump, number_of, required
from roll.tools.terminal import option_error

EXPECTED = "a file STEP.jsonl of verl's trainer.rollout_data_dir"

LACKS = ("token ids", "log-probs", "advantages")
"""Texts are decoded without special tokens there, so that the ids of prompt and response cannot be had from them."""


def read_verl(path: Path, rewards: list[str]) -> BatchDump:
    """The lines with `input`, `output` and `score`; `uid` of the newer trainer names prompt, rollout and output.

    Raises:
        ConfigError: a line is no JSON object of this format.
    """
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_text("utf-8", errors="replace").rstrip("\n").split("\n")):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise option_error("--with", f"row {number} is not JSON ({error}); give {EXPECTED}") from None
        required(row if isinstance(row, dict) else {}, number, ("input", "output", "score"), EXPECTED)
        rows.append(row)
    uids = [str(row["uid"]) for row in rows if "uid" in row]
    return BatchDump(
        system="verl, rollout_data_dir",
        scores=[number_of(row["score"], f"score of row {number}", None) for number, row in enumerate(rows)],
        prompts=[(row["input"], row.get("gts")) for row in rows],
        groups=[uid.rsplit("_", 2)[0] for uid in uids] if rows and len(uids) == len(rows) else None,
        texts=[row["output"] for row in rows],
        lacks=LACKS,
        alone_is_score=True,
    )

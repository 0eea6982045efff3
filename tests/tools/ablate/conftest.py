"""A grid over a small file, and a command that stands in for `roll run`, to cut off and fail at will."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.configs.samples import RLVR, write

FAKE = Path(__file__).with_name("fake_run.py")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A file that could run here: cpu, with model and data on this machine."""
    data = write(tmp_path, "{}", "train.jsonl")
    text = RLVR.replace("train.jsonl", str(data)).replace("device_mapping: 0-15", "device_mapping: [0, 1]")
    text = text.replace("device_mapping: 16-23", "device_mapping: [2]").replace("_steps: 64", "_steps: 512")
    text += "platform: cpu\nnum_devices_per_node: 3\neval_steps: 1\nmax_steps: 2\n"
    text += f"validation:\n  data_args:\n    file_name: {data}\n"
    return write(tmp_path, text)


def fake(config: str, overrides: Sequence[str]) -> list[str]:
    """The stand-in."""
    return [sys.executable, str(FAKE), config, *overrides]


def lines(*scores: float | None, **every: float) -> list[dict[str, float]]:
    """Lines of a metrics.jsonl: a score for each step, None where there was no validation."""
    return [
        {"step": step, "time/step": 2.0, **every} | ({} if score is None else {"val/score": score})
        for step, score in enumerate(scores)
    ]


def written(folder: Path) -> dict:
    """ablation.json."""
    return json.loads((folder / "ablation.json").read_text())

"""A configuration for small grids, and a fake `roll run` that can fail and hang."""

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
    """A configuration that passes the checks of this machine."""
    data = write(tmp_path, "{}", "train.jsonl")
    text = RLVR.replace("train.jsonl", str(data)).replace("device_mapping: 0-15", "device_mapping: [0, 1]")
    text = text.replace("device_mapping: 16-23", "device_mapping: [2]").replace("_steps: 64", "_steps: 512")
    text = text.replace("qwen2.5-7B", "qwen2.5-0.5B")
    text += "platform: cpu\nnum_devices_per_node: 3\neval_steps: 1\nmax_steps: 2\n"
    text += f"validation:\n  data_args:\n    file_name: {data}\n"
    return write(tmp_path, text)


def fake_run_command(config: str, overrides: Sequence[str]) -> list[str]:
    return [sys.executable, str(FAKE), config, *overrides]


def metric_lines(*scores: float | None, **metrics: float) -> list[dict[str, float]]:
    """Lines of a metrics.jsonl with a score per step, None for no validation, and metrics of every step."""
    return [
        {"step": step, "time/step": 2.0, **metrics} | ({} if score is None else {"val/score": score})
        for step, score in enumerate(scores)
    ]


def read_results(folder: Path) -> dict:
    return json.loads((folder / "ablation.json").read_text())

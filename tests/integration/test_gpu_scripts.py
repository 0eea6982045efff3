"""The checks of a GPU machine pass on a CPU: every row is within its bound."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BLOCK_IMPORTS = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"ray", "sglang", "transformers", "transformer_engine"}:
            raise ModuleNotFoundError(f"{name} is not installed", name=name)

sys.meta_path.insert(0, Blocked())
"""

pytestmark = pytest.mark.integration


def rows_of(script: str, import_path: Path | None = None) -> list[str]:
    """The lines of the table that `script` prints on a CPU."""
    command = [str(ROOT / "scripts" / "gpu_check.sh"), script, "--platform", "cpu"]
    environment = os.environ | ({"PYTHONPATH": str(import_path)} if import_path else {})
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("│")]


def count(rows: list[str], text: str) -> int:
    return sum(text in row for row in rows)


def test_first_measurements_need_no_ray_sglang_or_transformers(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCK_IMPORTS)
    rows = rows_of("gpu_first", tmp_path)
    assert count(rows, " ok ") == 19
    for text in (
        "in micro-batches of 8 and 4",
        "packed samples",
        "against the plan",
        "through shared memory",
        "resumed",
        "hand-overs",
    ):
        assert count(rows, text), text


def test_smoke_test() -> None:
    rows = rows_of("gpu_smoke")
    assert count(rows, " ok ") == 13
    assert count(rows, "Megatron against CPU fp32") == count(rows, "SGLang against Megatron") == 6
    assert count(rows, "device handed to the trainer") == count(rows, "weight update") == 2


def test_two_devices() -> None:
    rows = rows_of("two_gpus")
    assert count(rows, " ok ") == 19
    for text in (
        "separate devices: broadcast of",
        "engine killed",
        "survived",
        "tensor parallel 2 against 1",
        "resumed",
    ):
        assert count(rows, text), text

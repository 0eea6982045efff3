"""The smoke test of a GPU machine passes on a CPU, where both engines take turns on one device too."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


def test_every_row_is_within_its_bound() -> None:
    command = [str(ROOT / "scripts" / "gpu_smoke.sh"), "--platform", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if " ok " in line]
    assert len(rows) == 9 and "MISSED" not in done.stdout, done.stdout
    for row in (
        "Megatron against CPU fp32",
        "SGLang against Megatron",
        "device handed to the trainer",
        "weight update",
    ):
        assert sum(row in line for line in done.stdout.splitlines()) in (2, 4), row

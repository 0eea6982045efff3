"""A small configuration for trackers."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.configs.pipeline import RLVRConfig


@pytest.fixture
def config(tmp_path: Path) -> RLVRConfig:
    return RLVRConfig(exp_name="trial", max_steps=4, output_dir=str(tmp_path / "run"), track_with=[])

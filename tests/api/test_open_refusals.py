"""`roll.open`: what is refused before a process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import roll
from roll.base.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "recipe, overrides, message",
    [
        ("tiny_math/sft_config.yaml", [], "pipeline: sft cannot be opened; use rlvr, or roll.train"),
        ("algorithms/ppo_critic.yaml", [], "adv_estimator: gae needs more than the scores of responses"),
        ("tiny_math/rlvr_config.yaml", ["max_len_mask=true"], "max_len_mask: true cannot be used with roll.open"),
        ("tiny_math/rlvr_config.yaml", ["no_such_key=1"], "no_such_key"),
    ],
)
def test_what_a_loop_of_the_caller_cannot_have_is_refused(
    recipe: str, overrides: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        roll.open(ROOT / "examples" / recipe, f"output_dir={tmp_path / 'run'}", *overrides)
    assert not (tmp_path / "run").exists()


def test_keys_are_checked_as_those_of_a_file(tmp_path: Path) -> None:
    keys: dict[str, Any] = yaml.safe_load((ROOT / "examples/tiny_math/rlvr_config.yaml").read_text())
    keys |= {"output_dir": tmp_path / "run", "pretrain": str(tmp_path / "none")}
    with pytest.raises(ConfigError, match="pretrain"):
        roll.open(keys)

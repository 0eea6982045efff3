"""Lengths of episodes against the limits of the configuration."""

from __future__ import annotations

from pathlib import Path

from roll.configs.plan import make_plan
from tests.configs.samples import LAPTOP, agentic


def length_warnings(warnings: list[str]) -> list[str]:
    return [text for text in warnings if text.startswith(("prompt_length", "sequence_length"))]


def test_a_sequence_length_that_cuts_most_episodes_is_reported_with_one_that_fits(tmp_path: Path) -> None:
    config = agentic(tmp_path, "sequence_length=260", "eval_steps=0")
    warning, *_ = length_warnings(make_plan(config, LAPTOP).warnings)
    assert warning.startswith("sequence_length: 260 cuts episodes of Lake after about 4 of 6 turns: rules of ")
    assert "an answer of 32 (half of max_tokens_per_step); use " in warning


def test_a_sequence_length_with_room_is_no_warning(tmp_path: Path) -> None:
    assert length_warnings(make_plan(agentic(tmp_path, "eval_steps=0"), LAPTOP).warnings) == []

"""Lengths of prompts and episodes against the limits of the configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll.configs.errors import ConfigError
from roll.configs.plan import make_plan
from roll.configs.rules.lengths import SAMPLED_ROWS
from tests.configs.samples import LAPTOP, SERVER, agentic, rlvr, write


def length_warnings(warnings: list[str]) -> list[str]:
    return [text for text in warnings if text.startswith(("prompt_length", "sequence_length"))]


def prompts(folder: Path, tiny_model_dir: Path, *texts: object, column: str = "prompt") -> list[str]:
    """Length warnings for a data file with these prompts, of which 12 tokens are kept; a token is a character."""
    data = write(folder, "".join(json.dumps({column: text}) + "\n" for text in texts), "train.jsonl")
    keys = [f"pretrain={tiny_model_dir}", f"actor_train.data_args.file_name={data}", "prompt_length=12"]
    layout = ["response_length=8"]
    return length_warnings(make_plan(rlvr(folder, *keys, *layout), SERVER).warnings)


def test_a_prompt_length_that_drops_most_prompts_is_reported_with_one_that_fits(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    long = "1+2+3+4+5+6+7+8="
    messages = [{"role": "user", "content": long}]
    (warning,) = prompts(tmp_path, tiny_model_dir, "1+2=", long, long, messages)
    assert (
        warning == "prompt_length: 12 drops 3 of the first 4 prompts, whose median is 16 tokens; use 16 plus the "
        "template's tokens to keep 95 % of them"
    )


def test_a_prompt_length_that_drops_all_prompts_of_the_data_is_refused(tmp_path: Path, tiny_model_dir: Path) -> None:
    texts = ["1+2+3+4+5+6+7=", "1+2+3+4+5+6+7+8="]
    message = (
        "prompt_length: 12 drops all 2 prompts, which have 14 to 16 tokens; use 16 plus the template's tokens to keep"
    )
    with pytest.raises(ConfigError, match=message):
        prompts(tmp_path, tiny_model_dir, *texts)
    (warning,) = prompts(tmp_path, tiny_model_dir, *texts * SAMPLED_ROWS)
    assert f"drops {SAMPLED_ROWS} of the first {SAMPLED_ROWS} prompts" in warning, "later ones may be shorter"
    messages = [{"role": "user", "content": text} for text in texts]
    for prompt in (messages, json.dumps(messages)):
        (warning,) = prompts(tmp_path, tiny_model_dir, prompt)
        assert "drops 1 of the first 1 prompts" in warning, "a template may leave a part of messages out"


@pytest.mark.parametrize("texts", [["1+2="], ["1+2=", "1+2+3+4+5+6+7+8="], [7, None]])
def test_prompts_that_fit_or_cannot_be_read_are_no_warning(
    tmp_path: Path, tiny_model_dir: Path, texts: list[object]
) -> None:
    assert prompts(tmp_path, tiny_model_dir, *texts) == []


def test_a_sequence_length_that_cuts_most_episodes_is_reported_with_one_that_fits(tmp_path: Path) -> None:
    config = agentic(tmp_path, "sequence_length=260", "eval_steps=0")
    warning, *_ = length_warnings(make_plan(config, LAPTOP).warnings)
    assert warning.startswith("sequence_length: 260 cuts episodes of Lake after about 4 of 6 turns: rules of ")
    assert "an answer of 32 (half of max_tokens_per_step); use " in warning


def test_a_sequence_length_with_room_is_no_warning(tmp_path: Path) -> None:
    assert length_warnings(make_plan(agentic(tmp_path, "eval_steps=0"), LAPTOP).warnings) == []

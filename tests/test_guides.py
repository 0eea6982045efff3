"""What the pages on GSM8K, on starting a run and on memory show is what the code reads, prints and counts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from roll.configs.check import check
from roll.configs.pipeline import RLVRConfig
from roll.datasets.prompts import load_prompts
from roll.loading.load import load_config
from roll.rewards.calling import RewardRequest
from roll.usercode.reward_process import load_reward_function
from tests.pages import DOCS, blocks

ROOT = DOCS.parent
RECIPE = "examples/qwen2.5-0.5B-rlvr/rlvr_config.yaml"
GSM8K = (DOCS / "gsm8k.md").read_text(encoding="utf-8")
MEMORY = (DOCS / "out_of_memory.md").read_text(encoding="utf-8")


def first_cells(page: str, head: str) -> list[str]:
    """The first cell of each row of the tables whose first heading is `head`."""
    tables = re.findall(rf"^\| {re.escape(head)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    return [row.split("|")[1].strip() for table in tables for row in table.splitlines()]


def own_gsm8k(folder: Path, monkeypatch: pytest.MonkeyPatch) -> RLVRConfig:
    """The file of the page with its reward, which includes the recipe by its absolute path."""
    (code,) = blocks(GSM8K, "python")
    (folder / "my_rewards.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    (folder / "my_gsm8k.yaml").write_text(
        blocks(GSM8K, "yaml")[1].replace(RECIPE, str(ROOT / RECIPE)), encoding="utf-8"
    )
    config = load_config(folder / "my_gsm8k.yaml")
    assert isinstance(config, RLVRConfig)
    return config


def test_the_keys_shown_are_those_of_the_recipe() -> None:
    shown, recipe = yaml.safe_load(blocks(GSM8K, "yaml")[0]), yaml.safe_load((ROOT / RECIPE).read_text())
    assert shown["actor_train"]["data_args"] == recipe["actor_train"]["data_args"]
    assert shown["validation"] == recipe["validation"]
    assert shown["rewards"]["math_rule"].items() <= recipe["rewards"]["math_rule"].items()


def test_both_rewards_score_a_row_of_gsm8k(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = own_gsm8k(tmp_path, monkeypatch)
    assert check(config).errors == []
    row = {"question": "How many are 2 and 3?", "answer": "2 and 3 are <<2+3=5>>5.\n#### 5"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (prompt,) = load_prompts([str(tmp_path / "rows.jsonl")], config.actor_train.data_args)
    assert {name: reward.tag_included for name, reward in config.rewards.items()} == {
        "math_rule": [prompt.tag],
        "boxed": [prompt.tag],
    }
    scores = {
        name: load_reward_function(reward)[1].call(RewardRequest((r"It is \boxed{5}.",), prompt.ground_truth), 0)
        for name, reward in config.rewards.items()
    }
    assert scores == {"math_rule": 1.0, "boxed": 1.0}


def test_quoted_messages_are_those_of_the_code() -> None:
    page = (DOCS / "does_not_start.md").read_text(encoding="utf-8")
    quoted = [text for cell in first_cells(page, "message") for text in re.findall(r"`([^`]+)`", cell)]
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "roll").rglob("*.py"))
    assert len(quoted) > 10
    assert [text for text in quoted if text not in source] == ["roll: command not found"]


def test_the_lines_of_memory_are_those_of_the_plan() -> None:
    source = (ROOT / "roll/plan/memory.py").read_text(encoding="utf-8")
    lines = first_cells(MEMORY, "line of the plan")
    assert len(lines) == 7 and [name for name in lines if f'"{name}"' not in source] == []


def test_the_smaller_micro_batch_is_accepted(tmp_path: Path) -> None:
    (text,) = blocks(MEMORY, "yaml")
    (tmp_path / "my_run.yaml").write_text(f"defaults: [{ROOT / RECIPE}]\n{text}", encoding="utf-8")
    assert check(load_config(tmp_path / "my_run.yaml")).errors == []

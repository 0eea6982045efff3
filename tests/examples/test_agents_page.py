"""The example of docs/agents.md is complete: its files and the model that it names are a run without remarks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from examples.tiny_agent.model import make_model
from roll.base.schema import declared
from roll.configs.check import check
from roll.configs.gateway import GatewayOptions
from roll.loading.load import load_config
from roll.plan.check_inputs import check_inputs

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")


def block(language: str, part: str) -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return next(text for text in found if part in text)


@pytest.mark.slow
def test_the_files_of_the_page_are_a_run_without_remarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    run = block("yaml", "pipeline: agentic")
    for name, text in {
        "my_agent.py": block("python", "class Solver"),
        "tasks.jsonl": block("json", '"question"'),
        "val_tasks.jsonl": block("json", '"question"').replace("17", "18"),
        "episodes.jsonl": block("json", "tool_calls") * 64,
        "my_run.yaml": run,
        "validated.yaml": yaml.safe_dump(yaml.safe_load(run) | yaml.safe_load(block("yaml", "Unseen"))),
        "warm.yaml": block("yaml", "pipeline: sft"),
    }.items():
        (tmp_path / name).write_text(text)
    assert "examples.tiny_agent.model --out my_model" in PAGE
    make_model(tmp_path / "my_model")
    for name in ("my_run", "validated", "warm"):
        config = load_config(tmp_path / f"{name}.yaml", ["num_devices_per_node=2"])
        for report in (check(config), check_inputs(config)):
            assert (name, [*report.errors, *report.warnings, *report.missing]) == (name, [])


def test_the_page_has_every_key_of_the_gateway() -> None:
    assert list(yaml.safe_load(block("yaml", "gateway:"))["gateway"]) == list(declared(GatewayOptions))

"""`roll rehearse` without engines: its folder, its errors, and its report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from roll.cli import main
from roll.lab.rehearse.inputs import Inputs
from roll.lab.rehearse.overrides import shrink
from roll.lab.rehearse.rehearsal import CONFIG_FILE
from roll.lab.rehearse.report import Part, findings, sample_view, summary_of, tables
from roll.lab.rehearse.runs import RunRecord
from roll.loading.load import build_config
from tests.configs.samples import MODEL, RLVR, write
from tests.lab.rehearse.recipes import write_small_config


def test_errors_of_the_recipe_are_those_of_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", str(write(tmp_path, RLVR + "rollout_bach_size: 3\n")), "--out", f"{tmp_path}/out"]) == 2
    printed = capsys.readouterr()
    assert "did you mean rollout_batch_size?" in printed.err
    assert printed.out.startswith("0:00  rehearsing ")


def test_a_folder_with_other_files_is_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    assert main(["rehearse", str(write(tmp_path, RLVR)), "--out", f"{tmp_path}/out"]) == 2
    assert "holds something other than a rehearsal; use a new folder" in capsys.readouterr().err
    assert (tmp_path / "out" / "thesis.tex").exists()


def test_one_step_is_too_few(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["rehearse", str(write(tmp_path, RLVR)), "--steps", "1"])
    assert "'1' is not an integer >= 2" in capsys.readouterr().err


def test_rows_that_cannot_be_used_are_reported_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path, '{"question": "?"}\n', "mine.jsonl")
    recipe = write(tmp_path, RLVR.replace("train.jsonl", str(data)))
    assert main(["rehearse", str(recipe), "--out", f"{tmp_path}/out"]) == 1
    assert "mine.jsonl:1: no column 'prompt'" in capsys.readouterr().err
    assert (tmp_path / "out" / CONFIG_FILE).exists()


def sample(name: str, group: int, score: float) -> dict[str, Any]:
    ids = {"prompt_ids": [1, 2], "response_ids": [3, 4]}
    return {"id": name, "prompt_id": name, "ground_truth": "3", "group": group, "score": score, **ids}


def record(finished: bool = True, **changes: Any) -> RunRecord:
    update = {"weight_update/verified": 1.0, "weight_update/bytes": 2**20}
    learned = {"weight_update/verified": 1.0, "actor/grad_norm": 0.5, "actor/loss": 0.1}
    steps = [{"step": step, **learned, "staleness/max": step - 1} for step in (1, 2)]
    samples = [sample("a", 0, 1.0), sample("b", 1, 0.0)]
    values = {
        "lines": [{"step": 0, **update, "val/score": 0.1}, *steps],
        "checkpoints": [1, 2],
        "samples": {1: samples, 2: samples},
        "entries": ["tensorboard"],
    }
    return RunRecord(finished, **values | changes)


Report = Callable[..., dict[str, Part]]
"""The parts by name, from the records of the runs."""


def report_of(folder: Path, tree: dict[str, Any], *tags: str) -> Report:
    """The report on rehearsals of a recipe with one prompt for every tag, whose ids are a, b, ..."""
    rows = [{"id": "ab"[number], "tag": tag, "prompt": "1+1=", "ground_truth": "2"} for number, tag in enumerate(tags)]
    data = str(write(folder, "".join(json.dumps(row) + "\n" for row in rows), "rows.jsonl"))
    recipe = build_config(tree | {"validation": {"data_args": {"file_name": data}}})
    inputs = Inputs({MODEL: write_small_config(folder / "model")}, {"actor_train": [data]})
    made = shrink(recipe, inputs, str(folder / "run"), 2)
    small = build_config(made.tree)
    return lambda *runs: {part.name: part for part in findings(recipe, small, made.placement, runs)}


@pytest.fixture
def rehearsed(tmp_path: Path) -> Report:
    rewards = {"math": {"tag_included": ["math"]}, "code": {"tag_included": ["code"]}}
    return report_of(tmp_path, yaml.safe_load(RLVR) | {"rewards": rewards, "eval_steps": 5}, "math", "code")


def test_a_complete_rehearsal_passes_in_every_part(rehearsed: Report) -> None:
    found = rehearsed(record(), record())
    assert [name for name, finding in found.items() if not finding.passed] == []
    assert found["weight updates"].detail == "3 of 3 verified by checksum, 1.0 MiB each"
    assert found["reward math"].detail == "2 responses to 1 prompts; scores (responses): 1 (2)"
    assert found["actor_train"].detail == "Megatron TP2 PP1 DP2"
    assert "largest staleness" in found["schedule"].detail


@pytest.mark.parametrize(
    ("records", "missing"),
    [
        ([record(False)], {"training steps", "resume"}),
        ([record(checkpoints=[])], {"checkpoint", "resume"}),
        ([record(), record(False)], {"resume"}),
        ([record(entries=[]), record()], {"trackers"}),
        ([record(samples={1: [{"id": "a", "score": 0.0}]}), record()], {"reward code"}),
        ([record(lines=record().lines[:2]), record(lines=[])], {"training steps", "resume"}),
        (
            [record(lines=[{**each, "weight_update/verified": 0.0} for each in record().lines]), record()],
            {"weight updates"},
        ),
    ],
)
def test_what_was_not_exercised_is_named(rehearsed: Report, records: list[RunRecord], missing: set[str]) -> None:
    found = rehearsed(*records)
    names = {name for name, finding in found.items() if not finding.passed}
    assert names == missing
    assert not summary_of(list(found.values()), [], 1.0)["passed"]


def test_devices_that_are_shared_only_here_are_not_exercised(tmp_path: Path) -> None:
    judge = {"device_mapping": [6, 7], "model_args": {"model_name_or_path": MODEL}}
    tree = yaml.safe_load(RLVR) | {"rewards": {"llm_judge": {}}, "judge": judge}
    tree["actor_train"]["device_mapping"], tree["actor_infer"]["device_mapping"] = "0-7", "0-5"
    found = report_of(tmp_path, tree | {"async_generation_ratio": 0}, "math")(record())
    assert found["judge"].not_exercised == ["devices apart from actor_infer"]
    assert found["actor_train"].not_exercised == []
    assert "not exercised: devices apart from actor_infer" in printed(tables(list(found.values()), []))


def test_each_of_several_policies_has_to_learn(tmp_path: Path) -> None:
    tree = yaml.safe_load(RLVR) | {"policies": {"one": {"tags": ["math"]}, "two": {"tags": ["code"]}}}
    tree["actor_train"]["model_args"] = {"lora_target": "all-linear", "lora_rank": 4}
    lines = [{"step": 1, "one/actor/loss": 0.1, "one/actor/grad_norm": 0.5, "two/actor/loss": 0.0}]
    found = report_of(tmp_path, tree, "math", "code")(record(lines=lines))
    assert found["policy loss one"].passed and not found["policy loss two"].passed
    assert found["training steps"].detail.endswith("gradient norm 0.5")


def printed(view: Any) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))
    console.print(view)
    return console.export_text()


def test_one_sample_is_shown_in_full() -> None:
    small = build_config(yaml.safe_load(RLVR))
    text = printed(sample_view(small, record(), lambda ids: "word " * 1000 if ids == [1, 2] else f"answer {ids}"))
    assert text.count("word") == 1000 and "answer [3, 4]" in text and "score 1" in text


def test_the_report_says_what_a_cpu_cannot_tell(rehearsed: Report) -> None:
    text = printed(tables(list(rehearsed(record(), record()).values()), []))
    for word in ("NCCL", "memory", "flash attention", "speed"):
        assert word in text

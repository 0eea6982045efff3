"""Files of samples: what a row has, which files stay, and files of older runs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from roll.pipeline.learning.dump import dump_samples
from roll.rollout.rollout_batch import batch_of_groups
from roll.rollout.types import GenerateResult, Group, Trajectory
from roll.trackers.sample_files import (
    Largest,
    dumped_steps,
    keep_samples,
    larger_values,
    read_about,
    read_samples,
)


def response(engine: int | None = None) -> Trajectory:
    result = GenerateResult("r", [7, 8], [-0.1, -0.25], [0, 1], "length", engine=engine)
    return Trajectory.of_response([1], result, "x")


def test_a_row_has_what_is_known_of_a_sample_and_padding_has_none(tmp_path: Path) -> None:
    made = response(engine=3)
    made.reward_parts = {"math": 1.0, "style": 0.5}
    prompt = Group(4, "math", 31, "train:31", [made], ground_truth={"answer": 19})
    data = batch_of_groups([prompt], multiple=2)
    data.batch["advantages"] = torch.full(data.batch["response_mask"].shape, 0.5)
    dump_samples(data, tmp_path, 1, per_update=1, about={"passes": 2})
    (row,) = read_samples(tmp_path, 1)
    assert row == {
        **{"id": "train:31", "prompt_id": "train:31", "ground_truth": {"answer": 19}, "tag": "math"},
        **{"stop": "sequence_length", "engine": 3, "parts": {"math": 1.0, "style": 0.5}, "group": 0, "score": 0.0},
        **{"update": 0, "prompt_ids": [1], "response_ids": [7, 8], "weight_version": [0, 1], "turn_index": [0, 0]},
        **{"behavior_log_probs": [pytest.approx(-0.1), -0.25], "advantages": [0.5, 0.5]},
    }
    assert read_about(tmp_path, 1) == {"passes": 2}


def test_a_row_of_an_agent_names_its_environment_and_has_its_turns(tmp_path: Path) -> None:
    lake = Group(5, "Lake", 77, "Lake-5", [response()])
    dump_samples(batch_of_groups([lake], episodes=True), tmp_path, 2)
    (row,) = read_samples(tmp_path, 2)
    assert (row["id"], row["prompt_id"], row["ground_truth"]) == ("Lake-5-0", "Lake/77", None)
    assert "engine" not in row and row["episode"]["turns"][0]["text"] == "x"


def test_the_newest_the_first_one_in_some_steps_and_those_that_a_finding_names_are_kept(tmp_path: Path) -> None:
    (tmp_path / "step-000090.jsonl").touch()  # of an earlier run
    largest: Largest = {}
    for step in range(1, 12):
        (tmp_path / f"step-{step:06d}.jsonl").touch()
        norm = math.nan if step == 6 else 9.0 if step == 3 else 1.0
        largest = larger_values(largest, step, {"actor/grad_norm": norm, "correction/behavior_k3": float(step == 7)})
        keep_samples(tmp_path, step, 2, 4, [number for _, number in largest.values()])
    assert dumped_steps(tmp_path) == [1, 4, 6, 7, 8, 10, 11]


def test_json_lines_of_an_older_run_are_read_and_replaced(tmp_path: Path) -> None:
    old = tmp_path / "step-000001.jsonl"
    old.write_text(json.dumps({"id": "a", "score": math.inf}) + "\n")
    assert read_samples(tmp_path, 1) == [{"id": "a", "score": math.inf}] and read_about(tmp_path, 1) == {}
    dump_samples(batch_of_groups([Group(4, "math", 31, "train:31", [response()])]), tmp_path, 1)
    assert not old.exists() and read_samples(tmp_path, 1)[0]["id"] == "train:31"


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1 nonsense PAR1"])
def test_a_damaged_file_is_a_value_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "step-000001.parquet").write_bytes(content)
    with pytest.raises((ValueError, OSError)):
        read_samples(tmp_path, 1)

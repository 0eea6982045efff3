"""Whole agentic runs on real engines and environments: what is learned is what was sampled, and failures stay out."""

from __future__ import annotations

import json
import math
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_envs import HANGS, KINDS, RAISES
from runs import assert_nothing_is_left, finish, lines, recipe, start, wait_for_line
from transformers import AutoTokenizer

from roll.pipeline.rollout_dump import read_samples

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

STEPS = 4
GROUP, GROUPS = 4, 4
LENGTH = 120


@pytest.fixture(scope="module")
def inputs(tiny_model_dir: Path) -> dict[str, Any]:
    """The part of a recipe that says where the model is."""
    return {"pretrain": str(tiny_model_dir), "actor_train": {"data_args": {"template": "native"}}, "validation": {}}


def agentic(inputs: dict[str, Any], folder: Path, env_type: str = "frozen_lake", **keys: Any) -> Path:
    """Groups on small lakes, most of whose answers hold no move; a few turns fill the sequence."""
    lake = {"env_type": env_type, "max_steps": 4, "agent_system_template": None, "agent_template": "{observation}\n"}
    lake["env_config"] = {"is_slippery": False, "format_penalty": -0.01, "env_instruction": "Go.", "size": 3}
    file = recipe(
        inputs,
        folder,
        **{
            "pipeline": "agentic",
            "max_steps": STEPS,
            "save_steps": 2,
            "eval_steps": 2,
            "rollout_batch_size": GROUP * GROUPS,
            "sequence_length": LENGTH,
            "max_tokens_per_step": 24,
            "max_failure_rate": 1.0,
            "rollout_dump_dir": str(folder / "samples"),
            "custom_envs": {"Lake": lake},
            "train_env_manager": {"group_size": GROUP, "num_env_groups": GROUPS},
            "val_env_manager": {"group_size": 1, "num_env_groups": 4},
            "val_batch_size": 8,
        }
        | keys,
    )
    return without(file, "rewards", "prompt_length", "response_length", "num_return_sequences_in_group")


def without(file: Path, *names: str) -> Path:
    """The recipe less what only RLVR has."""
    import yaml

    tree = {name: value for name, value in yaml.safe_load(file.read_text()).items() if name not in names}
    file.write_text(yaml.safe_dump(tree))
    return file


def check_laws(steps: list[dict[str, Any]], ratio: float) -> None:
    """The ledger adds up and staleness keeps its bound, in groups."""
    for line in steps:
        dropped = sum(value for name, value in line.items() if name.startswith("ledger/dropped_"))
        parts = line["ledger/consumed"] + line["ledger/buffered"] + line["ledger/in_flight"]
        assert parts + dropped == line["ledger/submitted"]
        assert line["ledger/submitted"] - dropped <= math.floor((line["step"] + ratio) * GROUPS)
        assert line["ledger/consumed"] == GROUPS * line["step"]
        assert line["staleness/token_max"] == line["staleness/max"] <= math.ceil(ratio)


def check_samples(folder: Path, model: str) -> list[dict[str, Any]]:
    """Every sampled token is in exactly one turn, reads as that turn's text, and was drawn by the weights it names."""
    tokenizer, current, older, rows = AutoTokenizer.from_pretrained(model), [], [], []
    for step in range(1, STEPS + 1):
        for row in read_samples(folder, step):
            turns = row["episode"]["turns"]
            said = "".join(turn["text"] for turn in turns)
            assert ascii_of(tokenizer.decode(row["response_ids"], skip_special_tokens=True)) == ascii_of(said)
            assert sorted(set(row["weight_version"])) == sorted({each for turn in turns for each in turn["versions"]})
            assert row["score"] == pytest.approx(sum(turn["reward"] for turn in turns))
            assert tokenizer.decode(row["prompt_ids"]).startswith("Go.\n" + turns[0]["observation"])
            moved = torch.tensor(row["old_log_probs"]) - torch.tensor(row["behavior_log_probs"])
            now = torch.tensor(row["weight_version"]) == step - 1
            current.append(moved[now].abs())
            older.append(moved[~now].abs())
            rows.append(row)
    assert torch.cat(current).max() < 2e-5
    assert (torch.cat(older) < 2e-5).float().mean() < 1e-2, "tokens marked older were drawn by the weights of now"
    return rows


def ascii_of(text: str) -> str:
    """What does not depend on where bytes are cut into texts: an untrained model says any bytes."""
    return "".join(character for character in text if character.isascii())


def test_trajectories_run_ahead_and_environments_that_fail_are_not_learned_from(inputs, tmp_path):
    config = agentic(
        inputs,
        tmp_path,
        "tests.integration.agent_envs:ThinIce",
        deterministic=False,
        async_generation_ratio=1,
        in_flight_policy="abort_resume",
        old_log_probs_source="recompute",
        actor_train__pg_variant="tis",
        train_env_manager={"group_size": GROUP, "group_size_redundancy": 1, "num_env_groups": GROUPS},
        env_step_timeout_s=3.0,
        eval_steps=0,
        verify_weights="always",
    )
    code, output = finish(start(config))
    assert code == 0, output
    steps = lines(tmp_path)
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    check_laws(steps, 1)
    assert max(line["staleness/max"] for line in steps) == 1, "nothing ran ahead"
    assert any(line["actor/ratio_deviation_max"] > 1e-3 for line in steps[1:]), "nothing was corrected"
    rows = check_samples(tmp_path / "samples", inputs["pretrain"])
    groups = Counter((row["episode"]["seed"]) for row in rows)
    assert set(groups.values()) == {GROUP}, "a group was learned from in parts, or an environment twice"
    assert not any(seed % KINDS in (RAISES, HANGS) and turns(seed, rows) > 1 for seed in groups), (
        "a failure was learned from"
    )
    assert steps[-1]["ledger/dropped_env_raised"] >= 1 and steps[-1]["ledger/dropped_env_hung"] >= 1
    assert steps[-1]["env/failures_raised"] >= GROUP and steps[-1]["env/failures_hung"] >= 1
    assert_nothing_is_left(tmp_path)


def turns(seed: int, rows: list[dict[str, Any]]) -> int:
    """Most turns of that environment's trajectories."""
    return max(len(row["episode"]["turns"]) for row in rows if row["episode"]["seed"] == seed)


def test_a_run_killed_in_mid_episode_leaves_nothing_and_goes_on_as_if_it_had_not_been(inputs, tmp_path):
    """Deterministic and synchronous: turn by turn in lock-step, one sample a turn."""
    keys = {"sample_by": "step", "adv_estimator": "gigpo", "actor_train__pg_variant": "cispo"}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    code, output = finish(start(agentic(inputs, whole, **keys)))
    assert code == 0, output
    config = agentic(inputs, broken, **keys)
    first = start(config)
    wait_for_line(broken, 3)
    first.send_signal(signal.SIGTERM)
    assert finish(first)[0] == 130
    assert_nothing_is_left(broken)
    code, output = finish(start(config, "resume_from_checkpoint=true"))
    assert code == 0, output
    assert lines(broken) == lines(whole)
    steps = lines(whole)
    check_laws(steps[1:], 0)
    assert [("val/Lake/success" in line) for line in steps] == [True, False, True, False, True]
    assert steps[1]["correction/log_prob_diff_max"] < 1e-4
    assert json.loads((whole / "run" / "run.json").read_text())["summary"]["status"] == "finished"
    stops = Counter(row["episode"]["stop"] for row in read_samples(whole / "samples", 1))
    assert stops["sequence_length"] > 0, stops

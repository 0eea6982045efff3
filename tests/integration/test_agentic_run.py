"""Whole agentic runs on real engines and environments: what is learned is what was sampled, and failures stay out.

Two have a critic, for which every sample is a trajectory or a turn.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
from collections import Counter
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
import torch
from agent_envs import HANGS, KINDS, RAISES
from runs import GAE, ROOT, assert_nothing_is_left, count_dropped, finish, lines, recipe, start, succeed, wait_for_line
from transformers import AutoTokenizer

from examples.tiny_agent.model import make_model
from roll.datasets.tokenizer import response_text
from roll.envs import make_env
from roll.trackers.sample_files import read_samples

pytestmark = pytest.mark.integration

STEPS = 4
GROUP, GROUPS = 4, 4
LENGTH = 120

STOPS = [f"{first}{second}" for first in ascii_lowercase for second in ascii_lowercase[::2]]
"""Stop strings of two tokens, so many that an untrained model writes one now and then."""


@pytest.fixture(scope="module")
def inputs(tiny_model_dir: Path) -> dict[str, Any]:
    """The part of a recipe that says where the model is."""
    return {"pretrain": str(tiny_model_dir), "actor_train": {"data_args": {"template": "native"}}, "validation": {}}


def agentic(inputs: dict[str, Any], folder: Path, env_type: str = "frozen_lake", **keys: Any) -> Path:
    """Groups on small maps, most of whose responses contain no move; a few turns fill the sequence."""
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


def check_invariants(steps: list[dict[str, Any]], ratio: float) -> None:
    """The ledger adds up and staleness keeps its bound, in groups."""
    for line in steps:
        assert line["ledger/submitted"] - count_dropped(line, GROUPS) <= math.floor((line["step"] + ratio) * GROUPS)
        assert line["staleness/token_max"] == line["staleness/max"] <= math.ceil(ratio)


def check_samples(folder: Path, model: str) -> list[dict[str, Any]]:
    """Every sampled token is in exactly one turn, reads as that turn's text, and was drawn by the weights it names."""
    tokenizer, current, older, rows = AutoTokenizer.from_pretrained(model), [], [], []
    for step in range(1, STEPS + 1):
        for row in read_samples(folder, step):
            turns = row["episode"]["turns"]
            said = "".join(turn["text"] for turn in turns)
            assert ascii_of(response_text(tokenizer, row["response_ids"])) == ascii_of(said)
            assert sorted(set(row["weight_version"])) == sorted({each for turn in turns for each in turn["versions"]})
            assert row["score"] == pytest.approx(sum(turn["reward"] for turn in turns))
            assert tokenizer.decode(row["prompt_ids"]).startswith("Go.\n" + turns[0]["observation"])
            moved = torch.tensor(row["old_log_probs"]) - torch.tensor(row["behavior_log_probs"])
            now = torch.tensor(row["weight_version"]) == step - 1
            current.append(moved[now].abs())
            older.append(moved[~now].abs())
            rows.append(row)
    assert torch.cat(current).max() < 2e-5
    assert (torch.cat(older) < 2e-5).float().mean() < 1e-2, "tokens marked older were sampled by the current weights"
    return rows


def check_maps(rows: list[dict[str, Any]], size: int) -> None:
    """The members of a group begin on the same map, that of the group's seed."""
    lake = make_env("frozen_lake", {"size": size, "is_slippery": False})
    for seed in {row["episode"]["seed"] for row in rows}:
        first = {row["episode"]["turns"][0]["observation"] for row in rows if row["episode"]["seed"] == seed}
        assert first == {lake.reset(seed=seed)[0]}


def check_ages(folder: Path, steps: list[dict[str, Any]]) -> None:
    """A trajectory is as old as its oldest token, also where it continues after a weight update."""
    spans = 0
    for line in steps:
        versions = [row["weight_version"] for row in read_samples(folder, line["step"])]
        ages = [line["step"] - 1 - min(each) for each in versions]
        assert line["staleness/mean"] == pytest.approx(sum(ages) / len(ages))
        assert line["staleness/max"] == max(ages)
        spans += sum(len(set(each)) > 1 for each in versions)
    assert spans, "no trajectory continued across a weight update, so nothing was tested"


def check_stops(rows: list[dict[str, Any]]) -> None:
    """An answer ends with the first stop string, and some do."""
    texts = [turn["text"] for row in rows for turn in row["episode"]["turns"]]
    ended = [text for text in texts if text.endswith(tuple(STOPS))]
    assert ended and not any(stop in text[:-1] for text in texts for stop in STOPS)


def check_critic(steps: list[dict[str, Any]]) -> None:
    """The critic begins at 0 and learns."""
    assert steps[0]["critic/explained_variance"] == pytest.approx(0, abs=1e-6)
    assert steps[-1]["critic/explained_variance"] != 0 and all(line["critic/loss"] > 0 for line in steps)


def ascii_of(text: str) -> str:
    """What does not depend on where bytes are cut into texts: an untrained model says any bytes."""
    return "".join(character for character in text if character.isascii())


def test_trajectories_run_ahead_and_environments_that_fail_are_not_learned_from(shared_runs, inputs, tmp_path):
    config = agentic(
        inputs,
        tmp_path,
        "tests.integration.agent_envs:ThinIce",
        deterministic=False,
        async_generation_ratio=1,
        in_flight_policy="abort_resume",
        actor_infer__generating_args={"top_p": 0.9, "top_k": 20, "stop_strings": STOPS},
        old_log_probs_source="recompute",
        actor_train__pg_variant="tis",
        train_env_manager={"group_size": GROUP, "group_size_redundancy": 1, "num_env_groups": GROUPS},
        env_step_timeout_s=15.0,
        eval_steps=0,
        verify_weights="always",
        **GAE,
    )
    shared_runs.succeed(config)
    steps = lines(tmp_path)
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    check_invariants(steps, 1)
    check_critic(steps)
    assert max(line["staleness/max"] for line in steps) == 1, "nothing ran ahead"
    assert any(line["actor/ratio_deviation_max"] > 1e-3 for line in steps[1:]), "nothing was corrected"
    assert steps[0]["actor/ratio_deviation_max"] < 1e-4
    rows = check_samples(tmp_path / "samples", inputs["pretrain"])
    log_probs = [each for row in rows for each in row["behavior_log_probs"]]
    assert statistics.fmean(log_probs) > -math.log(20), "log-probs are not over the 20 tokens of top_k"
    check_maps(rows, size=3)
    check_stops(rows)
    check_ages(tmp_path / "samples", steps)
    groups = Counter((row["episode"]["seed"]) for row in rows)
    assert set(groups.values()) == {GROUP}, "a group was learned from in parts, or an environment twice"
    assert not any(seed % KINDS in (RAISES, HANGS) and turns(seed, rows) > 1 for seed in groups), (
        "a failure was learned from"
    )
    assert steps[-1]["ledger/dropped_env_raised"] >= 1 and steps[-1]["ledger/dropped_env_hung"] >= 1
    assert steps[-1]["env/failures_raised"] >= GROUP and steps[-1]["env/failures_hung"] >= 1


def test_a_sequence_that_is_full_in_the_first_turn_ends_it_and_validation_beside_play_repeats(
    shared_runs, inputs, tmp_path
):
    """The first message is 17 tokens, so an answer is cut off after 3, unless it ends by itself: nothing is learned."""
    room = 3
    config = agentic(
        inputs,
        tmp_path,
        deterministic=False,
        async_generation_ratio=1,
        max_steps=2,
        save_steps=2,
        eval_steps=1,
        sequence_length=17 + room,
        max_tokens_per_step=8,
        sample_by="step",
        adv_estimator="gigpo",
        actor_train__training_args__learning_rate=1e-12,
    )
    shared_runs.succeed(config)
    first, *steps = lines(tmp_path)
    check_invariants(steps, 1)
    rows = [row for step in (1, 2) for row in read_samples(tmp_path / "samples", step)]
    end = AutoTokenizer.from_pretrained(inputs["pretrain"]).eos_token_id
    cut = [row for row in rows if row["response_ids"][-1] != end]
    assert len(cut) > len(rows) / 2
    for row in cut:
        assert len(row["prompt_ids"]) + len(row["response_ids"]) == 17 + room
        [turn] = row["episode"]["turns"]
        assert (turn["reward"], row["score"], row["episode"]["stop"]) == (0.0, 0.0, "sequence_length")
        assert row["episode"]["metrics"] == {"success": 0.0}, "a word cut off in the middle was taken for an action"
    validated = [{name: value for name, value in line.items() if is_result(name)} for line in (first, *steps)]
    assert len(validated[0]) > 3 and validated == [validated[0]] * 3, "a validation used other maps than the one before"


def is_result(name: str) -> bool:
    """Whether a metric says how a validation went, and not how long it took."""
    return name.startswith("val/") and name != "val/seconds"


def turns(seed: int, rows: list[dict[str, Any]]) -> int:
    """Most turns of that environment's trajectories."""
    return max(len(row["episode"]["turns"]) for row in rows if row["episode"]["seed"] == seed)


def test_a_run_ended_by_ctrl_c_saves_a_checkpoint_and_goes_on_as_if_it_had_not_been(shared_runs, inputs, tmp_path):
    """Deterministic and synchronous: turn by turn in lock-step, one sample a turn, with a critic."""
    keys = {"sample_by": "step", "actor_train__pg_variant": "cispo", **GAE}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    shared_runs.succeed(agentic(inputs, whole, **keys))
    config = agentic(inputs, broken, **keys)
    first = start(config, "async_training.rollouter=actor")  # Ctrl-C must end the rollouter's process too
    wait_for_line(first, broken, 2)
    os.killpg(first.pid, signal.SIGINT)  # as a terminal does, to every process of the run
    code, output = finish(first)
    assert code == 130 and "Traceback" not in output and "KeyboardInterrupt" not in output, output
    saved = lines(broken)[-1]["step"]
    assert f"step-{saved:06d} is complete; continue with: roll run {config}" in output
    assert json.loads((broken / "run" / "run.json").read_text())["summary"]["status"] == "interrupted"
    assert json.loads((broken / "run" / "health.json").read_text())["status"] == "interrupted"
    assert_nothing_is_left(broken)
    shared_runs.succeed(config, "resume_from_checkpoint=true")
    assert lines(broken) == lines(whole)
    steps = lines(whole)
    check_invariants(steps[1:], 0)
    check_critic(steps[1:])
    assert [("val/Lake/success" in line) for line in steps] == [True, False, True, False, True]
    assert steps[1]["correction/log_prob_diff_max"] < 1e-4
    assert json.loads((whole / "run" / "run.json").read_text())["summary"]["status"] == "finished"
    stops = Counter(row["episode"]["stop"] for row in read_samples(whole / "samples", 1))
    assert stops["sequence_length"] > 0, stops
    check_maps([row for row in read_samples(whole / "samples", 1) if row["id"].endswith("-0")], size=3)


def test_the_recipe_with_a_search_tool_runs(tmp_path):
    run = start(
        ROOT / "examples" / "search_notes" / "questions.yaml",
        f"pretrain={make_model(tmp_path / 'model')}",
        f"output_dir={tmp_path}/run",
        "max_steps=2",
        "eval_steps=2",
        "val_batch_size=4",
        "rollout_batch_size=8",
        "actor_train.training_args.gradient_accumulation_steps=2",
    )
    succeed(run)
    trained = [line for line in lines(tmp_path) if line["step"]]
    assert [line["env/Questions/tool_calls"] >= 0 for line in trained] == [True] * 2
    assert lines(tmp_path)[-1]["val/Questions/score"] >= 0

"""Whole runs of agents through the gateway on real engines: what is learned is what was sampled, token for token."""

from __future__ import annotations

import json
import math
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from faults import process_of
from gateway_agents import DIES, HANGS, HOARDS, KINDS, RAISES
from runs import assert_nothing_is_left, count_dropped, finish, lines, start, succeed, wait_for_event, wait_for_line
from test_agentic_run import agentic
from transformers import AutoTokenizer

from roll.base.terminal import EXIT_INTERRUPTED
from roll.trackers.sample_files import read_samples
from tests.integration.recorded_engines import generated_by

pytestmark = pytest.mark.integration

STEPS, GROUP, GROUPS = 4, 4, 4


@pytest.fixture(scope="module")
def inputs(tiny_model_dir: Path) -> dict[str, Any]:
    return {"pretrain": str(tiny_model_dir), "actor_train": {"data_args": {"template": "native"}}, "validation": {}}


def agents(inputs: dict[str, Any], folder: Path, name: str = "Talker", **keys: Any) -> Path:
    """Groups of an agent."""
    agent = {"agent": f"tests.integration.gateway_agents:{name}", "max_requests": 12}
    defaults = {"eval_steps": 0, "sequence_length": 160, "custom_envs": {"Solver": agent}}
    return agentic(inputs, folder, **defaults | keys)


def dumped(folder: Path) -> list[dict[str, Any]]:
    return [row | {"step": step} for step in range(1, STEPS + 1) for row in read_samples(folder / "samples", step)]


def turns_of(row: dict[str, Any]) -> list[tuple[float, ...]]:
    """The log-probs of each answer of a row; a row without `turn_index` has one."""
    found: dict[int, list[float]] = {}
    for turn, value in zip(row["turn_index"], row["behavior_log_probs"], strict=True):
        found.setdefault(turn, []).append(value)
    return [tuple(torch.tensor(values).tolist()) for values in found.values()]


def check_sampled(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Every answer that is learned from is one that an engine generated, and none more often than it was generated."""
    engine = [json.loads(line) for line in generated_by(folder / "run", 0).read_text().splitlines()]
    generated = Counter(tuple(torch.tensor(each).tolist()) for each in engine)
    learned = Counter(each for row in rows for each in turns_of(row))
    assert learned and not learned - generated


def check_recomputed(rows: list[dict[str, Any]], model: str) -> None:
    """The trainer computes the log-probs of the engine from the ids of a row; texts encode to other ids."""
    now = [row for row in rows if set(row["weight_version"]) == {row["step"] - 1}]
    moved = torch.cat([torch.tensor(r["old_log_probs"]) - torch.tensor(r["behavior_log_probs"]) for r in now])
    assert len(moved) and moved.abs().max() < 2e-5
    tokenizer = AutoTokenizer.from_pretrained(model)
    drifted = [row for row in rows if tokenizer.encode(tokenizer.decode(row["response_ids"])) != row["response_ids"]]
    assert drifted, "texts of answers encode to the sampled ids, so nothing was tested"


def test_agents_run_ahead_across_weight_updates_and_those_that_fail_are_not_learned_from(inputs, tmp_path):
    config = agents(
        inputs,
        tmp_path,
        deterministic=False,
        async_generation_ratio=2,
        in_flight_policy="abort_resume",
        old_log_probs_source="recompute",
        actor_train__pg_variant="tis",
        train_env_manager={"group_size": GROUP, "group_size_redundancy": 1, "num_env_groups": 2 * GROUPS},
        trajectory_timeout_s=60.0,
        verify_weights="always",
    )
    succeed(start(config, module="tests.integration.recorded_engines"))
    steps, rows = lines(tmp_path), dumped(tmp_path)
    for line in steps:
        count_dropped(line, GROUPS)
    check_sampled(tmp_path, rows)
    check_recomputed(rows, inputs["pretrain"])
    assert any(len(set(row["weight_version"])) > 1 for row in rows), "no session continued across an update"
    assert max(line["staleness/max"] for line in steps) <= 2
    branches = Counter((row["step"], row["episode"]["trajectory"]) for row in rows)
    assert set(branches.values()) == {2}, "the helper's conversation is a branch"
    assert all(row["sample_weight"] == 0.5 for row in rows)
    seeds = {row["episode"]["seed"] % KINDS for row in rows}
    assert not seeds & {RAISES, HANGS, DIES, HOARDS}, "a failure was learned from"
    last = steps[-1]
    assert last["gateway/branches_per_session"] == 2 and last["gateway/overridden_sampling"] > 0
    assert last["rollout/turns_mean"] == 4 and last["env/agent_seconds"] > 0
    dropped = {name for name, value in last.items() if name.startswith("ledger/dropped_") and value}
    assert dropped <= {
        f"ledger/dropped_{each}"
        for each in ("agent_raised", "agent_hung", "agent_died", "requests_exhausted", "trajectory_timeout")
    }
    assert dropped, "no agent failed, so nothing was tested"
    assert_nothing_is_left(tmp_path)


def test_a_gateway_that_is_killed_is_replaced_and_its_sessions_are_generated_again(inputs, tmp_path):
    run = start(endless(inputs, tmp_path, gateway={"processes": 2}))
    wait_for_line(run, tmp_path, 1)
    [gateway] = [each for each in psutil.process_iter() if is_gateway(each, tmp_path)]
    gateway.kill()
    [restart] = finished(run, tmp_path, "gateway_died", "gateway-0", "restarted")
    assert re.search(r"another process serves after [\d.]+ s", restart["message"])


def test_an_engine_that_is_killed_under_agents_is_restarted(inputs, tmp_path):
    run = start(endless(inputs, tmp_path))
    wait_for_line(run, tmp_path, 1)
    process_of("actor_infer-0", True, psutil.Process(run.pid)).kill()
    finished(run, tmp_path, "generation_failed", "actor_infer-0", "serving again")


def endless(inputs: dict[str, Any], folder: Path, **keys: Any) -> Path:
    keys |= {"deterministic": False, "async_generation_ratio": 1, "max_steps": 1000, "save_steps": 0}
    return agents(inputs, folder, "Teller", **keys)


def finished(run, folder: Path, reason: str, component: str, awaited: str) -> list[dict[str, Any]]:
    """What a run says of a component until the event that is awaited.

    Then it goes on, and ends with an exact ledger and groups dropped for one reason at most.
    """
    wait_for_event(run, folder, f'"event": "{awaited}"')
    wait_for_line(run, folder, lines(folder)[-1]["step"] + 2)
    run.send_signal(signal.SIGINT)
    assert finish(run)[0] == EXIT_INTERRUPTED
    steps = lines(folder)
    for line in steps:
        count_dropped(line, GROUPS)
    dropped = {name for name, value in steps[-1].items() if name.startswith("ledger/dropped_") and value}
    assert dropped <= {f"ledger/dropped_{reason}"}
    assert_nothing_is_left(folder)
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["component"] == component]


def is_gateway(process: psutil.Process, folder: Path) -> bool:
    try:
        return any(file.path.startswith(str(folder)) and "gateway-0" in file.path for file in process.open_files())
    except psutil.Error:
        return False


def test_an_agent_and_an_environment_with_the_same_messages_give_the_same_run(shared_runs, inputs, tmp_path):
    """One request at a time: tokens, log-probs and the update are equal."""
    keys = {"rollout_batch_size": 4, "train_env_manager": {"group_size": 2, "num_env_groups": 1}, "max_steps": 2}
    room = {"env_type": "tests.integration.agent_envs:Room", "agent_system_template": None, "max_steps": 3}
    room |= {"agent_template": "{env_instruction}{observation}"}
    runs = {}
    for name, entry in {"agent": None, "environment": {"Solver": room}}.items():
        given = keys if entry is None else keys | {"custom_envs": entry}
        shared_runs.succeed(agents(inputs, tmp_path / name, "Teller", **given))
        runs[name] = [read_samples(tmp_path / name / "samples", step) for step in (1, 2)]
    for agent, environment in zip(*(sum(each, []) for each in runs.values()), strict=True):
        for key in ("prompt_ids", "response_ids", "weight_version", "score"):
            assert agent[key] == environment[key], key
        assert agent["behavior_log_probs"] == pytest.approx(environment["behavior_log_probs"], abs=2e-5)
    one, other = (lines(tmp_path / name)[-1]["actor/grad_norm"] for name in runs)
    assert math.isclose(one, other, rel_tol=1e-4)

"""Processes of a run with several engines die or stop: the run continues by itself, no prompt is lost or learned twice.

A killed driver is in test_rlvr_run.py, a killed process of environments in usercode/test_env_processes.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from faults import FAULTS_FILE, HAPPENED_FILE
from runs import assert_nothing_is_left, finish, inputs_in, lines, recipe, start
from test_async_run import check_invariants, check_weights_of_versions

from roll.base.events import EVENTS_FILE
from roll.distributed.leftovers import PREFIX, temporary_folder
from roll.trackers.sample_files import read_samples

pytestmark = pytest.mark.integration

STEPS = 12
OUTPUT = "output.txt"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> dict[str, Any]:
    return inputs_in(tmp_path_factory.mktemp("problems"), tiny_model_dir, train=10)


def run_with_faults(
    inputs: dict[str, Any], folder: Path, faults: list[str], steps: int = STEPS, **keys: Any
) -> list[dict[str, Any]]:
    """The lines of a run with a trainer on one device, in which `faults` happen; it leaves nothing behind."""
    (folder / FAULTS_FILE).write_text("\n".join(faults))
    config = recipe(
        inputs,
        folder,
        **{
            "deterministic": False,
            "max_steps": steps,
            "save_steps": 0,
            "eval_steps": 0,
            "response_length": 40,
            "verify_weights": "always",
            "sync_timeout_s": 120,
            "old_log_probs_source": "recompute",
            "rollout_dump_dir": str(folder / "samples"),
            "actor_train__pg_variant": "tis",
            "actor_train__device_mapping": [0],
            "actor_train__strategy_args": {"strategy_config": {"tensor_model_parallel_size": 1}},
            "async_training": {"batch_hook_class": "tests.integration.faults:Killer"},
        }
        | keys,
    )
    run = start(config)
    code, output = finish(run)
    (folder / OUTPUT).write_text(output)
    assert code == 0, output[-3000:]
    assert_nothing_is_left(folder)
    assert not list(temporary_folder().glob(f"{PREFIX}*/ray/session_*_{run.pid}"))
    assert sorted((folder / HAPPENED_FILE).read_text().splitlines()) == sorted(faults), "a fault did not happen"
    check_samples(folder, steps)
    return lines(folder)


def events(folder: Path) -> list[tuple[str, str]]:
    """Component and event of every line of events.jsonl, in order."""
    entries = [json.loads(line) for line in (folder / "run" / EVENTS_FILE).read_text().splitlines()]
    return [(entry["component"], entry["event"]) for entry in entries]


def check_samples(folder: Path, steps: int) -> None:
    """Every group that was learned from is complete."""
    for step in range(1, steps + 1):
        rows = read_samples(folder / "samples", step)
        assert len(rows) == 16 and len({row["group"] for row in rows}) == 4


def test_engines_die_or_stop_at_any_moment_and_the_run_goes_on(inputs, tmp_path):
    """One dies while it generates, one within a weight update, one is stopped by a signal; a reward process dies."""
    faults = [
        "2 kill actor_infer-1 scheduler",
        "5 kill actor_infer-0 scheduler in_update",
        "8 stop actor_infer-1 scheduler",
        "9 kill reward_worker",
    ]
    steps = run_with_faults(
        inputs, tmp_path, faults, async_generation_ratio=2, actor_infer__device_mapping=[1, 2], max_engine_restarts=9
    )
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    check_invariants(steps, 2)
    assert steps[-1]["ledger/submitted"] == 4 * STEPS, "a prompt was dropped"
    assert [component for component, event in events(tmp_path) if event == "failed"][:2] == [
        "actor_infer-1",
        "actor_infer-0",
    ]
    # whichever comes back first: with both down the run waits for one, and may end before the other
    assert "serving again" in [event for _, event in events(tmp_path)]
    check_weights_of_versions(tmp_path / "samples")


def test_the_only_engine_of_a_synchronous_run_dies_and_is_waited_for(inputs, tmp_path):
    faults = ["2 kill actor_infer-0 scheduler", "4 kill actor_infer-0 in_update"]
    steps = run_with_faults(inputs, tmp_path, faults, 6, async_generation_ratio=0, actor_infer__device_mapping=[1])
    check_invariants(steps, 0)
    assert steps[-1]["faults/engine_restarts"] == 2 and steps[-1]["faults/engines_down"] == 0
    happened = events(tmp_path)
    of_engine = [event for component, event in happened if component == "actor_infer-0"]
    assert of_engine == ["failed", "restarted", "serving again"] * 2
    assert ("weight update", "attempt failed") in happened


def test_a_dead_rollout_process_is_replaced_and_a_dead_or_stopped_trainer_starts_the_run_again(inputs, tmp_path):
    """The checkpoint of step 6 is damaged before the trainer dies, so the run continues from that of step 3."""
    faults = ["5 kill rollouter", "9 spoil checkpoint", "9 kill actor_train-0 in_update", "11 stop actor_train-0"]
    steps = run_with_faults(
        inputs, tmp_path, faults, async_generation_ratio=1, actor_infer__device_mapping=[1], save_steps=3
    )
    assert "step-000003, because " in (output := (tmp_path / OUTPUT).read_text())
    assert "step-000006 is damaged: " in output
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    check_invariants(steps, 1)
    assert steps[-1]["ledger/submitted"] == 4 * STEPS, "a prompt was dropped"
    assert [event for event in events(tmp_path) if event[0] != "weight update"] == [
        ("rollouter", "restarted"),
        ("actor_train-0", "failed"),
        ("driver", "checkpoint skipped"),
        ("driver", "run restarted"),
        ("driver", "training again"),
        ("actor_infer-0", "serving again"),
        ("actor_train-0", "killed"),
        ("actor_train-0", "failed"),
        ("driver", "run restarted"),
        ("driver", "training again"),
        ("actor_infer-0", "serving again"),
    ]
    assert steps[-1]["faults/run_restarts"] == 2
    assert "step-000003 with the engines that run (restart 1 of 3)" in output
    assert output.count("actor_infer on 1 device") == 1 and output.count("actor_train on 1 device") == 3

"""Engines that die or stop: they are restarted, get the current weights, and no prompt is lost or learned twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dying_engines import SIGNALS_FILE
from runs import assert_nothing_is_left, finish, inputs_in, lines, recipe, start
from test_async_run import check_laws, check_weights_of_versions

from roll.distributed.events import EVENTS_FILE
from roll.pipeline.rollout_batch import read_samples

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

STEPS = 12


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> dict[str, Any]:
    return inputs_in(tmp_path_factory.mktemp("problems"), tiny_model_dir, train=10)


def dying(inputs: dict[str, Any], folder: Path, faults: list[str], **keys: Any) -> Path:
    """A run with a trainer on one device, whose engines die as `faults` says."""
    (folder / SIGNALS_FILE).write_text("\n".join(faults))
    return recipe(
        inputs,
        folder,
        **{
            "deterministic": False,
            "num_devices_per_node": 3,
            "max_steps": STEPS,
            "save_steps": 0,
            "eval_steps": 0,
            "response_length": 40,
            "verify_weights": "always",
            "sync_timeout_s": 20,
            "old_log_probs_source": "recompute",
            "actor_train__pg_variant": "tis",
            "rollout_dump_dir": str(folder / "samples"),
            "actor_train__device_mapping": [0],
            "actor_train__strategy_args": {"strategy_config": {"tensor_model_parallel_size": 1}},
            "async_training": {"batch_hook_class": "tests.integration.dying_engines:Killer"},
        }
        | keys,
    )


def events(folder: Path) -> list[tuple[str, str]]:
    """Component and event of every line of events.jsonl, in order."""
    entries = [json.loads(line) for line in (folder / "run" / EVENTS_FILE).read_text().splitlines()]
    return [(entry["component"], entry["event"]) for entry in entries]


def check_samples(folder: Path) -> None:
    """Every group that was learned from is whole."""
    for step in range(1, STEPS + 1):
        rows = read_samples(folder / "samples", step)
        assert len(rows) == 16 and len({row["group"] for row in rows}) == 4


def test_two_engines_die_in_every_way_and_the_run_goes_on(inputs, tmp_path):
    """One dies while it generates, one within a weight update, one is stopped by a signal, and one loses its worker."""
    faults = ["2 kill scheduler 1", "5 kill scheduler 0 in_update", "8 stop scheduler 1", "10 kill worker 0"]
    config = dying(
        inputs, tmp_path, faults, async_generation_ratio=2, actor_infer__device_mapping=[1, 2], max_steps=STEPS
    )
    code, output = finish(start(config))
    assert code == 0, output[-3000:]
    steps = lines(tmp_path)
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    check_laws(steps, 2)
    assert steps[-1]["ledger/submitted"] == 4 * STEPS, "a prompt was dropped"
    failed = [component for component, event in events(tmp_path) if event == "failed"]
    assert failed[:2] == ["actor_infer-1", "actor_infer-0"] and len(failed) <= 4
    assert ("actor_infer-1", "serving again") in events(tmp_path)
    check_samples(tmp_path)
    check_weights_of_versions(tmp_path / "samples")
    assert_nothing_is_left(tmp_path)


def test_the_only_engine_of_a_synchronous_run_dies_and_is_waited_for(inputs, tmp_path):
    faults = ["2 kill scheduler 0", "4 kill worker 0 in_update"]
    config = dying(inputs, tmp_path, faults, async_generation_ratio=0, actor_infer__device_mapping=[1])
    code, output = finish(start(config))
    assert code == 0, output[-3000:]
    steps = lines(tmp_path)
    check_laws(steps, 0)
    assert steps[-1]["faults/engine_restarts"] == 2 and steps[-1]["faults/engines_down"] == 0
    kinds = [event for _, event in events(tmp_path)]
    assert kinds == ["failed", "restarted", "serving again"] * 2
    check_samples(tmp_path)

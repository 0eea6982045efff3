"""Runs whose trainer splits samples over two context ranks: those of one rank, resumed at other layouts, and faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs import lines, recipe
from test_faults import events, run_with_faults

from tests.integration.shared_runs import SharedRuns

pytestmark = pytest.mark.integration

STEPS, SAVED = 10, 8
LAYOUTS: dict[str, dict[str, Any]] = {
    "cp1": {"tensor_model_parallel_size": 1},
    "cp2": {"tensor_model_parallel_size": 1, "context_parallel_size": 2},
    "tp2": {"tensor_model_parallel_size": 2},
}


def on(layout: str) -> dict[str, Any]:
    """Keys of a trainer at this layout."""
    return {
        "actor_train__device_mapping": [0] if layout == "cp1" else [0, 1],
        "actor_train__strategy_args": {"strategy_config": LAYOUTS[layout]},
    }


def ran(
    shared_runs: SharedRuns, inputs: dict[str, Any], folder: Path, layout: str, *overrides: str, **keys: Any
) -> list[dict[str, Any]]:
    """The lines of a run with the trainer at this layout."""
    config = recipe(inputs, folder, max_steps=STEPS, eval_steps=0, save_steps=SAVED, **on(layout) | keys)
    shared_runs.succeed(config, *overrides)
    return lines(folder)


def assert_equal_within(found: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float) -> None:
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
def test_ten_steps_on_two_context_ranks_are_those_on_one(shared_runs, inputs, tmp_path, loss):
    one, two = (
        ran(shared_runs, inputs, tmp_path / layout, layout, actor_train__pg_variant=loss) for layout in ("cp1", "cp2")
    )
    assert [line["actor/grad_norm"] > 0 for line in two] == [True] * STEPS
    assert_equal_within(two, one, 1e-5)
    if loss == "ppo":
        checkpoint = f"resume_from_checkpoint={tmp_path}/cp2/run/checkpoints/step-{SAVED:06}"
        for layout, tolerance in (("cp2", 0.0), ("cp1", 1e-5), ("tp2", 1e-5)):
            resumed = ran(shared_runs, inputs, tmp_path / f"resumed {layout}", layout, checkpoint)
            assert_equal_within(resumed, two[SAVED:], tolerance)


def test_a_rank_that_stops_in_the_gather_is_named_and_the_run_goes_on(inputs, tmp_path):
    """Rank 0 waits for its keys and values."""
    steps = run_with_faults(
        inputs, tmp_path, ["3 stop actor_train-1"], 4, save_steps=2, actor_infer__device_mapping=[2], **on("cp2")
    )
    assert [line["step"] for line in steps] == [1, 2, 3, 4] and steps[-1]["faults/run_restarts"] == 1
    assert ("actor_train-1", "killed") in events(tmp_path)

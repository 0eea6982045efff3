"""A whole run in bf16 that sends deltas."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import inputs_in, lines, recipe, start, succeed

pytestmark = pytest.mark.integration


def test_a_run_sends_what_has_changed_after_its_first_update(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = recipe(
        inputs_in(tmp_path / "data", tiny_model_dir),
        tmp_path,
        weight_update="delta",
        actor_train__model_args__dtype="bf16",
        actor_infer__model_args__dtype="bf16",
        actor_train__training_args__learning_rate=1e-5,
        max_steps=3,
        eval_steps=1,
        save_steps=0,
    )
    succeed(start(config))
    first, *later = [line["weight_update/bytes"] for line in lines(tmp_path)]
    assert len(later) == 3 and all(0 < sent < first / 4 for sent in later), (first, later)
    assert {line["weight_update/verified"] for line in lines(tmp_path)} == {1.0}

"""Shares of a step in closed form."""

from __future__ import annotations

import pytest

from roll.pipeline.training_loop import throughput


def test_the_idle_share_and_tokens_are_those_of_the_step():
    times = {"time/step": 10.0, "time/generate": 4.0, "time/old_log_probs": 1.0, "time/train": 2.0, "time/val": 1.0}
    assert throughput(600, 3, times) == {
        "throughput/tokens_per_second": pytest.approx(20.0),
        "throughput/trainer_idle": pytest.approx(0.7),
    }

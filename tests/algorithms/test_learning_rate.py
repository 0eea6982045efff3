import pytest

from roll.algorithms.learning_rate import LearningRate
from roll.configs.roles import TrainingArguments


def rates(steps=10, **options):
    schedule = LearningRate.of(TrainingArguments(learning_rate=1.0, **options), steps)
    return [schedule.at(step) for step in range(steps)]


def test_warm_up_starts_above_zero_and_reaches_the_peak():
    assert rates(warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates(warmup_ratio=0.35)[:4] == [0.25, 0.5, 0.75, 1.0]


def test_linear_ends_at_the_minimum():
    assert rates(lr_scheduler_type="linear", min_learning_rate=0.5, steps=4) == [0.875, 0.75, 0.625, 0.5]


def test_cosine_is_half_way_in_the_middle():
    values = rates(lr_scheduler_type="cosine")
    assert values[4] == pytest.approx(0.5) and values[-1] == pytest.approx(0.0)
    assert values == sorted(values, reverse=True)


def test_an_extended_run_stays_at_the_minimum():
    schedule = LearningRate.of(TrainingArguments(learning_rate=1.0, lr_scheduler_type="linear"), 10)
    assert schedule.at(50) == 0.0

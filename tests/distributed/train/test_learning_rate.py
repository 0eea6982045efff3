import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from roll.configs.arguments import TrainingArguments
from roll.distributed.train.learning_rate import LearningRate


def rates(steps=10, **options):
    schedule = LearningRate.of(TrainingArguments(learning_rate=1.0, **options), steps)
    return [schedule.at(step) for step in range(steps)]


def test_warm_up_starts_above_zero_and_reaches_the_peak():
    assert rates(warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates(warmup_ratio=0.35)[:4] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_every_step_of_a_run_has_a_rate_above_zero(shape):
    for steps in (1, 2, 10):
        for warmup in (0, 1, steps):
            assert min(rates(lr_scheduler_type=shape, steps=steps, warmup_steps=warmup)) > 0


def test_linear_falls_from_the_peak_towards_the_minimum():
    assert rates(lr_scheduler_type="linear", min_learning_rate=0.5, steps=4) == [1.0, 0.875, 0.75, 0.625]


def test_cosine_is_half_way_in_the_middle():
    values = rates(lr_scheduler_type="cosine")
    assert values[0] == 1 and values[5] == pytest.approx(0.5)
    assert values == sorted(values, reverse=True)


def test_the_schedules_are_those_of_transformers_and_megatron():
    peak, steps, warmup = 1.0, 12, 3
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
    for shape, make in (("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)):
        theirs = make(optimizer, warmup, steps).lr_lambdas[0]
        ours = rates(lr_scheduler_type=shape, steps=steps, warmup_steps=warmup)
        assert ours[warmup:] == pytest.approx([peak * theirs(step) for step in range(warmup, steps)])
        optimizer.param_groups[0].update(max_lr=peak, min_lr=0.0)
        megatron = OptimizerParamScheduler(
            optimizer,
            0.0,
            peak,
            0.0,
            warmup,
            steps,
            shape,
            0.0,
            0.0,
            1,
            "constant",
            use_checkpoint_opt_param_scheduler=False,
        )
        found = []
        for _ in range(steps):
            found.append(optimizer.param_groups[0]["lr"])
            megatron.step(1)
        assert ours[warmup:] == pytest.approx(found[warmup:])


def test_an_extended_run_stays_at_the_minimum():
    schedule = LearningRate.of(TrainingArguments(learning_rate=1.0, lr_scheduler_type="linear"), 10)
    assert schedule.at(50) == 0.0

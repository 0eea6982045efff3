"""Findings and recommendations of the report, from synthetic metrics."""

from __future__ import annotations

import pytest

from roll.pipeline.bottleneck_report import Split, bottleneck_report, measure

APART = Split(ratio=1, generation=4, training=12, shared=False)


def lines(steps: int = 4, **values: float) -> list[dict[str, float]]:
    """Equal steps of 10 s; keyword names use __ for the slash."""
    usual = {
        "time/step": 10.0,
        "time/wait_prev_gen": 0.2,
        "time/generate": 9.0,
        "time/train": 9.0,
        "throughput/trainer_idle": 0.1,
        "throughput/rollout_idle": 0.1,
        "rollout/response_length_mean": 100.0,
        "rollout/response_length_max": 180.0,
    }
    changed = {name.replace("__", "/"): value for name, value in values.items()}
    return [{"step": 0, "val/score": 0.1}] + [{"step": step, **usual, **changed} for step in range(1, steps + 1)]


def test_a_balanced_run_needs_no_change():
    report = bottleneck_report(lines(), APART)
    assert report.startswith("neither side waited for the other: the split is right (")
    assert "time/wait_prev_gen 0.20 s of time/step 10.00 s, trainer_idle 10%, rollout_idle 10%" in report
    assert "longest response 1.8 x the mean; 4 devices for generation, 12 for training" in report


def test_waiting_for_responses_of_similar_length_recommends_devices_for_generation():
    report = bottleneck_report(lines(time__wait_prev_gen=6, time__generate=10, time__train=4), APART)
    assert "training waited for generation" in report
    assert "try 7 devices for generation and 9 for training" in report  # 4 x 10 : 12 x 4 of 16


def test_waiting_for_a_long_tail_recommends_a_higher_ratio():
    report = bottleneck_report(lines(time__wait_prev_gen=6, rollout__response_length_max=900), APART)
    assert "a long tail of responses, which more devices do not shorten; try async_generation_ratio 2" in report


def test_waiting_for_idle_engines_recommends_a_higher_ratio():
    report = bottleneck_report(lines(time__wait_prev_gen=4, throughput__rollout_idle=0.5), Split(0.5, 4, 12, False))
    assert "each waited for the other; try async_generation_ratio 1.5" in report


def test_a_weight_update_that_waits_for_running_responses_counts_as_waiting():
    waiting = lines(time__weight_update=5, time__generate=10, time__train=4)
    assert "neither side waited" in bottleneck_report(waiting, APART)
    report = bottleneck_report(waiting, Split(1, 4, 12, False, drains=True))
    assert "training waited for generation" in report
    assert "time/wait_prev_gen 0.20 s and time/weight_update 5.00 s of time/step" in report


@pytest.mark.parametrize(("apart", "seconds"), [(False, 4 + 3 + 0.5 + 1 + 2), (True, 4 + 0.5 + 2)])
def test_the_work_of_a_critic_is_training_too(apart, seconds):
    times = {"time__train": 4, "time__train_critic": 3, "time__advantages": 0.5}
    means = measure(lines(**times, time__old_log_probs=1, time__values=2), critic_apart=apart)
    assert means is not None and means.train == pytest.approx(seconds)


def test_idle_engines_give_devices_to_training():
    report = bottleneck_report(lines(throughput__rollout_idle=0.6, time__generate=4), Split(1, 8, 8, False))
    assert "the engines waited for training; try 5 devices for generation and 11 for training" in report


@pytest.mark.parametrize(
    ("changes", "split", "expected"),
    [
        (
            {"time__wait_prev_gen": 5.0, "time__generate": 10},
            Split(1, 3, 1, False),
            "training has only one: add devices",
        ),
        ({"throughput__rollout_idle": 0.5}, Split(1, 1, 2, False), "generation has only one: add"),
        ({"time__wait_prev_gen": 5.0, "time__generate": 1}, Split(1, 2, 2, False), "try 3 devices for generation"),
    ],
)
def test_a_role_keeps_one_device_and_at_least_one_moves(changes, split, expected):
    assert expected in bottleneck_report(lines(**changes), split)


def test_a_synchronous_run_reports_the_possible_gain_of_running_ahead():
    report = bottleneck_report(
        lines(time__generate=6.0, time__train=3.0, time__old_log_probs=1.0, time__wait_prev_gen=6.0),
        Split(0, 4, 12, False),
    )
    assert "could save at most 4.00 s of a step (40%): max(G, T) = 6.00 s instead of G + T = 10.00 s" in report


def test_shared_devices_gain_nothing_by_the_ratio_alone():
    assert "max(G/a, T/(1-a)) if a is the share of the devices" in bottleneck_report(lines(), Split(0, 8, 8, True))
    assert "try separate devices" in bottleneck_report(lines(), Split(1, 8, 8, True))


def test_the_first_step_validation_and_checkpoints_do_not_count():
    rows = lines(steps=2)
    rows[1]["time/wait_prev_gen"] = 100.0
    rows[2] |= {"time/step": 15.0, "time/val": 4.0, "time/checkpoint": 1.0}
    means = measure(rows)
    assert (means.step, means.wait) == (10.0, 0.2)


def test_without_generation_the_report_is_empty():
    assert bottleneck_report([], APART) == ""
    assert bottleneck_report([{"step": 0, "val/score": 0.5}], APART) == ""

"""Findings and recommendations of the report, from synthetic metrics."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import pytest

from roll.pipeline.bottleneck_report import LEAST_STEPS, Split, bottleneck_report, measure

APART = Split(ratio=1, generation=4, training=12, shared=False)


def lines(steps: int = 12, **values: float) -> list[dict[str, float]]:
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
    assert (
        "time/wait_prev_gen 0.20 s of time/step 10.00 s, time/generate 9.00 s, trainer_idle 10%, rollout_idle 10%"
        in report
    )
    assert "longest response 1.8 x the mean; 4 devices for generation, 12 for training" in report


def test_waiting_for_responses_recommends_devices_for_generation():
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
    assert (
        "saves up to 4.00 s of a step (40%) if both take as long as now: max(G, T) = 6.00 s instead of G + T = 10.00 s"
        in report
    )


def test_shared_devices_gain_nothing_by_the_ratio_alone():
    assert "max(G/a, T/(1-a)) if a is the share of the devices" in bottleneck_report(lines(), Split(0, 8, 8, True))
    assert "try separate devices" in bottleneck_report(lines(), Split(1, 8, 8, True))


def test_the_first_step_validation_and_checkpoints_do_not_count():
    rows = lines(steps=2)
    rows[1]["time/wait_prev_gen"] = 100.0
    rows[2] |= {"time/step": 15.0, "time/val": 4.0, "time/checkpoint": 1.0}
    means = measure(rows)
    assert (means.step, means.wait) == (10.0, 0.2)


SLOW = {"time__env": 7.0, "time__generate": 0.4, "time__wait_prev_gen": 6.0, "throughput__rollout_idle": 0.9}
AGENTS = {"generation": 1, "training": 1, "shared": False, "batch_groups": 4}


@pytest.mark.parametrize(
    ("ratio", "groups", "advice"),
    [
        (0, 4, "from 4 to 8 with async_generation_ratio 1"),
        (1, 4, "from 4 to 8"),
        (2, 12, "from 12 to 16 with async_generation_ratio 3"),
        (0.5, 8, "let more of train_env_manager.num_env_groups 8 run with async_generation_ratio 1"),
    ],
)
def test_slow_environments_are_named_and_more_of_them_recommended(ratio, groups, advice):
    report = bottleneck_report(lines(**SLOW), Split(ratio, groups=groups, cpu=True, **AGENTS))
    assert report.startswith("environments take 7.00 s of a step of 10.00 s, longer than generation; ")
    assert advice in report and "train_env_manager.num_env_groups" in report and "device" not in report


def test_slow_rewards_are_named_with_the_keys_of_their_processes():
    slow = {**SLOW, "time__env": 0.0, "time__reward": 7.0}
    report = bottleneck_report(lines(**slow), Split(1, 4, 12, False, reward_keys=("rewards.a.world_size",)))
    assert "rewards take 7.00 s of a step of 10.00 s, longer than generation; raise rewards.a.world_size (" in report


SECONDS = (0.2, 2.0, 8.0)
GRID = itertools.product(SECONDS, (0.0, *SECONDS), (0.0, *SECONDS), SECONDS, (0.1, 9.0), (0.1, 3.0, 9.0), (0.05, 0.6))


def test_every_sentence_is_true_of_its_timings():
    splits = [
        Split(ratio, 2, 6, shared, cpu=cpu, groups=groups, batch_groups=4)
        for ratio, shared, cpu, groups in itertools.product((0, 0.5, 1, 2), (True, False), (True, False), (None, 4, 12))
    ]
    seen = Counter()
    cases = zip(GRID, itertools.cycle(splits), itertools.cycle([500, 500, *[150] * 5]), strict=False)
    for (generate, env, reward, train, update, wait, idle), split, tail in cases:
        env = 0.0 if split.groups is None else env
        work = {"generate": generate, "env": env, "reward": reward, "train": train, "weight_update": update}
        times = {f"time__{name}": seconds for name, seconds in work.items()} | {"time__wait_prev_gen": wait}
        measured = lines(**times, throughput__rollout_idle=idle, rollout__response_length_max=tail)
        report = bottleneck_report(measured, split)
        advice = report.partition(" (time/")[0]
        longest = max(("generate", generate), ("env", env), ("reward", reward), key=lambda item: item[1])
        truths = {
            "environments take": longest == ("env", env) and f"take {env:.2f} s" in advice and wait >= 1.5,
            "rewards take": longest == ("reward", reward) and f"take {reward:.2f} s" in advice and wait >= 1.5,
            "saves up to": split.ratio == 0 and f"{min(wait, train):.2f} s of a step" in advice,
            "each waited for the other": longest[1] == generate and wait >= 1.5 and idle > 0.3,
            "the engines waited for training": longest[1] == generate and wait < 1.5 and idle > 0.3,
            "weight updates take": update > train and wait < 1.5 and idle > 0.3,
            "num_env_groups": split.groups is not None,
            "device": not split.cpu,
            "try async_generation_ratio": split.groups is None,
        }
        for sentence, holds in truths.items():
            assert sentence not in advice or holds, (sentence, report)
            seen[sentence] += sentence in advice
        if found := re.search(r"num_env_groups from (\d+) to (\d+)(?: with async_generation_ratio (\d+))?", advice):
            now, then, ratio = (float(group or split.ratio) for group in found.groups())
            assert split.groups == now < then == 4 * (1 + ratio) or (split.ratio, then) == (0.5, 6.0)
    assert all(seen.values()), seen


def test_a_handful_of_steps_is_no_ground_for_advice():
    assert bottleneck_report(lines(steps=LEAST_STEPS), APART) == ""
    assert bottleneck_report(lines(steps=LEAST_STEPS + 1), APART)


def test_without_generation_the_report_is_empty():
    assert bottleneck_report([], APART) == ""
    assert bottleneck_report([{"step": 0, "val/score": 0.5}], APART) == ""

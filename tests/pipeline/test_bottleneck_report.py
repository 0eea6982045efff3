"""Findings and recommendations of the report, from synthetic metrics."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import pytest

from roll.pipeline.bottleneck_report import LEAST_STEPS, Split, bottleneck_report, mean_times

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
    report = bottleneck_report(lines(time__wait_prev_gen=6, time__train=3, rollout__response_length_max=900), APART)
    assert "a long tail of responses, which more devices do not shorten; try async_generation_ratio 2" in report


def test_waiting_for_idle_engines_recommends_a_higher_ratio():
    waits = {"time__wait_prev_gen": 4, "time__generate": 5, "time__train": 6, "throughput__rollout_idle": 0.5}
    report = bottleneck_report(lines(**waits), Split(0.5, 4, 12, False))
    assert "each waited for the other; try async_generation_ratio 1.5" in report


def test_a_weight_update_that_waits_for_running_responses_counts_as_waiting():
    waiting = lines(time__weight_update=5, time__weight_update_pause=0.1, time__generate=10, time__train=4)
    assert "neither side waited" in bottleneck_report(waiting, APART)
    report = bottleneck_report(waiting, Split(1, 4, 12, False, drains=True))
    assert "training waited for generation" in report
    assert "time/wait_prev_gen 0.20 s and time/weight_update 5.00 s of time/step" in report
    report = bottleneck_report([line | {"time/generate": 6} for line in waiting], Split(1, 4, 12, False, drains=True))
    assert report.startswith("weight updates waited 4.90 s of a step for running responses; in_flight_policy retract")


@pytest.mark.parametrize(("apart", "seconds"), [(False, 4 + 3 + 0.5 + 1 + 2), (True, 4 + 0.5 + 2)])
def test_the_work_of_a_critic_is_training_too(apart, seconds):
    times = {"time__train": 4, "time__train_critic": 3, "time__advantages": 0.5}
    means = mean_times(lines(**times, time__old_log_probs=1, time__values=2), critic_apart=apart)
    assert means is not None and means.train == pytest.approx(seconds)


def test_idle_engines_give_devices_to_training():
    report = bottleneck_report(lines(throughput__rollout_idle=0.6, time__generate=4), Split(1, 8, 8, False))
    assert "the engines waited for training; try 5 devices for generation and 11 for training" in report


@pytest.mark.parametrize(
    ("generate", "train", "split", "expected"),
    [
        (
            9.9,
            2,
            Split(1, 3, 1, False),
            "no other split or async_generation_ratio saves 1.50 s: add devices for generation",
        ),
        (
            2,
            9.9,
            Split(1, 1, 2, False),
            "no other split or async_generation_ratio saves 1.50 s: add devices for training",
        ),
        (9.9, 1, Split(1, 2, 2, False), "try 3 devices for generation and 1 for training"),
    ],
)
def test_a_role_keeps_one_device(generate, train, split, expected):
    times = {"time__wait_prev_gen": 9.9 - train, "time__generate": generate, "time__train": train}
    assert expected in bottleneck_report(lines(**times, throughput__rollout_idle=1 - generate / 10), split)


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
    assert "share their devices, so each is slower" in bottleneck_report(lines(), Split(1, 8, 8, True))


@pytest.mark.parametrize(("own_cores", "saves"), [(False, False), (True, True)])
def test_on_a_cpu_running_ahead_saves_time_only_with_cores_of_its_own(own_cores, saves):
    split = Split(0, 4, 4, False, cpu=True, own_cores=own_cores)
    report = bottleneck_report(lines(time__wait_prev_gen=5, time__generate=5, time__train=5), split)
    assert ("saves up to 5.00 s of a step (50%)" in report) == saves


def test_the_first_step_validation_and_checkpoints_do_not_count():
    rows = lines(steps=2)
    rows[1]["time/wait_prev_gen"] = 100.0
    rows[2] |= {"time/step": 15.0, "time/val": 4.0, "time/checkpoint": 1.0}
    means = mean_times(rows)
    assert (means.step, means.wait) == (10.0, 0.2)


SLOW = {
    "time__step": 7.3,
    "time__env": 7.0,
    "time__generate": 0.4,
    "time__wait_prev_gen": 7.0,
    "time__train": 0.2,
    "throughput__rollout_idle": 0.9,
}
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
    assert report.startswith("environments take 7.00 s of a step of 7.30 s, longer than generation; ")
    assert advice in report and "train_env_manager.num_env_groups" in report and "device" not in report


def test_slow_rewards_are_named_with_the_keys_of_their_processes():
    slow = {**SLOW, "time__env": 0.0, "time__reward": 7.0}
    report = bottleneck_report(lines(**slow), Split(1, 4, 12, False, reward_keys=("rewards.a.world_size",)))
    assert "rewards take 7.00 s of a step of 7.30 s, longer than generation; raise rewards.a.world_size (" in report


def run(ratio, parts, jitter=0.0):
    """Measured values of a run of these seconds, in which each side waits `jitter` for the other."""
    generate, env, reward, train, update, pause = parts
    batch = max(generate, env, reward)
    step = batch + train + update if ratio == 0 else max(batch + pause, train + update) + jitter
    names = ("generate", "env", "reward", "train", "weight_update", "weight_update_pause")
    measured = {f"time__{name}": seconds for name, seconds in zip(names, parts, strict=True)}
    idle = {"throughput__rollout_idle": 1 - generate / step}
    return measured | idle | {"time__step": step, "time__wait_prev_gen": step - train - update}


SECONDS = (0.05, 5.0, 10.0)
UPDATES = ((0.02, 0.02), (5.0, 0.5), (5.0, 5.0))


def test_every_advice_shortens_the_step_and_every_sentence_is_true():
    seen = Counter()
    platforms = (False, False), (True, False), (True, True)
    kinds = itertools.product((0, 1), platforms, (0.0, 4.0), (1, 5))
    works = list(itertools.product(SECONDS, (0.0, 7.0, 12.0), (0.0, 8.0, 12.0), SECONDS, UPDATES))
    for ratio, (cpu, own_cores), jitter, devices in kinds:
        split = Split(ratio, devices, 8 - devices, False, cpu=cpu, own_cores=own_cores, groups=4, batch_groups=4)
        for generate, env, reward, train, updates in works:
            parts = (generate, env, reward, train, *updates)
            measured = run(ratio, parts, jitter)
            step, idle, wait = (
                measured[f"{name}"] for name in ("time__step", "throughput__rollout_idle", "time__wait_prev_gen")
            )
            least, advice = max(0.1, 0.15 * step), bottleneck_report(lines(**measured), split).partition(" (time/")[0]

            def saved(changed, ratio=ratio, jitter=jitter, step=step):
                return step - run(ratio, changed, jitter)["time__step"]

            def moved(to, parts=parts, devices=devices):
                return (parts[0] * devices / to, *parts[1:3], parts[3] * (8 - devices) / (8 - to), *parts[4:])

            slow = max(generate, train if ratio else 0)
            faster = (generate, 0 if env > slow else env, 0 if reward > slow else reward, *parts[3:])
            instant = (*parts[:4], 0, 0)
            split_saves = {to: saved(moved(to)) for to in range(1, 8)} if ratio and not cpu else {}
            truths = {
                "environments take": env > slow and saved(faster) >= least,
                "rewards take": reward > slow and saved(faster) >= least,
                "weight updates take": saved(instant) >= least,
                "saves up to": ratio == 0 and (own_cores or not cpu) and min(wait, train) >= least,
                "took turns": ratio == 0,
                "each waited for the other": ratio > 0 and jitter >= least,
                "training waited for generation": generate + updates[1] > train + updates[0],
                "the engines waited for training": train + updates[0] > max(generate, env, reward) + updates[1],
                "neither side waited": wait < 0.15 * step and idle < 0.3,
                "took the longest": max(saved(faster), saved(instant), jitter, *split_saves.values(), 0) < least + 1e-9,
            }
            told = [sentence for sentence in truths if sentence in advice]
            assert told and all(truths[sentence] for sentence in told), (told, advice, parts, split)
            if found := re.search(r"try (\d+) devices for generation and (\d+)", advice):
                assert split_saves[int(found[1])] >= least and int(found[1]) + int(found[2]) == 8, (advice, parts)
            if found := re.search(r"num_env_groups from (\d+) to (\d+)", advice):
                assert int(found[1]) == split.groups < int(found[2])
            seen.update(told)
    assert len(seen) == len(truths), seen


def test_a_gain_below_a_tenth_of_a_second_is_no_advice():
    parts = (0.02, 0.0, 0.04, 0.03, 0.01, 0.01)
    report = bottleneck_report(lines(**run(0, parts)), Split(0, 4, 4, False, reward_keys=("rewards.a.world_size",)))
    assert "rewards.a.world_size" not in report and "saves" not in report


def test_a_handful_of_steps_is_no_ground_for_advice():
    assert bottleneck_report(lines(steps=LEAST_STEPS), APART) == ""
    assert bottleneck_report(lines(steps=LEAST_STEPS + 1), APART)


def test_without_generation_the_report_is_empty():
    assert bottleneck_report([], APART) == ""
    assert bottleneck_report([{"step": 0, "val/score": 0.5}], APART) == ""

"""An RLVR run of two training ranks and two engines that share one of three devices and take turns: it learns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import assert_nothing_is_left, inputs_in, lines, recipe, start, succeed

from roll.configs.trackers import METRICS_FILE
from roll.trackers.files import read_metrics
from roll.trackers.sample_files import read_samples
from tests.integration.recorded_engines import generated_by

pytestmark = pytest.mark.integration

STEPS = 14
ENGINES = 2
TRAIN_DEVICES, INFER_DEVICES = [0, 1], [1, 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """The folder of the finished run."""
    folder = tmp_path_factory.mktemp("colocated")
    config = recipe(
        inputs_in(folder, tiny_model_dir),
        folder,
        num_devices_per_node=3,
        actor_train__device_mapping=TRAIN_DEVICES,
        actor_infer__device_mapping=INFER_DEVICES,
        is_offload_states=True,
        deterministic=False,
        verify_weights="always",
        old_log_probs_source="recompute",
        max_steps=STEPS,
        save_steps=0,
        save_checkpoint=False,
        eval_steps=0,
        rollout_batch_size=8,
        num_return_sequences_in_group=8,
        actor_train__training_args__learning_rate=5e-3,
        actor_train__training_args__per_device_train_batch_size=32,
        rollout_dump_dir=str(folder / "samples"),
    )
    succeed(start(config, module="tests.integration.recorded_engines"))
    assert_nothing_is_left(folder)
    return folder


@pytest.fixture(scope="module")
def samples_of(folder: Path) -> dict[int, list[list[dict[str, Any]]]]:
    """The samples that each engine drew, by step; its log-probs tell a response from all others."""
    engine_of = {
        tuple(torch.tensor(json.loads(line)).tolist()): engine
        for engine in range(ENGINES)
        for line in generated_by(folder / "run", engine).read_text().splitlines()
    }
    samples: dict[int, list[list[dict[str, Any]]]] = {engine: [[] for _ in range(STEPS)] for engine in range(ENGINES)}
    for step in range(STEPS):
        for sample in read_samples(folder / "samples", step + 1):
            samples[engine_of[tuple(sample["behavior_log_probs"])]][step].append(sample)
    return samples


def test_the_reward_rises(folder):
    """A mean over 64 responses of 6 tokens has a standard deviation of 0.03 at most."""
    rewards = [line["rollout/reward_mean"] for line in lines(folder)]
    first, last = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    assert last > first + 0.3, rewards


def test_every_update_is_verified_on_engines_that_share_the_trainers_devices(folder):
    steps = lines(folder)
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert all(line["weight_update/verified"] == 1 and line["sync_failures"] == 0 for line in steps)
    assert all(line["actor/grad_norm"] > 0 and line["staleness/max"] == 0 for line in steps)


def test_trainer_and_engines_take_turns_in_every_step(folder):
    assert all(0 < line["time/hand_over"] < line["time/step"] for line in read_metrics(folder / "run" / METRICS_FILE))
    plan = json.loads((folder / "run" / "run.json").read_text())["plan"]
    assert plan["takes_turns"]


def test_requests_spread_over_the_engines(samples_of):
    for step in range(STEPS):
        assert {engine: len(samples[step]) for engine, samples in samples_of.items()} == {0: 32, 1: 32}


def test_every_update_reaches_every_engine(samples_of):
    """Either engine samples with the weights that the trainer scores with, after each update."""
    for samples in samples_of.values():
        for step in range(STEPS):
            for sample in samples[step]:
                assert set(sample["weight_version"]) == {step}
                trainer, engine = torch.tensor(sample["old_log_probs"]), torch.tensor(sample["behavior_log_probs"])
                assert (trainer - engine).abs().max() < 1e-4

"""`roll simulate`: measurements of a run with known speed predict the step times of other runs."""

from __future__ import annotations

import argparse
import io
import json
import random
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from roll.base.errors import ConfigError
from roll.cli import main
from roll.configs.pipeline import RLVRConfig
from roll.lab.simulate.calibration import (
    GeneratedBatch,
    Measurements,
    RunShape,
    StepTimes,
    fit_doubling_batch,
    read_measurements,
)
from roll.lab.simulate.command import add_options
from roll.lab.simulate.cost_model import CostModel, response_lengths
from roll.lab.simulate.options_model import build_cost_model, check_simulated
from roll.lab.simulate.report import print_prediction
from roll.lab.simulate.search import DeviceSplit, configured_split, possible_splits, predict
from roll.lab.simulate.simulator import DecodeSpeed, Outcome, generation_seconds, simulate
from roll.loading.load import load_config
from roll.plan.hardware import Hardware
from roll.trackers.files import JsonlTracker, write_run_json
from tests.configs.samples import AGENTIC, RLVR, SFT, rlvr, write

MACHINE = Hardware(gpus=8, cores=64)
FOUR_DEVICES = ("actor_train.device_mapping=[0,1]", "actor_infer.device_mapping=[2,3]", "num_devices_per_node=4")
TRUE_SPEED = DecodeSpeed(0.01, doubling_batch=64.0)


def given(**options: Any) -> argparse.Namespace:
    """The options of a command that gives these."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    return argparse.Namespace(**vars(parser.parse_args([])) | options)


def small(folder: Path, *overrides: str) -> RLVRConfig:
    """16 prompts of 4 samples on two training devices and two engines."""
    return rlvr(
        folder, *FOUR_DEVICES, "platform=cuda", "rollout_batch_size=16", "num_return_sequences_in_group=4",
        "actor_train.training_args.gradient_accumulation_steps=8",
        "actor_train.training_args.per_device_train_batch_size=1", *overrides,
    )  # fmt: skip


def true_model(config: RLVRConfig, slowdown: float = 1.0) -> CostModel:
    """The true speed of the runs of these tests."""
    times = StepTimes(generate=0.0, train=3.0, log_probs=1.0, reward=0.2, weight_update=0.4, weight_update_pause=0.3)
    measured = Measurements(replace(RunShape.of(asdict(config)), ratio=0.0), times, mean_length=200, max_length=700)
    lengths = response_lengths(200, 700, 64, 1024, seed=3)
    return CostModel(config, measured, TRUE_SPEED, lengths, overhead=0.1, slowdown=slowdown)


def outcome_of(model: CostModel, ratio: float) -> Outcome:
    return simulate(model.scenario(2, 2, ratio, steps=30))


def write_run(folder: Path, config: RLVRConfig, lines: list[dict[str, float]]) -> Path:
    write_run_json(folder, config, None, versions={})
    tracker = JsonlTracker(folder / "metrics.jsonl")
    for step, line in enumerate(lines, start=1):
        tracker.log(step, line)
    tracker.close()
    return folder


def synchronous_run(folder: Path, config: RLVRConfig, steps: int = 24) -> Path:
    """A synchronous run of `true_model`, with other response lengths in each step."""
    draw, lines, times = random.Random(0), [], true_model(config).measured.times
    for _ in range(steps):
        mean = draw.uniform(150, 250)
        longest = mean * draw.uniform(2.0, 5.0)
        alone = true_model(config).scenario(2, 2, 0, 1)
        alone = replace(alone, lengths=response_lengths(mean, longest, 64, 1024, seed=draw.randrange(99)))
        lines.append(
            {
                "time/generate": generation_seconds(alone),
                "rollout/response_length_mean": mean,
                "rollout/response_length_max": longest,
                "time/train": times.train * draw.uniform(0.95, 1.05),
                "time/old_log_probs": times.log_probs,
                "time/reward": times.reward,
                "time/weight_update": times.weight_update,
                "time/weight_update_pause": times.weight_update_pause,
                "time/val": 5.0,
            }
        )
        lines[-1]["time/step"] = 5.1 + sum(
            lines[-1][f"time/{name}"] for name in ("generate", "train", "old_log_probs", "reward", "weight_update")
        )
    return write_run(folder, config, lines)


def asynchronous_run(folder: Path, config: RLVRConfig, step_seconds: float) -> Path:
    line = {"time/step": step_seconds, "time/train": 3.0, "time/generate": 0.0}
    lengths = {"rollout/response_length_mean": 200.0, "rollout/response_length_max": 700.0}
    return write_run(folder, config, [line | lengths] * 6)


@pytest.fixture(scope="module")
def synchronous_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a synchronous run."""
    folder = tmp_path_factory.mktemp("synchronous_folder")
    return synchronous_run(folder / "run", small(folder))


@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_synchronous_run_predicts_step_times_of_asynchronous_runs(
    tmp_path: Path, synchronous_folder: Path, ratio: float
) -> None:
    config = small(tmp_path)
    model, _ = build_cost_model(config, given(from_run=synchronous_folder), MACHINE)
    assert outcome_of(model, ratio).step_seconds == pytest.approx(
        outcome_of(true_model(config), ratio).step_seconds, rel=0.08
    )


def test_doubling_batch_is_fitted_to_steps_of_different_lengths(synchronous_folder: Path) -> None:
    measured = read_measurements(synchronous_folder, "--from")
    fitted = fit_doubling_batch(measured)
    assert fitted is not None and 32 <= fitted <= 128
    alike = replace(measured, batches=[GeneratedBatch(3.0, 200, 700)] * 20)
    assert fit_doubling_batch(alike) is None
    assert fit_doubling_batch(replace(measured, batches=measured.batches[:5])) is None


@pytest.mark.parametrize("slowdown", [1.0, 1.4, 2.0])
def test_slowdown_is_fitted_to_a_run_with_overlap(tmp_path: Path, synchronous_folder: Path, slowdown: float) -> None:
    config = small(tmp_path)
    ahead = small(tmp_path, "async_generation_ratio=1")
    real = true_model(config, slowdown)
    options = given(
        from_run=synchronous_folder,
        overlap_run=asynchronous_run(tmp_path / "ahead", ahead, outcome_of(real, 1).step_seconds),
    )
    model, _ = build_cost_model(config, options, MACHINE)
    assert outcome_of(model, 1).step_seconds == pytest.approx(outcome_of(real, 1).step_seconds, rel=0.05)
    assert outcome_of(model, 2).step_seconds == pytest.approx(outcome_of(real, 2).step_seconds, rel=0.10)


@pytest.mark.parametrize(("devices", "train", "log_probs"), [("0-1", 9.0, 3.0), ("4-5", 6.0, 2.0)])
def test_the_time_of_a_critic_is_part_of_training(tmp_path: Path, devices: str, train: float, log_probs: float) -> None:
    critic = ("adv_estimator=gae", f"critic.device_mapping={devices}", "num_devices_per_node=8")
    config = small(tmp_path, "critic.training_args.gradient_accumulation_steps=8", *critic)
    line = {"time/step": 20.0, "time/generate": 1.0, "time/train": 3.0, "time/train_critic": 6.0}
    line |= {"time/old_log_probs": 1.0, "time/values": 2.0}
    lengths = {"rollout/response_length_mean": 200.0, "rollout/response_length_max": 700.0}
    measured = read_measurements(write_run(tmp_path / "run", config, [line | lengths] * 3), "--from")
    assert (measured.times.train, measured.times.log_probs) == (train, log_probs)
    assert measured.shape == RunShape.of(asdict(config))


def test_slowdown_defaults_to_devices_per_core(tmp_path: Path) -> None:
    config = small(tmp_path, "platform=cpu")
    options = given(generate=4.0, train=3.0)
    model, notes = build_cost_model(config, options, Hardware(gpus=0, cores=2))
    assert model.slowdown == 2.0 and "slowdown of overlap: not measured, 2 assumed" in notes[-1]
    assert (
        build_cost_model(config, given(generate=4.0, train=3.0, slowdown=1.2), Hardware(gpus=0, cores=2))[0].slowdown
        == 1.2
    )
    assert build_cost_model(config, options, Hardware(gpus=0, cores=4))[0].slowdown == 1.0


@pytest.mark.parametrize(("overrides", "newer"), [((), 4), (("actor_infer.max_newer_requests=0",), 0)])
def test_engines_start_as_many_newer_requests_as_in_a_run(
    tmp_path: Path, overrides: tuple[str, ...], newer: int
) -> None:
    config = small(tmp_path, "platform=cpu", "async_generation_ratio=1", *overrides)
    model, _ = build_cost_model(config, given(generate=4.0, train=3.0), Hardware(gpus=0, cores=2))
    assert model.scenario(1, 1, 1.0, 1).newer == newer


def test_log_probs_cost_nothing_if_those_of_the_engine_are_used(tmp_path: Path) -> None:
    def log_probs(ratio: float, *overrides: str) -> float:
        return true_model(small(tmp_path, *overrides)).scenario(2, 2, ratio, 1).costs.log_probs

    for configured in ("0", "1"):
        own = f"async_generation_ratio={configured}"
        assert [log_probs(0, own), log_probs(1, own)] == [1.0, 0.0]
    assert log_probs(1, "old_log_probs_source=recompute") == 1.0
    assert log_probs(1, "actor_train.pg_variant=decoupled_ppo") == 1.0
    reference = ("use_kl_loss=true", "kl_loss_coef=0.01", "reference.device_mapping=[0,1]")
    batch, step = 32, 4  # training gives the log-probs of the first optimizer step in the measured run
    for epochs in ("1", "3"):
        assert log_probs(1, *reference, f"ppo_epochs={epochs}") == pytest.approx(batch / (2 * batch - step))


def test_splits_are_limited_by_parallel_sizes_and_batches(tmp_path: Path) -> None:
    config = small(tmp_path)
    assert configured_split(config) == DeviceSplit(2, 2)
    assert possible_splits(config, 8) == [DeviceSplit(4, 4), DeviceSplit(2, 6)], "8 samples do not divide by 3"
    assert possible_splits(small(tmp_path, "actor_infer.num_gpus_per_worker=2"), 4) == [DeviceSplit(2, 2)]


def test_slower_side_gets_more_devices(tmp_path: Path) -> None:
    eight = ("actor_train.device_mapping=0-3", "actor_infer.device_mapping=4-7", "num_devices_per_node=8")
    config = small(tmp_path, *eight)
    slow_generation = build_cost_model(config, given(generate=12.0, train=3.0, doubling_batch=1.0), MACHINE)[0]
    slow_training = build_cost_model(config, given(generate=3.0, train=12.0, doubling_batch=1.0), MACHINE)[0]
    assert predict(slow_generation).best.split.infer_devices > 4
    best = predict(slow_training).best.split
    assert best.shared, "no valid split gives training 7 of 8 devices, so sharing all 8 is faster"


def test_prediction_shows_the_configured_and_the_best_candidate(tmp_path: Path) -> None:
    config = small(tmp_path)
    model, notes = build_cost_model(config, given(generate=4.0, train=3.0, weight_update=0.2), MACHINE)
    prediction = predict(model)
    assert prediction.configured.split == DeviceSplit(2, 2) and prediction.configured.ratio == 0
    assert prediction.configured.outcome.step_seconds == pytest.approx(7.2)
    assert prediction.best.ratio > 0
    shown = io.StringIO()
    print_prediction(prediction, model, notes, "small", shown)
    for part in ("small: simulation", "trainer idle", "as configured", "4 shared", "faster than configured", "0: 100%"):
        assert part in shown.getvalue()
    assert "and training on it T = 1.5 s; a synchronous step takes G + T = " in shown.getvalue()
    assert (
        "With split 2 : 2 at ratio 0, generation takes 4 s and training 3 s; with full overlap a step takes 4 s"
        in shown.getvalue()
    )
    assert "response lengths: not measured, all assumed to be response_length = 1024 tokens" in shown.getvalue()


def test_command_prints_json(tmp_path: Path, synchronous_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small(tmp_path)
    overrides = ["rollout_batch_size=16", "num_return_sequences_in_group=4", *FOUR_DEVICES, "platform=cuda"]
    overrides += ["actor_train.training_args.gradient_accumulation_steps=8", "async_generation_ratio=1"]
    arguments = ["--from", str(synchronous_folder), "--slowdown", "1.1", "--json"]
    assert main(["simulate", config.source.file, *overrides, *arguments]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["configured"]["async_generation_ratio"] == 1 and output["configured"]["staleness"].keys() <= {
        "0",
        "1",
    }
    assert output["assumed"]["slowdown"] == 1.1 and output["best"] in output["candidates"]


def build_error(config: RLVRConfig, options: argparse.Namespace) -> str:
    with pytest.raises(ConfigError) as caught:
        build_cost_model(config, options, MACHINE)
    return str(caught.value)


def test_unusable_runs_are_rejected(tmp_path: Path, synchronous_folder: Path) -> None:
    config, ahead = small(tmp_path), small(tmp_path, "async_generation_ratio=1")
    nowhere, empty, file = tmp_path / "nowhere", write_run(tmp_path / "empty", config, []), tmp_path / "file"
    file.touch()
    unlike = small(tmp_path, "rollout_batch_size=32", "async_generation_ratio=1")
    good, run = synchronous_folder, asynchronous_run(tmp_path / "ahead", ahead, 3.0)
    other = asynchronous_run(tmp_path / "unlike", unlike, 3.0)
    for options, output in (
        (given(from_run=nowhere), f"--from: {nowhere} has no run.json; give the output_dir of a run"),
        (given(from_run=file), f"--from: {file} has no run.json; give the output_dir of a run"),
        (given(from_run=empty), "metrics.jsonl has no steps"),
        (given(from_run=run), "ran with async_generation_ratio 1; give a run with 0"),
        (
            given(from_run=good, overlap_run=good),
            "ran with async_generation_ratio 0; give a run with a larger one",
        ),
        (given(from_run=good, overlap_run=other), "had 128 samples per step, not 64"),
        (given(generate=1.0), "--train: is missing; give a run with --from"),
    ):
        assert output in build_error(config, options)


def test_contradicting_options_are_rejected(tmp_path: Path, synchronous_folder: Path) -> None:
    config, times = small(tmp_path), {"generate": 1.0, "train": 1.0}
    output = build_error(config, given(overlap_run=synchronous_folder, slowdown=2.0, **times))
    assert output == "--slowdown: cannot be combined with --overlap, which measures it; use one of them"
    output = build_error(config, given(response_length=(100, 2000), **times))
    assert output == "--response-length: 2000 is above response_length 1024; use at most that"


@pytest.mark.parametrize(
    ("text", "override", "output"),
    [
        (
            RLVR,
            "rollout_batch_size=1000000",
            "= 8000000 samples per batch takes too long to simulate; use at most 1000",
        ),
        (RLVR, "async_generation_ratio=1000000", "1e+06 with 512 samples per batch takes too long to simulate"),
        (RLVR, "actor_infer.device_mapping=16-99999", "device_mapping: 100000 devices takes too long to simulate; use"),
        (SFT, "seed=1", "pipeline: has no generation to simulate"),
        (AGENTIC, "seed=1", "pipeline: agentic runs, with several turns per sample, cannot be simulated"),
    ],
)
def test_what_cannot_be_simulated_is_rejected(tmp_path: Path, text: str, override: str, output: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(output)):
        check_simulated(load_config(write(tmp_path, text), [override]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train", "-1"], "argument --train: '-1' is not a number of seconds >= 0"),
        (["--generate", "0"], "argument --generate: '0' is not a number of seconds >= 1e-06"),
        (["--slowdown", "0.5"], "argument --slowdown: '0.5' is not a number >= 1"),
        (["--response-length", "300:200"], "argument --response-length: '300:200' has a mean above its maximum"),
    ],
)
def test_invalid_options_are_rejected(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "config.yaml", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "text", "output"),
    [
        ("run.json", b'{"config": {}}', "run.json is not the run.json of a reinforcement learning run: KeyError"),
        ("run.json", b"\xff\xfe", "run.json is not the run.json of a reinforcement learning run: UnicodeDecodeError"),
        ("metrics.jsonl", b'{"step": 1, "time', "metrics.jsonl cannot be read"),
        ("metrics.jsonl", b"[1]", "metrics.jsonl cannot be read"),
        ("metrics.jsonl", b'{"step": 1, "time/step": "long"}', "has steps without time/step, time/train"),
        (
            "metrics.jsonl",
            b'{"step": 1, "time/step": 3, "time/train": 1, "time/generate": 1, "rollout/response_length_mean": 0, '
            b'"rollout/response_length_max": 0}',
            "has a mean response length below 1 token",
        ),
    ],
)
def test_invalid_files_of_a_run_are_explained(tmp_path: Path, file: str, text: bytes, output: str) -> None:
    config = small(tmp_path)
    run = write_run(tmp_path / "run", config, [])
    (run / file).write_bytes(text + b"\n")
    assert output in build_error(config, given(from_run=run))

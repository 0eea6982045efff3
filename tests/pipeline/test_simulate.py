"""`roll simulate`: a run whose speed is known is written down, read back, and other runs of it are foretold."""

from __future__ import annotations

import io
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from roll.cli import main
from roll.configs.errors import ConfigError
from roll.configs.machine import Machine
from roll.configs.pipeline import RLVRConfig
from roll.pipeline.simulate.calibration import read_run
from roll.pipeline.simulate.measured import Batch, Measured, Shape, Times, doubling_batch
from roll.pipeline.simulate.model import Model
from roll.pipeline.simulate.run import Options, build_model, simulate_config
from roll.pipeline.simulate.search import Split, configured_split, possible_splits, predict
from roll.pipeline.simulate.text import print_prediction
from roll.rollout.lengths import response_lengths
from roll.rollout.simulated_engines import DecodeSpeed
from roll.rollout.simulation import Outcome, generation_seconds, simulate
from roll.trackers.files import JsonlTracker, write_run_json
from tests.configs.samples import rlvr

MACHINE = Machine(gpus=8, cores=64)
FOUR_DEVICES = ("actor_train.device_mapping=[0,1]", "actor_infer.device_mapping=[2,3]", "num_devices_per_node=4")
TRUE_SPEED = DecodeSpeed(0.01, doubling_batch=64.0)


def small(folder: Path, *overrides: str) -> RLVRConfig:
    """16 prompts of 4 samples on two training devices and two engines; no real GPU is needed to simulate one."""
    return rlvr(
        folder, *FOUR_DEVICES, "platform=cuda", "rollout_batch_size=16", "num_return_sequences_in_group=4",
        "actor_train.training_args.gradient_accumulation_steps=8",
        "actor_train.training_args.per_device_train_batch_size=1", *overrides,
    )  # fmt: skip


def truth(config: RLVRConfig, slowdown: float = 1.0) -> Model:
    """How fast the run of these tests really is."""
    times = Times(generate=0.0, train=3.0, log_probs=1.0, reward=0.2, publish=0.4, publish_pause=0.3)
    measured = Measured(replace(Shape.of_config(config), ratio=0.0), times, mean_length=200, longest=700)
    lengths = response_lengths(200, 700, 64, 1024, seed=3)
    return Model(config, measured, TRUE_SPEED, lengths, overhead=0.1, slowdown=slowdown)


def outcome_of(model: Model, ratio: float) -> Outcome:
    return simulate(model.scenario(2, 2, ratio, steps=30))


def write_run(folder: Path, config: RLVRConfig, lines: list[dict[str, float]]) -> Path:
    write_run_json(folder, config, None, versions={})
    tracker = JsonlTracker(folder / "metrics.jsonl")
    for step, line in enumerate(lines, start=1):
        tracker.log(step, line)
    tracker.close()
    return folder


def synchronous_run(folder: Path, config: RLVRConfig, steps: int = 24) -> Path:
    """What a run of `truth` in turns writes, its lengths different from step to step."""
    draw, lines, times = random.Random(0), [], truth(config).measured.times
    for _ in range(steps):
        mean = draw.uniform(150, 250)
        longest = mean * draw.uniform(2.0, 5.0)
        alone = truth(config).scenario(2, 2, 0, 1)
        alone = replace(alone, lengths=response_lengths(mean, longest, 64, 1024, seed=draw.randrange(99)))
        lines.append(
            {
                "time/generate": generation_seconds(alone),
                "rollout/response_length_mean": mean,
                "rollout/response_length_max": longest,
                "time/train": times.train * draw.uniform(0.95, 1.05),
                "time/old_log_probs": times.log_probs,
                "time/reward": times.reward,
                "time/publish": times.publish,
                "time/publish_pause": times.publish_pause,
                "time/val": 5.0,
            }
        )
        lines[-1]["time/step"] = 5.1 + sum(
            lines[-1][f"time/{name}"] for name in ("generate", "train", "old_log_probs", "reward", "publish")
        )
    return write_run(folder, config, lines)


def run_ahead(folder: Path, config: RLVRConfig, step_seconds: float) -> Path:
    line = {"time/step": step_seconds, "time/train": 3.0, "time/generate": 0.0}
    lengths = {"rollout/response_length_mean": 200.0, "rollout/response_length_max": 700.0}
    return write_run(folder, config, [line | lengths] * 6)


@pytest.fixture(scope="module")
def in_turns(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a synchronous run."""
    folder = tmp_path_factory.mktemp("in_turns")
    return synchronous_run(folder / "run", small(folder))


@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_a_synchronous_run_foretells_the_steps_of_runs_ahead(tmp_path: Path, in_turns: Path, ratio: float) -> None:
    config = small(tmp_path)
    model, _ = build_model(config, Options(from_run=in_turns), MACHINE)
    assert outcome_of(model, ratio).step_seconds == pytest.approx(
        outcome_of(truth(config), ratio).step_seconds, rel=0.08
    )


def test_the_cost_of_a_larger_batch_is_told_from_steps_of_different_lengths(in_turns: Path) -> None:
    measured = read_run(in_turns, "--from")
    told = doubling_batch(measured)
    assert told is not None and 32 <= told <= 128
    alike = replace(measured, batches=[Batch(3.0, 200, 700)] * 20)
    assert doubling_batch(alike) is None
    assert doubling_batch(replace(measured, batches=measured.batches[:5])) is None


@pytest.mark.parametrize("slowdown", [1.0, 1.4, 2.0])
def test_a_run_with_overlap_tells_what_sharing_cores_costs(tmp_path: Path, in_turns: Path, slowdown: float) -> None:
    config = small(tmp_path)
    ahead = small(tmp_path, "async_generation_ratio=1")
    real = truth(config, slowdown)
    options = Options(
        from_run=in_turns,
        overlap_run=run_ahead(tmp_path / "ahead", ahead, outcome_of(real, 1).step_seconds),
    )
    model, _ = build_model(config, options, MACHINE)
    assert outcome_of(model, 1).step_seconds == pytest.approx(outcome_of(real, 1).step_seconds, rel=0.05)
    assert outcome_of(model, 2).step_seconds == pytest.approx(outcome_of(real, 2).step_seconds, rel=0.10)


def test_slots_that_outnumber_cores_slow_both_sides_down(tmp_path: Path) -> None:
    config = small(tmp_path, "platform=cpu")
    options = Options(generate=4.0, train=3.0)
    model, notes = build_model(config, options, Machine(gpus=0, cores=2))
    assert model.slowdown == 2.0 and "2 times slower at once" in notes[-1]
    assert build_model(config, replace(options, slowdown=1.2), Machine(gpus=0, cores=2))[0].slowdown == 1.2
    assert build_model(config, options, Machine(gpus=0, cores=4))[0].slowdown == 1.0


def test_log_probs_cost_nothing_where_those_of_the_engines_are_taken(tmp_path: Path) -> None:
    def log_probs(ratio: float, *overrides: str) -> float:
        return truth(small(tmp_path, *overrides)).scenario(2, 2, ratio, 1).costs.log_probs

    assert [log_probs(0), log_probs(1)] == [1.0, 0.0]
    assert log_probs(1, "old_log_probs_source=recompute") == 1.0
    assert log_probs(1, "actor_train.pg_variant=decoupled_ppo") == 1.0
    reference = ("use_kl_loss=true", "kl_loss_coef=0.01", "reference.device_mapping=[0,1]")
    assert log_probs(1, *reference) == 0.5


def test_splits_are_those_that_parallel_sizes_and_batches_allow(tmp_path: Path) -> None:
    config = small(tmp_path)
    assert configured_split(config) == Split(2, 2)
    assert possible_splits(config, 8) == [Split(4, 4), Split(2, 6)], "8 samples do not divide by 3"
    assert possible_splits(small(tmp_path, "actor_infer.num_gpus_per_worker=2"), 4) == [Split(2, 2)]


def test_more_devices_go_where_the_time_is(tmp_path: Path) -> None:
    eight = ("actor_train.device_mapping=0-3", "actor_infer.device_mapping=4-7", "num_devices_per_node=8")
    config = small(tmp_path, *eight)
    slow_generation = build_model(config, Options(generate=12.0, train=3.0, doubling_batch=1.0), MACHINE)[0]
    slow_training = build_model(config, Options(generate=3.0, train=12.0, doubling_batch=1.0), MACHINE)[0]
    assert predict(slow_generation).best.split.infer_devices > 4
    best = predict(slow_training).best.split
    assert best.shared, "no split gives training 7 of 8 devices here, so taking turns is faster"


def test_the_prediction_says_what_is_configured_and_what_is_best(tmp_path: Path) -> None:
    config = small(tmp_path)
    model, notes = build_model(config, Options(generate=4.0, train=3.0, publish=0.2), MACHINE)
    prediction = predict(model)
    assert prediction.configured.split == Split(2, 2) and prediction.configured.ratio == 0
    assert prediction.configured.outcome.step_seconds == pytest.approx(7.2)
    assert prediction.best.ratio > 0
    shown = io.StringIO()
    print_prediction(prediction, model, notes, "small", shown)
    for part in ("small: simulated", "trainer idle", "as configured", "4 shared", "faster than configured", "0: 100%"):
        assert part in shown.getvalue()
    assert "and T = 1.5 s to learn from: in turns G + T" in shown.getvalue()
    assert "Split 2 : 2 at ratio 0: 4 s and 3 s, one beside the other at best 4 s" in shown.getvalue()
    assert "all responses are taken to be 1024 tokens" in shown.getvalue()


def test_the_command_prints_json(tmp_path: Path, in_turns: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small(tmp_path)
    overrides = ["rollout_batch_size=16", "num_return_sequences_in_group=4", *FOUR_DEVICES, "platform=cuda"]
    overrides += ["actor_train.training_args.gradient_accumulation_steps=8", "async_generation_ratio=1"]
    arguments = ["--from", str(in_turns), "--slowdown", "1.1", "--json"]
    assert main(["simulate", config.source.file, *overrides, *arguments]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["configured"]["async_generation_ratio"] == 1 and said["configured"]["staleness"].keys() <= {"0", "1"}
    assert said["assumed"]["slowdown"] == 1.1 and said["best"] in said["candidates"]


def refused(config: RLVRConfig, options: Options) -> str:
    with pytest.raises(ConfigError) as caught:
        build_model(config, options, MACHINE)
    return str(caught.value)


def test_runs_that_cannot_be_used_are_refused_by_name(tmp_path: Path, in_turns: Path) -> None:
    config, ahead = small(tmp_path), small(tmp_path, "async_generation_ratio=1")
    nowhere, empty, broken = tmp_path / "nowhere", write_run(tmp_path / "empty", config, []), tmp_path / "broken"
    broken.mkdir()
    (broken / "run.json").write_text('{"config": {}}')
    unlike = small(tmp_path, "rollout_batch_size=32", "async_generation_ratio=1")
    good, run = in_turns, run_ahead(tmp_path / "ahead", ahead, 3.0)
    assert (
        refused(config, Options(from_run=nowhere)) == f"--from: {nowhere} has no run.json; give the output_dir of a run"
    )
    assert "metrics.jsonl holds no step" in refused(config, Options(from_run=empty))
    assert "run.json is not the record of an RL run: KeyError" in refused(config, Options(from_run=broken))
    assert "ran with async_generation_ratio 1; give a run with 0" in refused(config, Options(from_run=run))
    assert "ran with async_generation_ratio 0; give a run with more" in refused(
        config, Options(from_run=good, overlap_run=good)
    )
    other = run_ahead(tmp_path / "unlike", unlike, 3.0)
    assert "had 128 samples per step, not 64" in refused(config, Options(from_run=good, overlap_run=other))
    assert refused(config, Options(generate=1.0)).startswith("--train: is not given; name a finished run with --from")


def test_options_that_contradict_are_refused(tmp_path: Path, in_turns: Path) -> None:
    config, times = small(tmp_path), {"generate": 1.0, "train": 1.0}
    said = refused(config, Options(overlap_run=in_turns, slowdown=2.0, **times))
    assert said == "--slowdown: is what --overlap takes from a run; keep one"
    said = refused(config, Options(response_length=(100, 2000), **times))
    assert said == "--response-length: 2000 is above response_length 1024; give at most that"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout_batch_size=1000000", "= 4000000 samples of a batch take too long to simulate; use at most 100000"),
        (
            "async_generation_ratio=1000000",
            "async_generation_ratio: 1e+06 batches ahead of 64 samples take too long to",
        ),
        ("actor_infer.device_mapping=2-99999", "device_mapping: 100000 devices take too long to simulate; use at most"),
    ],
)
def test_what_would_never_end_is_refused(tmp_path: Path, override: str, said: str) -> None:
    assert said in refused(small(tmp_path, override), Options(generate=1.0, train=1.0))


def test_only_pipelines_that_generate_are_simulated(tmp_path: Path) -> None:
    from tests.configs.samples import AGENTIC, SFT, write

    with pytest.raises(ConfigError, match="pipeline: nothing is generated in this pipeline"):
        simulate_config(write(tmp_path, SFT, "sft.yaml"), [], Options(generate=1.0, train=1.0))
    with pytest.raises(ConfigError, match="pipeline: responses of several turns are not simulated"):
        simulate_config(write(tmp_path, AGENTIC, "agentic.yaml"), [], Options(generate=1.0, train=1.0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train", "-1"], "argument --train: '-1' is not seconds, a number of at least 0"),
        (["--generate", "0"], "argument --generate: '0' is not seconds, a number of at least 1e-06"),
        (["--slowdown", "0.5"], "argument --slowdown: '0.5' is not a number of at least 1"),
        (["--response-length", "300:200"], "argument --response-length: '300:200' has a mean beyond its longest"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "config.yaml", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("run.json", b"\xff\xfe", "run.json is not the record of an RL run: UnicodeDecodeError"),
        ("metrics.jsonl", b'{"step": 1, "time', "metrics.jsonl does not hold the steps of a run"),
        ("metrics.jsonl", b"[1]", "metrics.jsonl does not hold the steps of a run"),
        ("metrics.jsonl", b'{"step": 1, "time/step": "long"}', "has steps without time/step, time/train"),
        (
            "metrics.jsonl",
            b'{"step": 1, "time/step": 3, "time/train": 1, "time/generate": 1, "rollout/response_length_mean": 0, '
            b'"rollout/response_length_max": 0}',
            "has responses of less than 1 token",
        ),
    ],
)
def test_a_broken_record_is_explained(tmp_path: Path, file: str, text: bytes, said: str) -> None:
    config = small(tmp_path)
    run = write_run(tmp_path / "run", config, [])
    (run / file).write_bytes(text + b"\n")
    assert said in refused(config, Options(from_run=run))


def test_a_file_is_no_run(tmp_path: Path) -> None:
    config, file = small(tmp_path), tmp_path / "file"
    file.touch()
    assert "has no run.json; give the output_dir of a run" in refused(config, Options(from_run=file))

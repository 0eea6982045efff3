"""Asynchronous runs on real engines: bounded staleness, every in-flight policy, restarts, and faults."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from runs import (
    ROOT,
    assert_nothing_is_left,
    finish,
    inputs_in,
    lines,
    processes_of,
    recipe,
    start,
    wait_for_line,
)

from roll.algorithms.aggregation import LossScale
from roll.algorithms.losses import LOSSES
from roll.algorithms.policy_config import PolicyLossConfig
from roll.pipeline.rollout_dump import read_samples

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

STEPS = 6


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> dict[str, Any]:
    """The part of a recipe that says where model and problems are."""
    return inputs_in(tmp_path_factory.mktemp("problems"), tiny_model_dir)


def asynchronous(inputs: dict[str, Any], folder: Path, ratio: float, **keys: Any) -> Path:
    """A run in which responses take longer than training, so that publishes meet running requests."""
    return recipe(
        inputs,
        folder,
        **{
            "async_generation_ratio": ratio,
            "deterministic": False,
            "max_steps": STEPS,
            "save_steps": 3,
            "eval_steps": 4,
            "response_length": 40,
            "verify_weights": "always",
        }
        | keys,
    )


def check_laws(steps: list[dict[str, Any]], ratio: float) -> None:
    """What every asynchronous run must show at every step."""
    for line in steps:
        accounted = sum(
            value
            for name, value in line.items()
            if name in ("ledger/consumed", "ledger/buffered", "ledger/in_flight") or name.startswith("ledger/dropped_")
        )
        assert accounted == line["ledger/submitted"]
        assert line["ledger/submitted"] <= math.floor((line["step"] + ratio) * 4)  # taken at version step - 1
        assert line["ledger/consumed"] == 4 * line["step"]
        assert line["staleness/token_max"] <= line["staleness/max"] <= math.ceil(ratio)
        assert line["dropped_stale_samples"] == 0


@pytest.mark.parametrize(
    ("ratio", "policy", "variant"),
    [(0.5, "drain", "tis"), (1, "retract", "ppo"), (2, "in_place", "topr"), (3, "abort_resume", "cispo")],
)
def test_staleness_is_bounded_and_every_sample_accounted_for(inputs, tmp_path, ratio, policy, variant):
    config = asynchronous(inputs, tmp_path, ratio, in_flight_policy=policy, actor_train__pg_variant=variant)
    code, output = finish(start(config))
    assert code == 0, output
    steps = lines(tmp_path)[1:]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    check_laws(steps, ratio)
    assert steps[0]["staleness/max"] == 0
    assert max(line["staleness/max"] for line in steps) > 0, "nothing ran ahead"
    assert any(line["actor/ratio_deviation_max"] > 1e-3 for line in steps[1:]), "nothing was corrected"
    assert not any(line["correction/inert"] for line in steps)
    assert_nothing_is_left(tmp_path)


VARIANTS = ("vanilla", "ppo", "tis", "topr", "cispo", "kimi15")


def test_on_samples_of_a_real_run_every_variant_gives_a_gradient_of_its_own(inputs, tmp_path):
    config = asynchronous(
        inputs,
        tmp_path,
        2,
        eval_steps=0,
        rollout_dump_dir=str(tmp_path / "samples"),
        old_log_probs_source="recompute",
        actor_train__pg_variant="tis",
        actor_train__training_args__learning_rate=5e-3,
    )
    code, output = finish(start(config))
    assert code == 0, output
    rows = [row for row in read_samples(tmp_path / "samples", STEPS) if min(row["weight_version"]) < STEPS - 1]
    assert rows, "the last batch has no stale sample"
    gradients = {variant: gradient_of(rows, variant) for variant in VARIANTS}
    for one, other in itertools.combinations(VARIANTS, 2):
        difference = (gradients[one] - gradients[other]).norm() / gradients["vanilla"].norm()
        assert difference > 1e-3, f"{one} and {other} differ by {difference:.2g} of vanilla's gradient only"


def gradient_of(rows: list[dict[str, Any]], variant: str) -> torch.Tensor:
    """The gradient in the current log-probs [b, T] of stale samples, the policy being that before their update."""

    def padded(name: str) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([torch.tensor(row[name]) for row in rows], batch_first=True)

    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row["response_ids"])) for row in rows], batch_first=True)
    log_probs = padded("old_log_probs").requires_grad_()
    scores = torch.tensor([row["score"] for row in rows])
    micro = {
        "response_mask": mask.bool(),
        "old_log_probs": padded("old_log_probs"),
        "behavior_log_probs": padded("behavior_log_probs"),
        "advantages": padded("advantages"),
        "scores": scores - scores.median(),  # topr asks which samples were good
    }
    settings = PolicyLossConfig(pg_variant=variant, pg_ratio_base="behavior", loss_agg_mode="token-mean")
    loss, _ = LOSSES["policy"](log_probs, None, micro, LossScale(float(mask.sum()), float(len(rows))), settings)
    loss.backward()
    assert log_probs.grad is not None
    return log_probs.grad


@pytest.mark.parametrize("name", ["one_step_off", "rlvr_async", "fully_async", "offpolicy_buffer"])
def test_the_recipes_of_four_systems_run(inputs, tmp_path, name):
    data = json.dumps(inputs["actor_train"]["data_args"]["file_name"])
    validation = json.dumps(inputs["validation"]["data_args"]["file_name"])
    run = start(
        ROOT / "examples" / name / "rlvr_config.yaml",
        f"pretrain={inputs['pretrain']}",
        f"output_dir={tmp_path}/run",
        f"actor_train.data_args.file_name={data}",
        f"validation.data_args.file_name={validation}",
        "max_steps=4",
    )
    code, output = finish(run)
    assert code == 0, output
    steps = lines(tmp_path)
    assert steps[-1]["step"] == steps[-1]["global_steps"] == 4
    assert steps[-1]["processed_samples"] == 4 * 16 * 8
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    ratio = record["config"]["async_generation_ratio"]
    assert ratio > 0 and record["summary"]["advice"]
    assert max(line.get("staleness/max", 0) for line in steps) <= math.ceil(ratio)


def test_ratio_0_through_the_rollouter_is_synchronous_training_bit_for_bit(inputs, tmp_path):
    written = {}
    for kind in ("inline", "actor"):
        code, output = finish(start(recipe(inputs, tmp_path / kind, async_training__rollouter=kind)))
        assert code == 0, output
        written[kind] = lines(tmp_path / kind)
    assert written["actor"] == written["inline"]


def test_a_killed_run_goes_on_with_what_was_buffered_and_running(inputs, tmp_path):
    config = asynchronous(inputs, tmp_path, 2, save_steps=1, eval_steps=0)
    first = start(config)
    wait_for_line(tmp_path, 3)
    os.kill(first.pid, signal.SIGKILL)
    finish(first)
    code, output = finish(start(config, "resume_from_checkpoint=true"))
    assert code == 0, output
    steps = lines(tmp_path)
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    check_laws(steps, 2)
    assert steps[-1]["ledger/submitted"] == 4 * STEPS, "a prompt was lost or drawn twice"
    assert steps[-1]["ledger/in_flight"] == steps[-1]["ledger/buffered"] == 0


def test_dull_groups_are_replaced_within_the_bound(inputs, tmp_path):
    rule = {"type": "std_filter", "filter_args": {"std_threshold": 0.4}}
    config = asynchronous(
        inputs, tmp_path, 1, eval_steps=0, max_resample_factor=100, rewards__math_rule__query_filter_config=rule
    )
    code, output = finish(start(config))
    assert code == 0, output
    steps = lines(tmp_path)
    assert steps[-1]["ledger/dropped_filtered_no_spread"] > 0
    for line in steps:
        dropped = line["ledger/dropped_filtered_no_spread"]
        assert line["ledger/submitted"] - dropped <= math.floor((line["step"] + 1) * 4)
        assert line["ledger/consumed"] == 4 * line["step"] and line["staleness/max"] <= 1


def test_a_filter_that_keeps_nothing_ends_the_run_by_its_name(inputs, tmp_path):
    rule = {"type": "mean_filter", "filter_args": {"threshold_down": 2.0}}
    code, output = finish(start(asynchronous(inputs, tmp_path, 1, rewards__math_rule__query_filter_config=rule)))
    assert code == 1
    said = " ".join(output.split())
    assert "rewards.math_rule.query_filter_config: filtered_mean_low starves the batch" in said
    assert_nothing_is_left(tmp_path)


def test_requests_that_never_end_are_dropped_and_the_cause_is_told(inputs, tmp_path):
    config = asynchronous(
        inputs, tmp_path, 1, eval_steps=0, response_length=2000, actor_infer__generation_timeout_s=0.5
    )
    code, output = finish(start(config))
    assert code == 1
    said = " ".join(output.split())
    assert "generation_failed" in said and "aborted after 0.5 s (generation_timeout_s)" in said
    assert_nothing_is_left(tmp_path)


def test_an_engine_that_dies_ends_the_run_with_its_name(inputs, tmp_path):
    run = start(asynchronous(inputs, tmp_path, 2, max_steps=1000, eval_steps=0, save_checkpoint=False, save_steps=0))
    wait_for_line(tmp_path, 2)
    schedulers = [process for process in psutil.process_iter() if "sglang::scheduler" in process.name()]
    mine = [process for process in schedulers if process in processes_of(tmp_path)]
    assert len(mine) == 1
    mine[0].kill()
    code, output = finish(run)
    assert code == 1
    assert "actor_infer[0]" in output and "died" in output
    assert_nothing_is_left(tmp_path)


def test_an_interrupted_run_leaves_nothing_behind(inputs, tmp_path):
    run = start(asynchronous(inputs, tmp_path, 2, max_steps=1000, eval_steps=0))
    wait_for_line(tmp_path, 2)
    run.send_signal(signal.SIGTERM)
    code, output = finish(run)
    assert code == 130 and "go on from the last checkpoint" in output
    assert json.loads((tmp_path / "run" / "run.json").read_text())["summary"]["status"] == "failed"
    assert_nothing_is_left(tmp_path)

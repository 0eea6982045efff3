"""The table of metrics, its aliases, and the page generated from it."""

from __future__ import annotations

from pathlib import Path

from roll.algorithms import correction
from roll.distributed.weights.report import UpdateReport
from roll.rollout.ledger import Ledger
from roll.rollout.metrics import rollout_metrics
from roll.rollout.types import GenerateResult, Group, Trajectory
from roll.trackers.metrics import ALIASES, CORRECTION, SECTIONS, markdown, undocumented, with_aliases

NAMES = [metric.name for metrics in SECTIONS.values() for metric in metrics]


def test_no_metric_is_described_twice() -> None:
    assert len(NAMES) == len(set(NAMES)) and not set(NAMES) & set(ALIASES)


def test_documented_names_and_families_are_known() -> None:
    assert undocumented(["time/step", "val/addition/score", "ledger/dropped_timeout", "memory/actor_train_peak"]) == []


def test_tags_and_metrics_of_rewards_may_have_slashes() -> None:
    assert undocumented(["val/openai/gsm8k/score", "reward/openai/gsm8k/acc", "reward/math/right/acc"]) == []


def test_an_unknown_name_is_found() -> None:
    assert undocumented(["time/step", "time/stp", "ledger/a/b/c"]) == ["time/stp", "ledger/a/b/c"]


def test_every_metric_of_the_correction_is_described() -> None:
    reported = {
        value for value in vars(correction).values() if isinstance(value, str) and value.startswith("correction/")
    }
    assert {metric.name for metric in CORRECTION} == reported - {correction.WEIGHT_SQUARE_MEAN}


def test_an_alias_has_the_value_of_its_metric() -> None:
    assert set(ALIASES.values()) <= set(NAMES)
    assert with_aliases({"queue/size": 3.0, "time/step": 1.0}) == {
        "queue_size": 3.0,
        "queue/size": 3.0,
        "time/step": 1.0,
    }


OTHER_TRAINERS = """
global_steps processed_samples current_param_version param_sync_count total_generated_samples dropped_stale_samples
generation_errors param_sync_requests avg_sample_age max_sample_age stale_samples_ratio queue_size total_produced
total_consumed dropped_samples sync_failures
""".split()


def test_the_names_of_other_asynchronous_trainers_are_written() -> None:
    written = Ledger().metrics() | Ledger().sample_metrics(1) | UpdateReport(0, 0.0, 0.0, 0, 0.0, True, 1, 0).metrics()
    group = Group(0, "math", 0, "", [Trajectory.of_response([1], GenerateResult("r", [2], [-1.0], [0], "stop"), "")])
    written |= rollout_metrics([group], 0, 3) | {"step": 1.0, "version": 1.0}
    assert set(OTHER_TRAINERS) <= set(with_aliases(written))


def test_the_page_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert page.read_text() == markdown(), "run `make docs`"

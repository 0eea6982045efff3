"""All trackers of a run together."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from roll.configs.pipeline import RLVRConfig
from roll.configs.trackers import TRACKER_OPTIONS
from roll.trackers import Tracker, TrackerGroup, make_trackers
from roll.trackers.base import TRACKERS, register_tracker
from roll.trackers.files import free_bytes, read_metrics


def test_run_json_is_written_at_the_start_and_completed_at_the_end(config: RLVRConfig) -> None:
    trackers = make_trackers(config, plan={"roles": ["actor_train"]})
    path = Path(config.output_dir) / "run.json"
    begun = json.loads(path.read_text())
    assert begun["config"]["exp_name"] == "trial" and begun["plan"] == {"roles": ["actor_train"]}
    assert path.stat().st_mode & 0o777 == 0o600 and begun["origin"]["start"] > 1e9
    assert begun["summary"] is None and "torch" in begun["versions"] and "python" in begun["versions"]
    trackers.close({"seconds": 1.5})
    assert json.loads(path.read_text())["summary"] == {"seconds": 1.5}
    assert [file.name for file in path.parent.iterdir()] == ["run.json"]


def test_on_a_full_disk_run_json_gets_its_summary(config: RLVRConfig, small_disk: Path) -> None:
    trackers = make_trackers(replace(config, output_dir=str(small_disk)))
    (small_disk / "filler").write_bytes(bytes(free_bytes(small_disk) or 0))
    summary = {"status": "failed", "validation": {str(step): {"val/score": 0.5} for step in range(100)}}
    trackers.close(summary)
    path = small_disk / "run.json"
    assert json.loads(path.read_text())["summary"] == summary
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_tracker_that_cannot_be_closed_does_not_keep_the_summary_from_run_json(config: RLVRConfig) -> None:
    class Broken(Tracker):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            """Nothing is logged."""

        def close(self) -> None:
            raise OSError("no space left")

    trackers = TrackerGroup(config, [Broken()])
    with pytest.raises(OSError, match="no space left"):
        trackers.close({"status": "failed"})
    assert json.loads((Path(config.output_dir) / "run.json").read_text())["summary"] == {"status": "failed"}


def test_metrics_jsonl_has_every_step_for_any_logging_steps(config: RLVRConfig, capsys) -> None:
    trackers = make_trackers(replace(config, logging_steps=3, track_with=["stdout"]))
    for step in range(1, 5):
        trackers.log(step, {"step": step, "time/step": 1.0})
    trackers.close()
    assert [line["step"] for line in read_metrics(Path(config.output_dir) / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["3/4", "4/4"]


def test_a_metric_without_a_description_is_warned_about_once(config: RLVRConfig, caplog) -> None:
    trackers = make_trackers(config)
    with caplog.at_level(logging.WARNING):
        trackers.log(1, {"actor/los": 1.0})
        trackers.log(2, {"actor/los": 1.0})
    assert [record.getMessage() for record in caplog.records] == [
        "metric 'actor/los' is not described in roll/trackers/metrics.py"
    ]


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="'stdout' is registered already"):
        register_tracker("stdout")(lambda config, folder, options: None)


def test_the_registered_trackers_are_those_of_the_configuration() -> None:
    assert set(TRACKERS) == set(TRACKER_OPTIONS)

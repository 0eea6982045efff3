"""Trackers in a process of their own: what reaches them, and that nothing they do holds up a run."""

from __future__ import annotations

import json
import logging
import socket
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from roll.configs.pipeline import RLVRConfig
from roll.trackers import make_trackers
from roll.trackers.external import ExternalTracker
from roll.trackers.external_process import leaf_values, without_empty
from roll.trackers.files import read_metrics, without_secrets
from tests.processes import PATIENCE_S

FAULTY_WANDB = """
import os, time
class Run:
    id = "17"
    def log(self, metrics, step):
        if os.environ["FAULT"] == "log":
            raise OSError("the disk of wandb is full")
        if os.environ["FAULT"] == "exit":
            os._exit(3)
        with open(os.environ["SEEN"], "a") as file:
            print(step, sorted(metrics), file=file)
    def finish(self):
        while os.environ["FAULT"] == "finish":
            time.sleep(1)
def init(**options):
    while os.environ["FAULT"] == "init":
        time.sleep(1)
    if os.environ["FAULT"] == "server" and options["mode"] != "offline":
        raise ConnectionError("no answer\\nfor a long time")
    return Run()
"""
"""Stands in for the package to inject a fault; the real packages are tested below."""


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File of the steps that the stand-in received."""
    (tmp_path / "wandb.py").write_text(FAULTY_WANDB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    return tmp_path / "seen"


@pytest.mark.parametrize(
    ("fault", "warning", "steps"),
    [
        ("none", None, 2),
        ("init", "did not end within 0.3 s of the run's end; 2 of 2 steps were not accepted", 0),
        ("server", "ConnectionError: no answer; it was started again offline and keeps every step on disk;", 2),
        ("log", "OSError: the disk of wandb is full", 0),
        ("exit", "its process ended early", 0),
        ("finish", "did not end within 0.3 s of the run's end; all steps were accepted", 2),
    ],
)
def test_a_fault_of_a_tracker_is_reported_once_and_delays_nothing(
    config: RLVRConfig, seen: Path, monkeypatch: pytest.MonkeyPatch, caplog, fault: str, warning: str | None, steps: int
) -> None:
    config = replace(config, system_envs={"FAULT": fault})
    is_stuck = fault in ("init", "finish")
    tracker = ExternalTracker("wandb", {}, config, Path(config.output_dir), close_s=0.3 if is_stuck else PATIENCE_S)
    with caplog.at_level(logging.WARNING):
        tracker.log(1, {"step": 1, "actor/loss": 0.5, "actor/lr": float("nan")})
        if fault == "finish":
            _wait_for(lambda: seen.exists())
        start = time.process_time()
        tracker.log(2, {"step": 2, "actor/loss": 0.25, "actor/lr": 1.0})
        assert time.process_time() - start < 0.1
        if fault == "finish":
            _wait_for(lambda: tracker._accepted == 2)
        process = tracker._process
        tracker.close()
    assert process is not None and not psutil.pid_exists(process.pid)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (warning is not None)
    assert warning is None or warning in messages[0]
    assert warning is None or "metrics.jsonl has every step (details: " in messages[0]
    lines = seen.read_text().splitlines() if seen.exists() else []
    assert lines == ["1 ['actor/loss']", "2 ['actor/loss', 'actor/lr']"][:steps]


def _wait_for(condition: Any) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_step_that_is_accepted_late_is_reported_while_the_run_goes_on(
    config: RLVRConfig, seen: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    monkeypatch.setenv("FAULT", "init")
    tracker = ExternalTracker("wandb", {}, config, Path(config.output_dir), close_s=0.1, late_s=0.0)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            time.sleep(0.01)
            tracker.log(step, {"actor/loss": 0.5})
        tracker.close()
    (record,) = caplog.records
    assert "tracker wandb: it has not accepted step 1 within 0 s; the run continues" in record.getMessage()


def test_keys_are_not_shown(config: RLVRConfig) -> None:
    secret = {"swanlab": {"login_kwargs": {"api_key": "abc"}}, "wandb": {"api_key": None, "project": "a"}}
    shown = without_secrets(
        replace(
            config,
            tracker_kwargs=secret,
            system_envs={"WANDB_API_KEY": "abc", "MY_TOKEN": "abc", "db_passwd": "x", "OMP_NUM_THREADS": "2"},
        )
    )
    assert shown["tracker_kwargs"]["swanlab"]["login_kwargs"]["api_key"] == "***"
    assert shown["tracker_kwargs"]["wandb"] == {"api_key": None, "project": "a"}
    hidden = {"WANDB_API_KEY": "***", "MY_TOKEN": "***", "db_passwd": "***"}
    assert shown["system_envs"] == hidden | {"OMP_NUM_THREADS": "2"}
    trackers = make_trackers(replace(config, system_envs={"WANDB_API_KEY": "abc"}))
    trackers.close()
    written = Path(config.output_dir) / "run.json"
    assert "abc" not in written.read_text() and written.stat().st_mode & 0o777 == 0o600


def test_helpers_of_the_process() -> None:
    assert without_empty({"a": None, "b": {}, "c": [], "d": 0, "e": "x"}) == {"d": 0, "e": "x"}
    assert dict(leaf_values({"a": {"b": 1, "c": {"d": [2]}}, "e": 3})) == {"a.b": 1, "a.c.d": [2], "e": 3}


TRACKIO_POINTS = "select run_name, step, metrics from metrics order by id"

OFFLINE = {
    "wandb": ({"mode": "offline", "project": "sums", "tags": ["a"], "notes": "short"}, "wandb/offline-run-*/*.wandb"),
    "swanlab": ({"mode": "offline", "project": "sums", "experiment_name": "one"}, "swanlab/run-*/*.swanlab"),
    "mlflow": ({"experiment_name": "sums", "tags": {"a": "b"}}, "mlflow/*/*/metrics/actor/loss"),
    "trackio": ({"project": "sums"}, "trackio/sums.db"),
}


@pytest.mark.integration
@pytest.mark.parametrize("name", OFFLINE)
def test_the_real_packages_write_their_files_without_a_network_and_a_resumed_run_continues(
    config: RLVRConfig, name: str, caplog
) -> None:
    pytest.importorskip(name)
    options, pattern = OFFLINE[name]
    output_dir = Path(config.output_dir)
    for steps in ((1, 2), (2, 3)):
        tracker = ExternalTracker(name, options, config, output_dir, close_s=120.0)
        if steps[0] > 1:
            tracker.resume(1)
        for step in steps:
            tracker.log(step, {"step": step, "actor/loss": 0.5 / step, "actor/lr": float("nan")})
        tracker.close()
    log = (output_dir / "logs" / f"{name}.log").read_text()
    assert not caplog.records, log
    files = list(output_dir.glob(pattern))
    assert files, log
    if name == "mlflow":
        (curve,) = files
        points = [line.split() for line in curve.read_text().splitlines()]
        assert [(float(value), int(step)) for _, value, step in points] == [(0.5, 1), (0.25, 2), (0.25, 2), (1 / 6, 3)]
        assert (curve.parents[2] / "params" / "exp_name").read_text() == "trial"
    elif name == "trackio":
        with sqlite3.connect(files[0]) as database:
            points = [(run, step, json.loads(values)) for run, step, values in database.execute(TRACKIO_POINTS)]
        assert points == [("trial", step, {"actor/loss": 0.5 / step}) for step in (1, 2, 2, 3)]
    else:
        run_id = (output_dir / f"{name}_run_id").read_text()
        assert all(file.name == f"run-{run_id}.{name}" for file in files)


@pytest.fixture
def silent_server() -> Iterator[str]:
    """Address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.integration
@pytest.mark.parametrize("answer", ["never", "refused"])
def test_an_unreachable_server_loses_no_step_and_delays_no_end(
    config: RLVRConfig, silent_server: str, answer: str, caplog
) -> None:
    """All three at once, as a run would have them."""
    url = silent_server if answer == "never" else "http://127.0.0.1:9"
    servers: dict[str, dict[str, Any]] = {
        "wandb": {"api_key": "0" * 40, "settings": {"base_url": url}},
        "swanlab": {"login_kwargs": {"api_key": "0" * 21, "host": url}},
        "mlflow": {"tracking_uri": url},
    }
    trackers = make_trackers(replace(config, track_with=list(servers), tracker_kwargs=servers))
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            trackers.log(step, {"step": step, "actor/loss": 0.5})
        trackers.close()
    assert len([record for record in caplog.records if record.getMessage().startswith("tracker ")]) == 3
    lines = read_metrics(Path(config.output_dir) / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert "0" * 21 not in json.dumps(json.loads((Path(config.output_dir) / "run.json").read_text()))

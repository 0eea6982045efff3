"""Samples and spans in trackers: read from the files of the run by the tracker's process, with the real packages."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from roll.configs.pipeline import RLVRConfig
from roll.report.findings import sample_weight
from roll.trackers.external import ExternalTracker
from roll.trackers.external_process import MOST_CHARACTERS, MOST_SAMPLES, SampleFiles, columns_and_data
from roll.trackers.recording import Recording
from roll.trackers.sample_files import read_samples, write_samples

WORDS = ["two", "plus", "is", "four", "five"]


@pytest.fixture
def run_config(config: RLVRConfig, tmp_path: Path) -> RLVRConfig:
    """A run whose steps 1 to 4 kept samples, of which those of steps 1, 2 and 4 are shown."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="is"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    model, folder = tmp_path / "model", tmp_path / "samples"
    model.mkdir()
    folder.mkdir()
    tokenizer.save(str(model / "tokenizer.json"))
    config = replace(config, rollout_dump_dir=str(folder), rollout_dump_every=2)
    config.actor_train.model_args.model_name_or_path = str(model)
    for step in (1, 2, 3, 4):
        write_samples(folder, step, columns(), {})
    return config


def columns() -> dict[str, list[Any]]:
    """Group 0 moved little, group 1 most, group 2 nothing."""
    return {
        "group": [0, 0, 1, 1, 2],
        "score": [1.0, 0.0, 1.0, 0.0, 1.0],
        "tag": ["sums"] * 5,
        "stop": ["stop", "length", "stop", "length", "stop"],
        "prompt_ids": [[0, 1, 0]] * 5,
        "response_ids": [[3], [4], [2, 3], [2, 4], [3]],
        "advantages": [[0.5], [-0.5], [1.0, 1.0], [-1.0, -1.0], [0.0]],
        "train_log_probs": [[-0.1], [-0.1], [-2.0, -0.5], [-2.0, -1.0], [-1.0]],
    }


def sample_files(config: RLVRConfig, every: int = 2, tokenizer: bool = True) -> SampleFiles:
    file = f"{config.actor_train.model_args.model_name_or_path}/tokenizer.json"
    return SampleFiles(str(config.rollout_dump_dir), every, file if tokenizer else None)


def test_the_samples_of_a_step_are_those_that_moved_the_weights_most(run_config: RLVRConfig) -> None:
    table = columns_and_data(list(sample_files(run_config).due(0, 1)))
    assert table["columns"] == ["prompt", "response", "step", "share", "score", "advantage", "tag", "stop"]
    assert [row[:2] for row in table["data"]] == [
        ["two plus two", response] for response in ("is five", "is four", "four", "five", "four")
    ]
    weights = [sample_weight(row) for row in read_samples(Path(str(run_config.rollout_dump_dir)), 1)]
    shares = [(weights[2] + weights[3]) / sum(weights)] * 2 + [(weights[0] + weights[1]) / sum(weights)] * 2 + [0.0]
    assert [row[3] for row in table["data"]] == pytest.approx(shares)
    assert [row[2] for row in table["data"]] == [1] * 5
    assert table["data"][0][4:] == [0.0, -1.0, "sums", "length"]


def test_steps_between_two_that_are_logged_are_not_left_out(run_config: RLVRConfig) -> None:
    files = sample_files(run_config)
    shown = {(after, step): [row.facts["step"] for row in files.due(after, step)][::5] for after, step in SPANS}
    assert shown == SPANS


def test_samples_of_several_policies_are_shown(run_config: RLVRConfig) -> None:
    for policy in ("code", "math"):
        write_samples(Path(str(run_config.rollout_dump_dir)) / policy, 6, columns(), {})
    assert len([*sample_files(run_config).due(5, 6)]) == 2 * 5


SPANS = {(0, 1): [1], (1, 2): [2], (2, 3): [], (0, 4): [1, 2, 4], (2, 6): [4], (4, 4): []}
"""Steps after the first number and up to the second, and those of them that are shown."""


def test_what_is_too_much_is_cut_and_what_is_not_known_left_out(run_config: RLVRConfig, tmp_path: Path) -> None:
    turns = [{"observation": "left or right?", "text": "left"}, {"observation": "wall", "text": "x" * 9999}]
    row: dict[str, list[Any]] = {name: [values[2]] * 20 for name, values in columns().items()}
    del row["tag"], row["train_log_probs"]
    write_samples(tmp_path / "samples", 1, row | {"episode": [{"turns": turns}] * 20}, {})
    rows = list(sample_files(run_config).due(0, 1))
    assert len(rows) == MOST_SAMPLES
    assert [message["role"] for message in rows[0].messages] == ["user", "assistant"] * 2
    assert rows[0].messages[1]["content"] == "left"
    assert rows[0].messages[3]["content"] == "x" * MOST_CHARACTERS
    assert rows[0].facts["tag"] is None and rows[0].facts["share"] == pytest.approx(1.0)
    (first, *_) = sample_files(run_config, tokenizer=False).due(1, 2)
    assert first.messages[1]["content"] == "2 4"


SHOWN = {
    "wandb": ({"mode": "offline"}, "wandb/offline-run-*/files/media/table/samples_*.table.json", 2),
    "swanlab": ({"mode": "offline"}, "swanlab/run-*/media/text/*.txt", 8),
    "mlflow": ({}, "mlflow/*/*/artifacts/samples/step-*.json", 2),
    "trackio": ({}, "trackio/roll.db", 10),
}
"""Options of each tracker that shows samples, the files that it keeps them in, and how many texts two steps give."""


@pytest.mark.integration
@pytest.mark.parametrize("samples", [True, False])
@pytest.mark.parametrize("name", SHOWN)
def test_the_real_packages_show_samples_unless_told_not_to(
    run_config: RLVRConfig, name: str, samples: bool, caplog
) -> None:
    pytest.importorskip(name)
    options, pattern, count = SHOWN[name]
    output_dir = Path(run_config.output_dir)
    tracker = ExternalTracker(name, {**options, "samples": samples}, run_config, output_dir, close_s=120.0)
    for step in (1, 2, 3):
        tracker.log(step, {"step": step, "actor/loss": 0.5})
    tracker.close()
    assert not caplog.records, (output_dir / "logs" / f"{name}.log").read_text()
    found = texts(name, sorted(output_dir.glob(pattern)))
    assert len(found) == (count if samples else 0), found
    assert all("four" in text or "five" in text for text in found)


def texts(name: str, files: list[Path]) -> list[str]:
    """What a tracker keeps of samples: a text of each step, or of each sample."""
    if name == "trackio":
        with sqlite3.connect(files[0]) as database:
            return [text.decode() for (text,) in database.execute("select messages from traces")]
    return [file.read_text() for file in files]


@pytest.fixture
def collector() -> Iterator[HTTPServer]:
    """A collector of OpenTelemetry, which refuses the first request; `bodies` has those that it accepted."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            server.requests += 1
            self.send_response(200 if server.requests > 1 else 400)
            self.end_headers()
            if server.requests > 1 and self.path == "/v1/traces":
                server.bodies.append(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing is printed."""

    server: Any = HTTPServer(("127.0.0.1", 0), Handler)
    server.bodies, server.requests = [], 0
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.integration
def test_a_collector_gets_the_spans_of_the_steps_after_the_resumed_one_once(
    config: RLVRConfig, collector: Any, caplog
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    output_dir = Path(config.output_dir)
    output_dir.mkdir()
    recording = Recording(output_dir)
    config = replace(config, system_envs={"OTEL_EXPORTER_OTLP_COMPRESSION": "none"})
    options = {"endpoint": f"http://127.0.0.1:{collector.server_port}"}
    tracker = ExternalTracker("opentelemetry", options, config, output_dir, close_s=60.0)
    tracker.resume(1)
    recording.spans("trainer", 1, [("train", 1.0, 2.0)])
    for step in (2, 3):
        recording.spans("trainer", step, [("train", 10.0 * step, 10.0 * step + 2.5)])
        recording.spans("engine 0", step, [("generate", 10.0 * step - 1, 10.0 * step)])
        tracker.log(step, {"step": step})
    tracker.close()
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "tracker opentelemetry: ConnectionError: the collector does not accept spans"
    ]
    parts = [part for body in collector.bodies for part in ExportTraceServiceRequest.FromString(body).resource_spans]
    facts = {(each.key, each.value.string_value) for part in parts for each in part.resource.attributes}
    assert ("service.name", "trial") in facts
    spans = [span for part in parts for scope in part.scope_spans for span in scope.spans]
    assert sorted((span.name, span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9) for span in spans) == [
        ("generate", 19.0, 20.0), ("generate", 29.0, 30.0), ("step", 19.0, 22.5), ("step", 29.0, 32.5),
        ("train", 20.0, 22.5), ("train", 30.0, 32.5),
    ]  # fmt: skip
    whole = {span.span_id: span.trace_id for span in spans if span.name == "step"}
    assert all(whole[span.parent_span_id] == span.trace_id for span in spans if span.name != "step")

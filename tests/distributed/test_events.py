"""events.jsonl: every event is a line of its own, also on a full disk, and one line in the log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll.distributed.events import EVENTS_FILE, EventLog, set_aside_events
from roll.trackers.files import free_bytes


def events_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / EVENTS_FILE).read_text().splitlines()]


def test_an_event_has_its_cost_where_that_is_known(tmp_path: Path) -> None:
    log = EventLog(tmp_path, clock=lambda: 5.0)
    log.record("driver", "run restarted", "starts again", 1.23456, steps_lost=0)
    log.record("driver", "died", "is dead")
    assert events_in(tmp_path) == [
        {
            "time": 5.0,
            "component": "driver",
            "event": "run restarted",
            "message": "starts again",
            "seconds": 1.235,
            "steps_lost": 0,
        },
        {"time": 5.0, "component": "driver", "event": "died", "message": "is dead"},
    ]


def test_an_event_is_one_line_of_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    EventLog(tmp_path).record("actor_infer-0", "failed", "failed: gone\n  at line 3\n")
    assert [record.getMessage() for record in caplog.records] == ["actor_infer-0 failed: gone at line 3"]


def test_a_line_without_an_end_does_not_swallow_the_next_event(tmp_path: Path) -> None:
    (tmp_path / EVENTS_FILE).write_text('{"time": 1, "compon')
    EventLog(tmp_path).record("driver", "died", "is dead")
    cut, last = (tmp_path / EVENTS_FILE).read_text().splitlines()
    assert json.loads(last)["event"] == "died" and cut == '{"time": 1, "compon'


def test_on_a_full_disk_an_event_is_whole_or_absent(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(small_disk)
    log.record("driver", "first", "x" * 2000)
    (small_disk / "filler").write_bytes(bytes(free_bytes(small_disk) or 0))
    log.record("driver", "does not fit", "x" * 5000)  # a part of it would: a disk has whole blocks
    assert [event["event"] for event in events_in(small_disk)] == ["first"]
    assert "not written: " in caplog.text
    (small_disk / "filler").unlink()
    log.record("driver", "last", "fits")
    assert [event["event"] for event in events_in(small_disk)] == ["first", "last"]


def test_frequent_events_are_counted_in_the_next_one_that_is_written(tmp_path: Path) -> None:
    now = [0.0]
    log = EventLog(tmp_path, clock=lambda: now[0])
    for now[0] in (0.0, 10.0, 59.0, 60.0, 200.0):
        log.record("reward math", "process replaced", "hung", interval_s=60.0)
        log.record("reward code", "process replaced", "hung")
    messages = [event["message"] for event in events_in(tmp_path) if event["component"] == "reward math"]
    assert messages == ["hung", "hung (and 2 more since the last such event)", "hung"]
    assert len(events_in(tmp_path)) == 8


def test_events_of_an_earlier_run_are_kept_beside_those_of_a_new_one(tmp_path: Path) -> None:
    set_aside_events(tmp_path)
    for cause in ("first", "second"):
        EventLog(tmp_path).record("driver", "failed", cause)
        set_aside_events(tmp_path)
    assert not (tmp_path / EVENTS_FILE).exists()
    assert "second" in (tmp_path / f"{EVENTS_FILE}.old").read_text()

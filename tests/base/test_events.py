"""events.jsonl: every event is a line of its own, also on a full disk, and one line in the log."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from roll.base import events
from roll.base.events import EVENTS_FILE, EventLog, Repeats, set_aside_events
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


def test_different_causes_are_different_events_and_numbers_and_names_make_no_difference(tmp_path: Path) -> None:
    log = EventLog(tmp_path, clock=lambda: 0.0)
    for message in ("1 died: 'a'", "2 died: 'b'", "3 was stopped", "4 was stopped", "4 exited"):
        log.record("environment worker", "died", message, interval_s=60.0)
    assert [event["message"] for event in events_in(tmp_path)] == ["1 died: 'a'", "3 was stopped", "4 exited"]


def test_an_event_says_that_the_kernel_killed_a_process_for_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = [3]
    monkeypatch.setattr(events, "oom_kills", lambda: killed[0])
    log = EventLog(tmp_path)
    for killed[0] in (3, 5, 5):
        log.record("rewards.a", "process replaced", "died")
    killed[0] = 6
    log.record("driver", "training again", "trains again", level=logging.INFO)
    texts = [event["message"] for event in events_in(tmp_path)]
    note = "died (the kernel killed 2 of the run's processes for lack of memory)"
    assert texts == ["died", note, "died", "trains again"]


@pytest.mark.parametrize(
    ("groups", "file"),
    [("0::/run\n", "run/memory.events"), ("4:memory:/run\n0::/\n", "memory/run/memory.oom_control")],
)
def test_kills_are_counted_in_both_versions_of_control_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, file: str
) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("low 0\noom_kill 4\n")
    (tmp_path / "cgroup").write_text(groups)
    monkeypatch.setattr(events, "CONTROL_GROUPS", (tmp_path / "cgroup", tmp_path))
    assert events.oom_kills() == 4
    (tmp_path / file).unlink()
    assert events.oom_kills() == 0


def test_a_failure_that_repeats_is_logged_with_its_count(caplog: pytest.LogCaptureFixture) -> None:
    repeats = Repeats(logging.getLogger("test"))
    for seed in range(25):
        repeats.warn("KeyError in act", f"seed {seed}: KeyError")
    repeats.warn("another", "another")
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["seed 0: KeyError", "seed 9: KeyError (10 times so far)", "another"]


def test_events_of_an_earlier_run_are_kept_beside_those_of_a_new_one(tmp_path: Path) -> None:
    set_aside_events(tmp_path)
    for cause in ("first", "second"):
        EventLog(tmp_path).record("driver", "failed", cause)
        set_aside_events(tmp_path)
    assert not (tmp_path / EVENTS_FILE).exists()
    assert "second" in (tmp_path / f"{EVENTS_FILE}.old").read_text()

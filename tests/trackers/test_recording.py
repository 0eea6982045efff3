"""What a run records beside its metrics: whole lines, those of a resumed run, and a disk that fails."""

from __future__ import annotations

import json
from pathlib import Path

from roll.trackers.recording import GROUPS_FILE, SPANS_FILE, Recording


def steps_in(folder: Path, name: str) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / name).read_text().splitlines()]


def test_processes_append_and_a_resumed_run_keeps_the_lines_up_to_its_step(tmp_path: Path) -> None:
    driver, rollouter = Recording(tmp_path), Recording(tmp_path)
    for step in (1, 2, 3):
        driver.spans("trainer", step, [("train", 10.0 + step, 10.5 + step)])
        rollouter.spans("rollout", step, [("generate", 10.0 + step, 10.25 + step)])
        rollouter.groups([{"step": step, "number": step}])
    with (tmp_path / SPANS_FILE).open("a") as file:
        file.write('{"who": "trainer", "st')  # a process was killed here
    first = json.loads((tmp_path / SPANS_FILE).read_text().splitlines()[0])
    assert first == {"who": "trainer", "what": "train", "step": 1, "start": 11.0, "end": 11.5}
    driver.begin(2)
    driver.spans("trainer", 3, [("train", 30.0, 31.0)])
    assert steps_in(tmp_path, SPANS_FILE) == [1, 1, 2, 2, 3] and steps_in(tmp_path, GROUPS_FILE) == [1, 2]
    driver.begin(0)
    assert steps_in(tmp_path, SPANS_FILE) == []


def test_a_file_that_cannot_be_written_is_given_up_with_one_warning(tmp_path: Path, caplog) -> None:
    (tmp_path / SPANS_FILE).mkdir()
    recording = Recording(tmp_path)
    for step in (1, 2):
        recording.spans("trainer", step, [("train", 1.0, 2.0)])
        recording.groups([{"step": step}])
    assert caplog.text.count("not written from now on") == 1
    assert steps_in(tmp_path, GROUPS_FILE) == [1, 2]

"""The two runs of a rehearsal, with a fake `roll run` that can fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll.lab.rehearse import runs

FAKE = """
import json, os, sys
from pathlib import Path
from roll.trackers.files import JsonlTracker, write_run_json

folder, fails = Path(os.environ["RUN"]), os.environ.get("FAIL")
resumed = any(text.startswith("resume_from_checkpoint=") for text in sys.argv)
metrics = JsonlTracker(folder / "metrics.jsonl")
if resumed:
    metrics.resume(1)
write_run_json(folder, {}, None, {})
if fails == "first" or (fails == "second" and resumed):
    sys.exit('File "/home/me/my_rewards.py", line 3, in score')
for step in [2] if resumed else [0, 1, 2]:
    metrics.log(step, {"rollout/reward_mean": step + 10.0 * resumed})
    for policy in ("one", "two"):
        (folder / "samples" / policy).mkdir(parents=True, exist_ok=True)
        (folder / "samples" / policy / f"step-00000{step}.jsonl").write_text(json.dumps({"id": policy}))
    (folder / "checkpoints" / f"step-00000{step}").mkdir(parents=True, exist_ok=True)
    (folder / "checkpoints" / f"step-00000{step}" / "COMPLETE").touch()
metrics.close()
write_run_json(folder, {}, None, {}, {"status": "finished"})
"""


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Lines of progress; runs are fake ones in `tmp_path/run`."""
    monkeypatch.setattr(runs, "START", FAKE)
    monkeypatch.setenv("RUN", str(tmp_path / "run"))
    return []


def rehearse(folder: Path, said: list[str]) -> list[runs.RunRecord]:
    return runs.run_twice(folder / "rehearsal.yaml", folder / "run", folder, 2, said.append)


def test_the_second_run_resumes_and_repeats_the_last_step(tmp_path: Path, said: list[str]) -> None:
    first, second = rehearse(tmp_path, said)
    assert first.finished and second.finished
    assert [line["step"] for line in second.lines] == [0, 1, 2]
    assert [sample["id"] for sample in first.samples[2]] == ["one", "two"], "policies have a folder each"
    assert said == [
        "before the first step: reward 0",
        "step 1: reward 1",
        "step 2: reward 2",
        "the run has finished; a new one resumes at step 1",
        "step 2: reward 12",
    ]


def test_a_failed_run_is_not_resumed(tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIL", "first")
    (record,) = rehearse(tmp_path, said)
    assert not record.finished


def test_a_failed_resume_does_not_pass_for_the_run_before(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIL", "second")
    first, second = rehearse(tmp_path, said)
    assert first.finished and not second.finished


def test_a_failure_begins_with_the_place_in_the_users_code(tmp_path: Path) -> None:
    log = tmp_path / "console.log"
    log.write_text(
        'Traceback (most recent call last):\n  File "/home/me/my_rewards.py", line 7, in score\n    1 / 0\n'
        f'  File "{Path(json.__file__)}", line 3, in dumps\nZeroDivisionError: division by zero\n'
    )
    text = runs.cause_of_failure(log)
    assert text.startswith("your code: /home/me/my_rewards.py:7 in score\n")
    assert "ZeroDivisionError" in text and str(log) in text

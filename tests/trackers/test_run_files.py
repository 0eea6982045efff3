"""metrics.jsonl."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from roll.base.errors import RunError
from roll.trackers.files import (
    DiskFullError,
    JsonlTracker,
    find_origin,
    is_disk_full,
    read_metrics,
    write_in_place,
    write_whole,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "metrics.jsonl"


def logged(path: Path, *steps: int, resume: int | None = None) -> None:
    tracker = JsonlTracker(path)
    if resume is not None:
        tracker.resume(resume)
    for step in steps:
        tracker.log(step, {"step": step, "actor/loss": step / 10})
    tracker.close()


def test_the_origin_of_a_run_is_the_commit_of_its_recipe_and_whether_it_has_changed_since(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").touch()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@localhost"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    commit = find_origin(tmp_path)["commit"]
    (tmp_path / "recipe.yaml").write_text("max_steps: 3")
    assert find_origin(tmp_path)["commit"] == f"{commit}-dirty" and len(commit) >= 7
    assert "commit" not in find_origin(tmp_path / "nowhere")


def test_a_line_is_one_object_with_step_first_and_sorted_names(path: Path) -> None:
    JsonlTracker(path).log(3, {"time/step": 1.5, "version": 3, "step": 3})
    assert path.read_text() == '{"step": 3, "time/step": 1.5, "version": 3}\n'


def test_a_line_is_readable_as_soon_as_it_is_logged(path: Path) -> None:
    tracker = JsonlTracker(path)
    for step in (1, 2):
        tracker.log(step, {})
        assert [line["step"] for line in read_metrics(path)][-1] == step


def test_values_that_are_not_finite_become_null(path: Path) -> None:
    JsonlTracker(path).log(1, {"actor/loss": float("nan"), "actor/grad_norm": float("inf")})
    assert json.loads(path.read_text()) == {"step": 1, "actor/grad_norm": None, "actor/loss": None}


def test_a_fresh_run_starts_an_empty_file(path: Path) -> None:
    logged(path, 1, 2, 3)
    logged(path, 1)
    assert [line["step"] for line in read_metrics(path)] == [1]


def test_a_resumed_run_writes_the_same_file_as_an_uninterrupted_one(path: Path, tmp_path: Path) -> None:
    logged(path, 0, 1, 2, 3, 4)
    logged(path, 3, 4, 5, resume=2)
    uninterrupted = tmp_path / "uninterrupted.jsonl"
    logged(uninterrupted, 0, 1, 2, 3, 4, 5)
    assert path.read_bytes() == uninterrupted.read_bytes()


def test_a_partial_line_is_dropped(path: Path) -> None:
    logged(path, 1, 2)
    with path.open("a") as file:
        file.write('{"step": 3, "actor/lo')
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    logged(path, 3, resume=2)
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]


@pytest.mark.parametrize("line", ['{"step": 2, "time', "[1]", '{"loss": 1}'])
def test_a_damaged_line_is_an_error_with_its_number(path: Path, line: str) -> None:
    path.parent.mkdir()
    path.write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(ValueError, match=rf"{path}:2: is .*delete"):
        read_metrics(path)


def test_on_a_full_disk_a_line_is_whole_or_absent_and_the_error_names_the_file(small_disk: Path) -> None:
    path = small_disk / "metrics.jsonl"
    tracker = JsonlTracker(path)
    with pytest.raises(DiskFullError, match=f"no space left to write {path}: 0 bytes free; free some space or move"):
        for step in range(2000):
            tracker.log(step, {f"actor/metric_{index}": 0.123456789 for index in range(100)})
    lines = path.read_text()
    assert lines.endswith("\n") and len(read_metrics(path)) > 100


def test_a_file_that_does_not_fit_leaves_the_one_before(small_disk: Path) -> None:
    path = small_disk / "run.json"
    write_whole(path, lambda file: file.write("before"))
    with pytest.raises(DiskFullError, match=f"{path}"):
        write_whole(path, lambda file: file.write("x" * 2**21))
    assert path.read_text() == "before" and [each.name for each in small_disk.iterdir()] == ["run.json"]


def test_a_text_that_does_not_fit_in_the_place_of_another_changes_nothing(small_disk: Path) -> None:
    path = small_disk / "run.json"
    path.write_text("before")
    with pytest.raises(DiskFullError, match=f"{path}"):
        write_in_place(path, "x" * 2**21)
    assert path.read_text() == "before"


def test_a_file_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="file/run.json cannot be written: Not a directory"):
        write_whole(tmp_path / "file" / "run.json", lambda file: file.write(""))


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(28, "No space left on device"), True),
        (RuntimeError("rank 0: IoError(Os { code: 28, kind: StorageFull, message: No space left on device })"), True),
        (OSError(13, "Permission denied"), False),
        (RuntimeError("out of memory"), False),
    ],
)
def test_a_full_disk_is_recognised_in_the_words_of_other_processes(error: Exception, full: bool) -> None:
    assert is_disk_full(error) is full

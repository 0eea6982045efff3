"""What killed runs leave is removed, and nothing of a process that lives."""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from roll.distributed.leftovers import MARK, SHARED_MEMORY, protect_session, remove_leftovers, remove_session


def shared_file(folder: Path, name: str, age_s: float = 15.0) -> Path:
    path = folder / name
    path.write_bytes(bytes(64))
    os.utime(path, (time.time() - age_s, time.time() - age_s))
    return path


def test_shared_memory_that_nobody_uses_is_removed(tmp_path: Path) -> None:
    shared = tmp_path / "shm"
    shared.mkdir()
    left = [shared_file(shared, name) for name in ("sglang_loads_x.shm", "sem.mp-abc", "sgl_shm_1")]
    left.append(shared_file(shared, "sem.mp-new", 1.0))
    young, other = shared_file(shared, "sgl_shm_new", 0.1), shared_file(shared, "of_someone_else")
    used, opened = shared_file(shared, "sglang_loads_used.shm"), shared_file(shared, "sem.mp-open")
    with used.open("r+b") as file, opened.open("r+b"):
        mapped = mmap.mmap(file.fileno(), 0)
        file.close()
        assert set(remove_leftovers(tmp_path / "ray", shared)) == set(left)
        mapped.close()
    assert all(path.exists() for path in (young, other, used, opened)) and not any(path.exists() for path in left)


def test_files_of_processes_that_ended_a_moment_ago_are_waited_for(tmp_path: Path) -> None:
    young = shared_file(tmp_path, "sgl_shm_new", 0.0)
    assert remove_leftovers(tmp_path / "ray", tmp_path) == []
    assert remove_leftovers(tmp_path / "ray", tmp_path, wait=True) == [young]


@pytest.mark.parametrize(
    ("changed", "removed"),
    [
        ({"process": 2**22 + 1}, True),
        ({"began": 7}, True),
        ({"boot": "an earlier one"}, True),
        ({"process": 2**22 + 1, "host": "elsewhere"}, False),
        ({"process": 2**22 + 1, "namespace": "pid:[1]"}, False),
        ({}, False),
    ],
    ids=["dead", "another process", "an earlier boot", "another machine", "another container", "running"],
)
def test_sessions_of_dead_runs_are_removed(tmp_path: Path, changed: dict[str, object], removed: bool) -> None:
    session = tmp_path / "session_2026"
    session.mkdir()
    (tmp_path / "session_of_another_program").mkdir()
    protect_session(session)
    assert session.stat().st_mode & 0o777 == 0o700
    (session / MARK).write_text(json.dumps(json.loads((session / MARK).read_text()) | changed))
    (tmp_path / "session_latest").symlink_to(session)
    assert remove_leftovers(tmp_path, tmp_path) == ([session] if removed else [])
    assert session.exists() is not removed and (tmp_path / "session_of_another_program").exists()


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
def test_sessions_are_looked_for_where_ray_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", "/elsewhere")
    monkeypatch.setenv(variable, str(tmp_path))
    session = tmp_path / "ray" / "session_2026"
    session.mkdir(parents=True)
    protect_session(session)
    (session / MARK).write_text(json.dumps(json.loads((session / MARK).read_text()) | {"process": 2**22 + 1}))
    assert remove_leftovers(shared=tmp_path) == [session]


def test_a_mark_that_cannot_be_read_leaves_the_session(tmp_path: Path) -> None:
    for number, text in enumerate(["", "[]", "1 2.0", "null", '{"process": 1}']):
        session = tmp_path / f"session_{number}"
        session.mkdir()
        (session / MARK).write_text(text)
    assert remove_leftovers(tmp_path, tmp_path) == []


def test_the_session_of_a_driver_that_was_killed_and_not_yet_waited_for_is_removed(tmp_path: Path) -> None:
    session = tmp_path / "session_2026"
    session.mkdir()
    driver = os.fork()
    if driver == 0:
        protect_session(session)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitid(os.P_PID, driver, os.WEXITED | os.WNOWAIT)
    try:
        assert remove_leftovers(tmp_path, tmp_path) == [session]
    finally:
        os.waitpid(driver, 0)


def test_the_link_to_the_latest_session_goes_with_it_only(tmp_path: Path) -> None:
    one, two = tmp_path / "session_1", tmp_path / "session_2"
    for session in (one, two):
        session.mkdir()
    latest = tmp_path / "session_latest"
    latest.symlink_to(two)
    remove_session(one)
    assert latest.exists() and not one.exists()
    remove_session(two)
    assert not latest.is_symlink()


def test_a_semaphore_of_a_running_process_stays(tmp_path: Path) -> None:
    """Also one of another program: it is mapped under a name that no longer exists."""
    semaphore = multiprocessing.get_context("spawn").Semaphore(1)
    file = SHARED_MEMORY / f"sem.{semaphore._semlock.name.removeprefix('/')}"  # type: ignore[attr-defined]
    assert file.exists()
    assert file not in remove_leftovers(tmp_path)
    assert file.exists()

"""What killed runs leave is removed, and nothing of a process that lives."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import time
from pathlib import Path

import psutil
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
    ("process", "began", "removed"), [("dead", 0.0, True), ("other", 100.0, True), ("living", 0.0, False)]
)
def test_sessions_of_dead_runs_are_removed(tmp_path: Path, process: str, began: float, removed: bool) -> None:
    session = tmp_path / "session_2026"
    session.mkdir()
    (tmp_path / "session_of_another_program").mkdir()
    protect_session(session)
    assert session.stat().st_mode & 0o777 == 0o700
    own = psutil.Process()
    number = 2**22 + 1 if process == "dead" else own.pid
    (session / MARK).write_text(f"{number} {own.create_time() - began}\n")
    (tmp_path / "session_latest").symlink_to(session)
    assert remove_leftovers(tmp_path, tmp_path) == ([session] if removed else [])
    assert session.exists() is not removed and (tmp_path / "session_of_another_program").exists()


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

"""What killed runs leave is removed, and nothing of a process that lives."""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from roll.distributed.leftovers import (
    LONGEST_SOCKET,
    MARK,
    MAX_SOCKET_PATH,
    PREFIX,
    SHARED_MEMORY,
    make_session_folder,
    remove_leftovers,
    remove_session,
    temporary_folder,
)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary folder of the user, with a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield Path(folder)


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
def test_sessions_of_dead_runs_are_removed(temporary: Path, changed: dict[str, object], removed: bool) -> None:
    (temporary / f"{PREFIX}of_another_program").mkdir()
    session = make_session_folder()
    (session / MARK).write_text(json.dumps(json.loads((session / MARK).read_text()) | changed))
    assert remove_leftovers(shared=temporary) == ([session] if removed else [])
    assert session.exists() is not removed and (temporary / f"{PREFIX}of_another_program").exists()


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
def test_folders_of_runs_are_below_the_temporary_folder_of_the_user(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", "/elsewhere")
    monkeypatch.setenv(variable, str(temporary / "new"))
    assert make_session_folder().parent == temporary / "new"


@pytest.mark.parametrize(("length", "short"), [(MAX_SOCKET_PATH - len(LONGEST_SOCKET), True), (26, False), (90, False)])
def test_a_temporary_folder_that_is_too_long_for_sockets_is_replaced(
    monkeypatch: pytest.MonkeyPatch, length: int, short: bool
) -> None:
    folder = Path("/") / ("x" * (length - 1))
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    assert temporary_folder() == (folder if short else Path("/tmp"))


def test_a_session_of_another_user_stays(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session_folder()
    (session / MARK).write_text(json.dumps(json.loads((session / MARK).read_text()) | {"process": 2**22 + 1}))
    monkeypatch.setattr(os, "getuid", lambda: session.stat().st_uid + 1)
    assert remove_leftovers(shared=temporary) == [] and session.exists()


def test_a_session_that_cannot_be_removed_whole_keeps_its_mark(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make_session_folder()
    (session / "ray" / "logs").mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", lambda *_, **__: None)  # as where a process that ends has written a file meanwhile
        remove_session(session)
    assert (session / MARK).exists()
    remove_session(session)
    assert not session.exists()


def test_a_session_of_an_earlier_version_is_removed(temporary: Path) -> None:
    session = temporary / "ray" / "session_2026"
    session.parent.mkdir()
    make_session_folder().rename(session)
    (session / MARK).write_text(json.dumps(json.loads((session / MARK).read_text()) | {"process": 2**22 + 1}))
    assert remove_leftovers(shared=temporary) == [session] and not session.exists()


def test_a_mark_that_cannot_be_read_leaves_the_session(tmp_path: Path) -> None:
    for number, text in enumerate(["", "[]", "1 2.0", "null", '{"process": 1}']):
        session = tmp_path / f"{PREFIX}{number}"
        session.mkdir()
        (session / MARK).write_text(text)
    assert remove_leftovers(tmp_path, tmp_path) == []


def test_the_session_of_a_driver_that_was_killed_and_not_yet_waited_for_is_removed(temporary: Path) -> None:
    driver = os.fork()
    if driver == 0:
        make_session_folder()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitid(os.P_PID, driver, os.WEXITED | os.WNOWAIT)
    sessions = [*temporary.glob(f"{PREFIX}*")]
    try:
        assert len(sessions) == 1 and remove_leftovers(shared=temporary) == sessions
    finally:
        os.waitpid(driver, 0)


def test_a_semaphore_of_a_running_process_stays(tmp_path: Path) -> None:
    """Also one of another program: it is mapped under a name that no longer exists."""
    semaphore = multiprocessing.get_context("spawn").Semaphore(1)
    file = SHARED_MEMORY / f"sem.{semaphore._semlock.name.removeprefix('/')}"  # type: ignore[attr-defined]
    assert file.exists()
    assert file not in remove_leftovers(tmp_path)
    assert file.exists()

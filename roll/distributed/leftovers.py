"""Files that runs leave outside their folder: Ray's session folders, and shared memory of killed processes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from ray._common.utils import get_default_system_temp_dir

PREFIX = "roll-"
"""Beginning of the names of the folders of runs."""

MARK = "started_by_roll"
"""File in the folder of a run: the id of its driver, and what tells that process from others."""

MAX_SOCKET_PATH = 107
"""Bytes of a path that Linux accepts for a socket."""

LONGEST_SOCKET = f"/{PREFIX}12345678/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"

SHARED_MEMORY = Path("/dev/shm")

SHARED_NAMES = {"sgl_shm_": 1.0, "sglang_loads_": 1.0, "sem.mp-": 0.0}
"""Beginnings of the names of SGLang's files and of the semaphores of Python's multiprocessing, each with the age in
seconds of the youngest that is removed: a process maps a file of SGLang's soon after it has made it, and a semaphore
before it has this name. Each use of a file makes it younger."""


def make_session_folder() -> Path:
    """Makes a folder for Ray's files of this run that other users cannot enter.

    Ray opens each folder that it makes to everyone, so it makes them within this one.
    """
    parent = temporary_folder()
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    (folder / MARK).write_text(json.dumps({"process": os.getpid(), "began": _began(os.getpid()), **_machine()}) + "\n")
    return folder


def remove_session(folder: Path) -> None:
    """Removes the folder of a run whose processes have ended; its mark last, so that a later run can complete this."""
    shutil.rmtree(folder / "ray", ignore_errors=True)
    if not (folder / "ray").exists():
        shutil.rmtree(folder, ignore_errors=True)


def temporary_folder() -> Path:
    """Where the folders of runs are: RAY_TMPDIR, TMPDIR or /tmp; /tmp where the paths of sockets would be too long."""
    folder = Path(get_default_system_temp_dir()).absolute()  # type: ignore[no-untyped-call]
    return folder if len(os.fsencode(folder)) + len(LONGEST_SOCKET) <= MAX_SOCKET_PATH else Path("/tmp")


def remove_leftovers(temporary: Path | None = None, shared: Path = SHARED_MEMORY, wait: bool = False) -> list[Path]:
    """Removes what drivers and engines that were killed have left: sessions of dead runs, and unused shared memory.

    Only files of this user are removed, and of shared memory only those that no process has mapped. With `wait` it
    waits until files of processes that were killed a moment ago are old enough.
    """
    removed = []
    for folder in _dead_sessions(temporary or temporary_folder()):
        remove_session(folder)
        removed.append(folder)
    if wait and {*_shared_files(shared, older=False)} - {*_shared_files(shared)}:
        time.sleep(max(SHARED_NAMES.values()))
    candidates = {path: key for path in _shared_files(shared) if (key := file_key(path)) is not None}
    used = used_files(shared) if candidates else set()
    for path, key in candidates.items():
        if key not in used:
            with contextlib.suppress(OSError):
                path.unlink()
                removed.append(path)
    return removed


def _dead_sessions(temporary: Path) -> Iterator[Path]:
    """Folders of this user's runs whose driver is dead, also those that an earlier version left in Ray's own folder."""
    for mark in [*temporary.glob(f"{PREFIX}*/{MARK}"), *temporary.glob(f"ray/session_*/{MARK}")]:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            driver = json.loads(mark.read_text())
            status = mark.parent.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not _may_run(driver):
                yield mark.parent


def _may_run(driver: dict[str, Any]) -> bool:
    """Whether that process may still run; one of another machine or container always may."""
    here = _machine()
    if any(driver.get(key) != here[key] for key in ("host", "namespace")):
        return True
    return bool(driver["boot"] == here["boot"] and driver["began"] == _began(driver["process"]))


def _machine() -> dict[str, str]:
    """Where process ids mean the same: the host, the namespace of its processes, and the boot that they belong to."""
    return {
        "host": socket.gethostname(),
        "namespace": os.readlink("/proc/self/ns/pid"),
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
    }


def _began(process_id: int) -> int | None:
    """When a process began, in clock ticks since boot, which no change of the clock moves; None: it has ended."""
    try:
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def _shared_files(shared: Path, older: bool = True) -> Iterator[Path]:
    """Files of this user with SHARED_NAMES; those of any age if not `older`."""
    now = time.time()
    for path in shared.glob("*"):
        youngest_s = next((age for name, age in SHARED_NAMES.items() if path.name.startswith(name)), None)
        if youngest_s is not None:
            with contextlib.suppress(OSError):
                status = path.stat()
                if status.st_uid == os.getuid() and (not older or now - status.st_mtime >= youngest_s):
                    yield path


FileKey = tuple[int, int]
"""Device and inode of a file. A semaphore has another name in its process than in the folder: it is made under one and
then linked to the other."""


def file_key(path: Path | str) -> FileKey | None:
    """The key of a file; None where there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def used_files(shared: Path) -> set[FileKey]:
    """The files of that folder that a process has mapped or open."""
    found: set[FileKey] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                if f"{shared}/" in line:
                    device, inode = line.split(maxsplit=5)[3:5]
                    major, minor = (int(part, 16) for part in device.split(":"))
                    found.add((os.makedev(major, minor), int(inode)))
            opened = (file.path for file in process.open_files() if file.path.startswith(f"{shared}/"))
            found |= {key for path in opened if (key := file_key(path)) is not None}
    return found

"""Files that runs leave outside their folder: Ray's session folders, and shared memory of killed processes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from ray._common.utils import get_default_ray_temp_dir

MARK = "started_by_roll"
"""File in the session folder of a run: the id of its driver, and what tells that process from others."""

SHARED_MEMORY = Path("/dev/shm")

SHARED_NAMES = {"sgl_shm_": 1.0, "sglang_loads_": 1.0, "sem.mp-": 0.0}
"""Beginnings of the names of SGLang's files and of the semaphores of Python's multiprocessing, each with the age in
seconds of the youngest that is removed: a process maps a file of SGLang's soon after it has made it, and a semaphore
before it has this name. Each use of a file makes it younger."""


def protect_session(folder: Path) -> None:
    """Marks a session folder as that of this process, and closes it to other users: its logs have the environment."""
    folder.chmod(0o700)
    (folder / MARK).write_text(json.dumps({"process": os.getpid(), "began": _began(os.getpid()), **_machine()}) + "\n")


def remove_session(folder: Path) -> None:
    """Removes the folder of a session that has ended, and the link to it."""
    shutil.rmtree(folder, ignore_errors=True)
    latest = folder.parent / "session_latest"
    if latest.is_symlink() and not latest.exists():
        latest.unlink(missing_ok=True)


def remove_sessions_of(process: int) -> None:
    """Removes the session folders of a driver whose Ray did not start; Ray names them by its process id."""
    for folder in ray_folder().glob(f"session_*_{process}"):
        remove_session(folder)


def ray_folder() -> Path:
    """Where Ray keeps its sessions: below RAY_TMPDIR, TMPDIR or /tmp, as it decides itself."""
    return Path(get_default_ray_temp_dir())  # type: ignore[no-untyped-call]


def remove_leftovers(sessions: Path | None = None, shared: Path = SHARED_MEMORY, wait: bool = False) -> list[Path]:
    """Removes what drivers and engines that were killed have left: sessions of dead runs, and unused shared memory.

    Only files of this user are removed, and of shared memory only those that no process has mapped. With `wait` it
    waits until files of processes that were killed a moment ago are old enough.
    """
    removed = []
    for folder in _dead_sessions(sessions or ray_folder()):
        remove_session(folder)
        removed.append(folder)
    if wait and {*_shared_files(shared, older=False)} - {*_shared_files(shared)}:
        time.sleep(max(SHARED_NAMES.values()))
    candidates = {path: key for path in _shared_files(shared) if (key := _file_key(path)) is not None}
    used = _used_files(shared) if candidates else set()
    for path, key in candidates.items():
        if key not in used:
            with contextlib.suppress(OSError):
                path.unlink()
                removed.append(path)
    return removed


def _dead_sessions(sessions: Path) -> Iterator[Path]:
    for mark in sessions.glob(f"session_*/{MARK}"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            driver = json.loads(mark.read_text())
            if not mark.parent.is_symlink() and not _may_run(driver):
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


def _file_key(path: Path | str) -> FileKey | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _used_files(shared: Path) -> set[FileKey]:
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
            found |= {key for path in opened if (key := _file_key(path)) is not None}
    return found

"""Downloads files of a hub into the cache: several at a time, continued after an interruption, progress in the log.

huggingface_hub alone would start a file again that an earlier process left unfinished, and could not be interrupted
before its running files are complete. So large files are written here, to the names that huggingface_hub gives them.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any
from uuid import uuid4

from roll.configs.errors import RunError
from roll.configs.hub.names import HubError, HubName, Listing, RemoteFile, cache_folder, endpoint, hub_errors
from roll.configs.memory import gibibytes

logger = logging.getLogger(__name__)

READ_TIMEOUT_S = 20.0
"""Longest pause within a download; then it is continued on a new connection."""
ATTEMPTS = 6
"""Connections in a row that bring no byte before a download fails."""
RETRY_DELAY_S = 1.0
"""Pause before a new connection; a server that restarts needs some seconds."""
PROGRESS_INTERVAL_S = 5.0
"""Time between two lines of progress."""
LARGE_BYTES = 1 << 20
"""Files of this size or more are continued after an interruption; smaller ones start again."""
CONNECTIONS = 6
"""Files at a time."""


def fetch(listing: Listing, paths: Sequence[str]) -> Path:
    """Downloads what the cache lacks of `paths`; returns the folder of the snapshot.

    A file that another process is fetching is waited for.

    Raises:
        HubUnreachable: the hub does not answer any more; what was fetched stays.
        HubError: it refuses; the disk is full or cannot be written to.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    name, missing = listing.name, listing.missing(paths)
    _check_space(sum(file.size for file in missing))
    disable_progress_bars()
    options: dict[str, Any] = {"repo_type": name.kind, "endpoint": endpoint(), "cache_dir": cache_folder()}
    try:
        with hub_errors(name):
            _fetch_large(listing, [file for file in missing if file.size >= LARGE_BYTES and file.etag])
            for path in paths:
                if not (listing.snapshot / path).exists():
                    hf_hub_download(name.repo, path, revision=listing.commit, **options)
        _write_reference(name, listing.commit)
    except OSError as error:
        if isinstance(error, RunError) or error.errno is None:
            raise
        raise HubError(
            f"{cache_folder()} cannot be written: {error.strerror}; set HF_HOME to another folder"
        ) from error
    return listing.snapshot


def _check_space(needed: int) -> None:
    cache = cache_folder()
    there = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        space = f"has {gibibytes(free)} free, and {gibibytes(needed)} are to be fetched"
        raise HubError(f"the disk of {cache} {space}; free some, or set HF_HOME to another folder")


def _write_reference(name: HubName, commit: str) -> None:
    """Notes which commit a branch or tag is, so that it is found without a network."""
    reference = name.storage / "refs" / (name.revision or "main")
    if name.revision == commit or (reference.is_file() and reference.read_text() == commit):
        return
    reference.parent.mkdir(parents=True, exist_ok=True)
    part = reference.with_name(f"{reference.name}.{uuid4().hex}")  # threads of one process may fetch at once
    part.write_text(commit)
    part.replace(reference)


class Progress:
    """Counts the bytes of all files of a download; a log line every PROGRESS_INTERVAL_S."""

    def __init__(self, name: HubName, files: Sequence[RemoteFile]) -> None:
        self._name, self._total = name, sum(file.size for file in files)
        self._lock = threading.Lock()
        self._here = self._fetched = 0
        self._start = self._logged = time.monotonic()
        logger.info("fetching %s: %s to %s", name, gibibytes(self._total), name.storage)

    def add(self, count: int, fetched: bool = True) -> None:
        """Counts bytes; with `fetched` false they are of an earlier process."""
        with self._lock:
            self._here += count
            self._fetched += count if fetched else 0

    def log(self, force: bool = False) -> None:
        """Writes a line, if it is time for one."""
        now = time.monotonic()
        if not force and now - self._logged < PROGRESS_INTERVAL_S:
            return
        self._logged = now
        share, rate = 100 * self._here // max(self._total, 1), self._fetched / max(now - self._start, 1e-3)
        here, total = gibibytes(self._here), gibibytes(self._total)
        logger.info("fetching %s: %s of %s (%d %%), %s/s", self._name, here, total, share, gibibytes(int(rate)))


def _fetch_large(listing: Listing, files: Sequence[RemoteFile]) -> None:
    """Downloads files to the blobs of the cache; an interruption ends all connections at their next bytes."""
    if not files:
        return
    progress, stop = Progress(listing.name, files), threading.Event()
    with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="fetch") as pool:
        running: set[Future[None]] = {pool.submit(_fetch_blob, listing, file, progress, stop) for file in files}
        try:
            while running:
                done, running = wait(running, timeout=PROGRESS_INTERVAL_S, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
                progress.log()
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
    progress.log(force=True)


def _fetch_blob(listing: Listing, file: RemoteFile, progress: Progress, stop: threading.Event) -> None:
    """Downloads one file to its blob, continuing what an earlier attempt left."""
    from filelock import FileLock
    from filelock import Timeout as LockTimeout

    storage = listing.name.storage
    blob = storage / "blobs" / file.etag
    part = blob.with_name(f"{blob.name}.part")
    lock_path = cache_folder() / ".locks" / storage.name / f"{file.etag}.lock"
    for folder in (blob.parent, lock_path.parent):
        folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(lock_path)
    while not lock.is_locked:
        try:
            lock.acquire(timeout=1.0)
        except LockTimeout:  # another process fetches this file; its lock ends with it
            if stop.is_set():
                return
    try:
        if blob.exists():
            progress.add(file.size, fetched=False)
            return
        if part.exists() and part.stat().st_size > file.size:
            part.unlink()
        progress.add(_size(part), fetched=False)
        _continue_part(listing, file, part, progress, stop)
        if not stop.is_set():
            part.replace(blob)
    finally:
        lock.release()


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _continue_part(listing: Listing, file: RemoteFile, part: Path, progress: Progress, stop: threading.Event) -> None:
    """Appends the rest of the file to `part`, on new connections where one ends early.

    Raises:
        httpx.TransportError: ATTEMPTS connections in a row brought nothing.
    """
    import httpx

    failures = 0
    while (size := _size(part)) < file.size and not stop.is_set():
        try:
            _append(listing, file, part, progress, stop)
        except httpx.TransportError as error:
            failures = 0 if _size(part) > size else failures + 1
            if failures >= ATTEMPTS:
                raise
            logger.warning("fetching %s: %s: %s; continuing", listing.name, file.path, error or type(error).__name__)
            stop.wait(RETRY_DELAY_S)


def _append(listing: Listing, file: RemoteFile, part: Path, progress: Progress, stop: threading.Event) -> None:
    """One connection: appends to `part` what it lacks, until the end, an error, or `stop`.

    Raises:
        httpx.TransportError: the connection ended early, or the server is busy, or sends another file.
    """
    import httpx
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

    name, start = listing.name, _size(part)
    url = hf_hub_url(name.repo, file.path, repo_type=name.kind, revision=listing.commit, endpoint=endpoint())
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    with get_session().stream("GET", url, headers=headers, timeout=READ_TIMEOUT_S) as response:
        if response.status_code in (408, 416, 429, 500, 502, 503, 504):
            raise httpx.RemoteProtocolError(f"the server answered {response.status_code}")
        hf_raise_for_status(response)
        restarted = start > 0 and response.status_code != 206
        if restarted:  # this server does not send parts of a file
            progress.add(-start, fetched=False)
        with part.open("wb" if restarted else "ab") as out:
            for chunk in response.iter_raw():
                out.write(chunk)
                progress.add(len(chunk))
                if stop.is_set():
                    return
    if _size(part) > file.size:
        part.unlink()
        raise httpx.RemoteProtocolError(f"the server sent more than the {file.size} bytes it had listed")

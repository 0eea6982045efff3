"""Downloads files of a hub into the cache of huggingface_hub, several at a time, with progress in the log."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from roll.base.errors import RunError
from roll.configs.hub.names import HubError, HubName, Listing, cache_folder, endpoint, hub_errors
from roll.configs.memory import gibibytes

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 5.0
"""Time between two lines of progress."""
CONNECTIONS = 6
"""Files at a time."""


def fetch(listing: Listing, paths: Sequence[str]) -> Path:
    """Downloads what the cache lacks of `paths`; returns the folder of the snapshot.

    A cut connection is continued; a file that another process is fetching is waited for.

    Raises:
        HubUnreachable: the hub does not answer any more; whole files stay.
        HubError: it refuses; the disk is full or cannot be written to.
    """
    from huggingface_hub import hf_hub_download

    name, missing = listing.name, listing.missing(paths)
    _check_space(sum(file.size for file in missing))
    download = partial(
        hf_hub_download,
        name.repo,
        repo_type=name.kind,
        revision=listing.commit,
        endpoint=endpoint(),
        cache_dir=cache_folder(),
        tqdm_class=_logged_progress(name),
    )
    if missing:
        size = gibibytes(sum(file.size for file in missing))
        logger.info("fetching %s: %d files, %s to %s", name, len(missing), size, name.storage)
    try:
        with hub_errors(name), ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="fetch") as pool:
            wanted = [path for path in paths if not (listing.snapshot / path).exists()]
            for _ in pool.map(download, wanted):
                pass
        _write_reference(name, listing.commit)
    except OSError as error:
        if isinstance(error, RunError) or error.errno is None:
            raise
        raise HubError(
            f"{cache_folder()} cannot be written: {error.strerror}; set HF_HOME to another folder"
        ) from error
    return listing.snapshot


def _logged_progress(name: HubName) -> Any:
    """A class of progress bars that write a log line every PROGRESS_INTERVAL_S, and one at their end."""
    from tqdm import tqdm

    class LoggedProgress(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"mininterval": PROGRESS_INTERVAL_S, "disable": False})

        def display(self, *args: Any, **options: Any) -> None:
            if self.total:
                done, total, share = gibibytes(self.n), gibibytes(self.total), int(100 * self.n / self.total)
                logger.info("fetching %s: %s: %s of %s (%d %%)", name, self.desc.rpartition("/")[2], done, total, share)

    return LoggedProgress


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

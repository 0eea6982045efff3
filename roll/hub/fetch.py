"""Lists the files of a repository, and downloads them into the cache of huggingface_hub with progress in the log."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from roll.base.errors import RunError
from roll.base.text import gibibytes
from roll.hub.names import (
    ADAPTER_FILES,
    CONFIG_NAME,
    WEIGHTS,
    HubError,
    HubName,
    HubUnreachable,
    cache_folder,
    cached_folder,
    endpoint,
    offline,
)

logger = logging.getLogger(__name__)

MODEL_FILES = ("*.json", WEIGHTS, "*.txt", "*.model", "*.jinja", "*.tiktoken")
UNUSED_MODEL_FILES = ("*/*", "consolidated*", "*.bin.index.json")
"""Weights in other formats, which many repositories have beside their safetensors."""

LOOK_UP_TIMEOUT_S = 10.0
"""A hub answers in well under a second; a firewall that drops packets never does."""

PROGRESS_INTERVAL_S = 5.0
"""Time between two lines of progress."""
CONNECTIONS = 6
"""Files at a time."""


@dataclass(frozen=True)
class Listing:
    """The files of a repository at one commit; by path the bytes and the name among the blobs of the cache."""

    name: HubName
    commit: str
    files: dict[str, tuple[int, str]]

    @property
    def snapshot(self) -> Path:
        """Where the cache has the files of this commit."""
        return self.name.storage / "snapshots" / self.commit

    def size(self, paths: Collection[str]) -> int:
        return sum(self.files[path][0] for path in paths)

    def missing(self, paths: Collection[str]) -> list[str]:
        """Those of `paths` that the cache does not have."""
        blobs = self.name.storage / "blobs"
        absent = [path for path in paths if not (self.snapshot / path).exists()]
        return [path for path in absent if not (blobs / self.files[path][1]).exists()]


def list_files(name: HubName) -> Listing:
    """The commit and the files of a repository, in one request of at most LOOK_UP_TIMEOUT_S.

    Raises:
        HubUnreachable: the hub does not answer, or may not be asked.
        HubError: it has no such repository or revision, or not for this user.
    """
    if offline():
        raise HubUnreachable("HF_HUB_OFFLINE is set")
    from huggingface_hub import HfApi

    with _hub_errors(name):
        info = HfApi(endpoint=endpoint()).repo_info(
            name.repo, revision=name.revision, repo_type=name.kind, files_metadata=True, timeout=LOOK_UP_TIMEOUT_S
        )
    listed = getattr(info, "siblings", None) or []
    files = {file.rfilename: (file.size or 0, (file.lfs.sha256 if file.lfs else file.blob_id) or "") for file in listed}
    return Listing(name, str(info.sha), files)


def model_files(listing: Listing) -> list[str]:
    """The files of a model that a run needs.

    Raises:
        HubError: it has no config.json or no safetensors.
    """
    if CONFIG_NAME not in listing.files:
        raise HubError(f"{listing.name.page} has no {CONFIG_NAME}, so it is not a model in the Hugging Face layout")
    if not any(fnmatch(path, WEIGHTS) and "/" not in path for path in listing.files):
        raise HubError(f"{listing.name.page} has no {WEIGHTS}; convert the model, and give the path of its folder")
    return [path for path in listing.files if is_used(path)]


def adapter_files(listing: Listing) -> list[str]:
    """The files of an adapter that a run needs.

    Raises:
        HubError: one is missing.
    """
    for file in ADAPTER_FILES:
        if file not in listing.files:
            raise HubError(f"{listing.name.page} has no {file}, so it is not an adapter as peft saves it")
    return [*ADAPTER_FILES]


def is_used(path: str) -> bool:
    needed = any(fnmatch(path, pattern) for pattern in MODEL_FILES)
    return needed and not any(fnmatch(path, pattern) for pattern in UNUSED_MODEL_FILES)


def fetch(listing: Listing, paths: Sequence[str]) -> Path:
    """Downloads what the cache lacks of `paths`; returns the folder of the snapshot.

    A cut connection is continued; a file that another process is fetching is waited for.

    Raises:
        HubUnreachable: the hub does not answer any more; whole files stay.
        HubError: it refuses; the disk is full or cannot be written to.
    """
    from huggingface_hub import hf_hub_download

    name, missing = listing.name, listing.missing(paths)
    needed = listing.size(missing)
    _check_space(needed)
    if missing:
        logger.info("fetching %s: %d files, %s to %s", name, len(missing), gibibytes(needed), name.storage)
    download = partial(
        hf_hub_download,
        name.repo,
        repo_type=name.kind,
        revision=listing.commit,
        endpoint=endpoint(),
        cache_dir=cache_folder(),
        tqdm_class=_logged_progress(name),
    )
    try:
        with _hub_errors(name), ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="fetch") as pool:
            list(pool.map(download, (path for path in paths if not (listing.snapshot / path).exists())))
        if cached_folder(name) != listing.snapshot:  # a branch is found without a network from now on
            add_to_cache(name.storage / "refs" / (name.revision or "main"), listing.commit)
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


def add_to_cache(file: Path, text: str) -> None:
    """Writes a file of the cache that other processes and threads see whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{uuid4().hex}")
    part.write_text(text)
    part.replace(file)


@contextmanager
def _hub_errors(name: HubName) -> Iterator[None]:
    """Turns the errors of huggingface_hub into one sentence each."""
    import httpx
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        message = f"its terms must be accepted at {name.page}, and HF_TOKEN be a token of that account"
        raise HubError(message) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"{endpoint()} has {name.repo}, but no revision {name.revision} of it") from error
    except errors.RepositoryNotFoundError as error:
        private = "or it is private and HF_TOKEN may not read it"
        raise HubError(f"{endpoint()} has no {name.kind} of this name, {private}") from error
    except errors.HfHubHTTPError as error:
        raise HubUnreachable(f"{endpoint()} answered {error.response.status_code}") from error
    except (httpx.TransportError, errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise HubUnreachable(f"{endpoint()} cannot be reached ({reason})") from error

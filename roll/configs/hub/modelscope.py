"""Models from ModelScope, through its own library and cache, where USE_MODELSCOPE or `modelscope://` ask for it.

The library is an optional install and is imported only then. Its cache does not keep commits apart, so a name keeps the
revision that the user wrote.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from roll.configs.hub.names import (
    MODEL_FILES,
    UNUSED_MODEL_FILES,
    HubError,
    HubName,
    HubUnreachable,
    is_used,
    missing_model_files,
    offline,
)
from roll.configs.memory import gibibytes
from roll.configs.model_config import CONFIG_NAME

logger = logging.getLogger(__name__)


def installed() -> bool:
    return importlib.util.find_spec("modelscope") is not None


def cached_model(name: HubName) -> Path | None:
    """The folder of a model in ModelScope's cache, complete or not; no network."""
    if not installed():
        return None
    from modelscope.hub.snapshot_download import snapshot_download

    try:
        folder = Path(snapshot_download(name.repo, revision=name.revision, local_files_only=True))
    except Exception:  # each version of the library has its own errors for "not in the cache"
        return None
    return folder if folder.is_dir() else None


def look_up_model(name: HubName) -> tuple[int, int, int]:
    """Number of files that a run needs, their bytes, and the bytes that are not in the cache; fetches config.json.

    Raises:
        HubError: it is not in the cache, and cannot be looked up.
    """
    folder = cached_model(name)
    if folder is not None and not missing_model_files(folder):
        sizes = [path.stat().st_size for path in folder.iterdir() if path.is_file()]
        return len(sizes), sum(sizes), 0
    with _library_errors(name):
        from modelscope.hub.api import HubApi
        from modelscope.hub.file_download import model_file_download

        files = {
            str(file["Path"]): int(file.get("Size") or 0)
            for file in HubApi().get_model_files(name.repo, revision=name.revision, recursive=True)
            if is_used(str(file["Path"]))
        }
        model_file_download(name.repo, CONFIG_NAME, revision=name.revision)
    return len(files), sum(files.values()), sum(files.values())


def fetch_model(name: HubName) -> HubName:
    """Fetches a model that the cache does not have; the library shows its progress and continues partial files.

    Raises:
        HubError: it cannot be fetched.
    """
    folder = cached_model(name)
    if folder is not None and not missing_model_files(folder):
        return name
    files, size, _ = look_up_model(name)
    logger.info("fetching %s from ModelScope: %s in %d files", name, gibibytes(size), files)
    with _library_errors(name):
        from modelscope.hub.snapshot_download import snapshot_download

        snapshot_download(
            name.repo,
            revision=name.revision,
            allow_patterns=list(MODEL_FILES),
            ignore_patterns=list(UNUSED_MODEL_FILES),
        )
    return name


@contextmanager
def _library_errors(name: HubName) -> Iterator[None]:
    """Turns every error of the library into one sentence; its versions differ in their classes."""
    if not installed():
        raise HubError(
            f"{name} is to be fetched from ModelScope, whose library is not installed: pip install modelscope; "
            "or unset USE_MODELSCOPE and model_download_type to fetch it from Hugging Face"
        )
    if offline():
        raise HubUnreachable(f"{name} is not in ModelScope's cache (MODELSCOPE_CACHE), and HF_HUB_OFFLINE is set")
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise HubError(
            f"{name} is not a folder here (in {os.getcwd()}), and ModelScope does not provide it: {reason}. "
            f"Where there is a network, run `modelscope download {name.repo}` and copy it into MODELSCOPE_CACHE, or "
            "write the path of a folder with config.json, tokenizer.json and *.safetensors"
        ) from error

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

from roll.base.text import gibibytes
from roll.hub.fetch import MODEL_FILES, UNUSED_MODEL_FILES, is_used
from roll.hub.find import Found
from roll.hub.names import (
    ADAPTER_CONFIG,
    CONFIG_NAME,
    HubError,
    HubName,
    HubUnreachable,
    missing_adapter_files,
    missing_model_files,
    offline,
)

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


def find_at_modelscope(name: HubName, whole: bool, adapter: bool = False) -> Found:
    """The files of a model, or of an adapter, that a run needs.

    Fetches its configuration, and with `whole` all that the cache lacks.

    The library shows its progress and continues partial files.

    Raises:
        HubError: it is not in the cache, and cannot be looked up or fetched.
    """
    folder = cached_model(name)
    missing = missing_adapter_files if adapter else missing_model_files
    if folder is not None and not missing(folder):
        sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
        return Found(name, list(sizes), sum(sizes.values()), 0)
    with _library_errors(name):
        from modelscope.hub.api import HubApi
        from modelscope.hub.file_download import model_file_download
        from modelscope.hub.snapshot_download import snapshot_download

        listed = HubApi().get_model_files(name.repo, revision=name.revision, recursive=True)
        sizes = {str(file["Path"]): int(file.get("Size") or 0) for file in listed if is_used(str(file["Path"]))}
        size = sum(sizes.values())
        if whole:
            logger.info("fetching %s from ModelScope: %s in %d files", name, gibibytes(size), len(sizes))
            used = {"allow_patterns": list(MODEL_FILES), "ignore_patterns": list(UNUSED_MODEL_FILES)}
            snapshot_download(name.repo, revision=name.revision, **used)
        else:
            model_file_download(name.repo, ADAPTER_CONFIG if adapter else CONFIG_NAME, revision=name.revision)
    return Found(name, list(sizes), size, size)


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

"""The files that the name of a model or dataset stands for: on its hub, or in the cache where no network is needed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from roll.base.errors import Problem
from roll.hub.fetch import Listing, adapter_files, fetch, list_files, model_files
from roll.hub.names import (
    ADAPTER_CONFIG,
    COMMIT,
    CONFIG_NAME,
    HubError,
    HubName,
    HubUnreachable,
    cache_folder,
    cached_folder,
    endpoint,
    hub_name,
    missing_adapter_files,
    missing_model_files,
    offline,
)
from roll.hub.splits import CARD, SplitError, choose_files, matching_files

logger = logging.getLogger(__name__)

MAX_FILES = 10_000
"""Most files and folders in the folder of a dataset; a larger one is another folder, such as that of all data."""


@dataclass(frozen=True)
class Download:
    """What a run uses of one repository; `missing_bytes` are not in the cache of this machine yet."""

    name: str
    used_by: list[str]
    files: int
    bytes: int
    missing_bytes: int


@dataclass(frozen=True)
class Found:
    """What a run reads of one repository.

    Attributes:
        name: with the commit.
        paths: of the files.
        bytes: of all of them.
        missing_bytes: of the files that the cache of this machine does not have yet.
    """

    name: HubName
    paths: list[str]
    bytes: int
    missing_bytes: int

    def download(self, asked: HubName, keys: list[str]) -> Download:
        """For a plan, with the name that was asked for and the keys that name it."""
        return Download(str(asked), keys, len(self.paths), self.bytes, self.missing_bytes)


@dataclass
class LookUp:
    """What the names of a configuration stand for; `problems` stop a run, but not a plan."""

    downloads: list[Download] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


class Finder:
    """Finds names; after one request without an answer it makes no other, so that the wait is not repeated.

    Args:
        whole: fetches all files that are found, else only config.json of a model and the card of a dataset.
        say: is called with a line before the first request.
    """

    def __init__(self, whole: bool, say: Callable[[str], None] = logger.info) -> None:
        self._whole = whole
        self._say: Callable[[str], None] | None = say
        self._unreachable: HubUnreachable | None = None
        self._listed: dict[HubName, Listing] = {}

    def model(self, name: HubName, adapter: bool = False) -> Found:
        """A complete model of a commit needs no network; for a branch, the cache is used if the hub is unreachable.

        The same holds for an `adapter` of a model.

        Raises:
            HubError: it is not here and cannot be looked up or fetched.
        """
        if name.modelscope:
            from roll.hub.modelscope import find_at_modelscope

            return find_at_modelscope(name, self._whole, adapter)
        folder = cached_folder(name)
        missing = missing_adapter_files if adapter else missing_model_files
        lacking = missing(folder) if folder is not None else []
        cached = None
        if folder is not None and not lacking:
            cached = _cached(name, folder, [path.name for path in folder.iterdir() if path.is_file()])
            if COMMIT.fullmatch(name.revision or ""):
                return cached
        try:
            listing = self._listing(name)
            paths = adapter_files(listing) if adapter else model_files(listing)
            fetch(listing, paths if self._whole else [ADAPTER_CONFIG if adapter else CONFIG_NAME])
        except HubUnreachable as error:
            if cached is None:
                raise HubUnreachable(_explain(name, error, lacking)) from error
            if self._whole:
                logger.warning("%s: %s; using commit %s of the cache", name, error, cached.name.revision)
            return cached
        except HubError as error:
            raise HubError(_explain(name, error, lacking)) from error
        return _listed(name, listing, paths)

    def data(self, name: HubName, subset: str | None, splits: Sequence[str]) -> Found:
        """The files of a dataset that the path of the name matches, or of a subset and the first of `splits` it has.

        Raises:
            HubError: it cannot be looked up or fetched and is not in the cache, or has no such file, subset or split.
        """
        folder = cached_folder(name)
        if folder is not None and COMMIT.fullmatch(name.revision or "") and (folder / name.path).is_file():
            return _cached(name, folder, [name.path])
        try:
            try:
                listing, card = self._listing(name), ""
                if CARD in listing.files and not name.path:
                    card = (fetch(listing, [CARD]) / CARD).read_text(errors="replace")
            except HubUnreachable:
                if folder is None:
                    raise
                return _cached(name, folder, _chosen(name, *_contents(folder), subset, splits))
            paths = _chosen(name, list(listing.files), card, subset, splits)
            if self._whole:
                fetch(listing, paths)
            return _listed(name, listing, paths)
        except SplitError as error:
            raise HubError(f"{name}: {error}") from error
        except HubError as error:
            raise type(error)(_explain(name, error, [])) from error

    def _listing(self, name: HubName) -> Listing:
        if self._unreachable is not None:
            raise self._unreachable
        if self._say is not None and not offline():
            self._say(f"looking up {name} at {endpoint()}")
            self._say = None
        key = replace(name, path="")
        try:
            if key not in self._listed:
                self._listed[key] = list_files(key)
        except HubUnreachable as error:
            self._unreachable = error
            raise
        return self._listed[key]


def fetch_model(text: str) -> str:
    """Fetches what the cache lacks of a model given by name; returns the name with its commit, any other text as it is.

    Raises:
        HubError: it is not here and cannot be fetched.
    """
    name = hub_name(text, "model")
    return text if name is None else Finder(whole=True).model(name).name.uri


def folder_files(folder: Path, subset: str | None, splits: Sequence[str]) -> list[str]:
    """The files of a subset and split of a dataset in a folder of this machine.

    Raises:
        HubError: it has no such split, or is too large to be the folder of a dataset.
    """
    try:
        return [str(folder / path) for path in choose_files(*_contents(folder), subset, splits)]
    except SplitError as error:
        raise HubError(f"{folder}: {error}") from error


def _listed(name: HubName, listing: Listing, paths: list[str]) -> Found:
    pinned = replace(name, revision=listing.commit)
    return Found(pinned, paths, listing.size(paths), listing.size(listing.missing(paths)))


def _cached(name: HubName, folder: Path, paths: list[str]) -> Found:
    return Found(replace(name, revision=folder.name), paths, sum((folder / path).stat().st_size for path in paths), 0)


def _contents(folder: Path) -> tuple[list[str], str]:
    """The visible files of a dataset's folder, and its card.

    Raises:
        HubError: it has more than MAX_FILES files and folders.
    """
    visible: list[str] = []
    seen = 0
    for place, folders, files in os.walk(folder):  # a folder that may not be read is left out
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        seen += len(folders) + len(files)
        if seen > MAX_FILES:
            raise HubError(f"{folder}: has more than {MAX_FILES} files, so it is not the folder of a dataset")
        visible += [
            Path(place, name).relative_to(folder).as_posix() for name in sorted(files) if not name.startswith(".")
        ]
    card = folder / CARD
    return visible, card.read_text(errors="replace") if card.is_file() else ""


def _chosen(name: HubName, paths: list[str], card: str, subset: str | None, splits: Sequence[str]) -> list[str]:
    if not name.path:
        return choose_files(paths, card, subset, splits)
    matching = matching_files(paths, name.path)
    if not matching:
        near = ", ".join(sorted(paths)[:5])
        raise SplitError(f"it has no file {name.path}; it has {near}{', ...' if len(paths) > 5 else ''}")
    return matching


def _explain(name: HubName, error: HubError, lacking: Sequence[str]) -> str:
    """Both readings of a name that is neither a path nor can be fetched, and what to place where."""
    thing = "folder" if name.kind == "model" else "file or folder"
    message = f"{name} is not a {thing} here (in {os.getcwd()}), and it cannot be fetched as a {name.kind}: {error}"
    if not isinstance(error, HubUnreachable):
        return message
    has = f"lacks {', '.join(lacking[:3])} of it" if lacking else "does not have it"
    option = " --repo-type dataset" if name.kind == "dataset" else ""
    needed = "config.json, tokenizer.json and *.safetensors" if name.kind == "model" else "its parquet or JSONL files"
    return (
        f"{message}; the cache {cache_folder()} {has}. Where there is a network, run `hf download {name.repo}{option}` "
        f"and copy {name.storage.name} into that cache, or write the path of a folder with {needed}"
    )

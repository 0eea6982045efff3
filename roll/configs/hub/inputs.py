"""The models and datasets that a configuration gives by name: what a run would fetch, and fetching it.

`look_up` asks for sizes and fetches each config.json, so that a plan knows the model; `fetch_inputs` fetches the rest
and writes the commit into the configuration, so that every process and a later resume use the same files.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from roll.base.errors import Problem
from roll.configs.hub.fetch import fetch
from roll.configs.hub.generated import generate, is_generated
from roll.configs.hub.gguf_files import convert, gguf_file
from roll.configs.hub.names import (
    COMMIT,
    HubError,
    HubName,
    HubUnreachable,
    Listing,
    cache_folder,
    cached_folder,
    endpoint,
    hub_name,
    list_files,
    missing_model_files,
    model_files,
    offline,
)
from roll.configs.hub.splits import CARD, SplitError, choose_files, matching_files
from roll.configs.model_config import CONFIG_NAME
from roll.configs.pipeline import BaseConfig
from roll.configs.roles import DataArguments

logger = logging.getLogger(__name__)

VALIDATION_SPLITS = ("validation", "test")
"""Splits that validation reads where none is given, the first that exists."""


@dataclass(frozen=True)
class Download:
    """What a run uses of one repository; `missing_bytes` are not in the cache of this machine yet."""

    name: str
    used_by: list[str]
    files: int
    bytes: int
    missing_bytes: int


@dataclass
class LookUp:
    """What the names of a configuration stand for; `problems` stop a run, but not a plan."""

    downloads: list[Download] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def model_names(config: BaseConfig) -> dict[str, list[str]]:
    """The models of all roles that own devices, with the keys that name them."""
    names: dict[str, list[str]] = {}
    for role, worker in config.device_roles().items():
        name = worker.model_args.model_name_or_path
        if name is not None:
            key = "pretrain" if name == config.pretrain else f"{role}.model_args.model_name_or_path"
            keys = names.setdefault(name, [])
            keys += [key] if key not in keys else []
    return names


def data_roles(config: BaseConfig) -> dict[str, DataArguments]:
    roles: dict[str, DataArguments] = {"actor_train": config.actor_train.data_args}
    return {**roles, "validation": config.validation.data_args} if config.eval_steps else roles


def look_up(config: BaseConfig, say: Callable[[str], None] = logger.info) -> LookUp:
    """Asks for the commit and sizes of everything that is given by name, and fetches each model's config.json.

    `say` is called with a line before the first request.
    """
    prepare_environment(config)
    found, hub = LookUp(), _Hub(say)
    for text, keys in model_names(config).items():
        name = hub_name(text, "model")
        try:
            if name is None:
                convert(text, weights=False)
            else:
                found.downloads.append(_look_up_model(name, keys, hub))
        except HubError as error:
            found.problems.append(Problem(keys[0], str(error)))
    for role, args in data_roles(config).items():
        for text in args.file_name:
            if hub_name(text, "dataset") is None and not is_generated(text):
                continue
            try:
                if is_generated(text):
                    generate(text)
                    continue
                data = _DataFiles.find(text, role, args, hub)
            except HubError as error:
                found.problems.append(Problem(f"{role}.data_args.file_name", str(error)))
            else:
                found.downloads.append(data.download(role))
    return found


def fetch_inputs(config: BaseConfig) -> None:
    """Fetches the models and data files of a run, and replaces their names by names with the commit.

    Raises:
        HubError: with the key, what was looked for, and what to place where.
    """
    prepare_environment(config)
    hub = _Hub(logger.info)
    for text, keys in model_names(config).items():
        name = hub_name(text, "model")
        try:
            if name is None:
                convert(text, weights=True)
            else:
                _replace_model(config, text, fetch_model(name).uri)
        except HubError as error:
            raise HubError(f"{keys[0]}: {error}") from error
    for role, args in data_roles(config).items():
        try:
            args.file_name = [file for text in args.file_name for file in _data_files(text, role, args, hub)]
        except HubError as error:
            raise HubError(f"{role}.data_args.file_name: {error}") from error
        args.subset = args.split = None  # the names of the files say them now


def prepare_environment(config: BaseConfig) -> None:
    """Sets the variables of `system_envs` and `model_download_type` in this process, and so in those it starts."""
    os.environ.update(config.system_envs)
    if config.model_download_type is not None:
        os.environ["USE_MODELSCOPE"] = str(int(config.model_download_type == "MODELSCOPE"))
        config.system_envs.setdefault("USE_MODELSCOPE", os.environ["USE_MODELSCOPE"])


def fetch_model(name: HubName) -> HubName:
    """Fetches what the cache of this machine lacks of a model; returns the name with its commit.

    A complete model of a given commit needs no network; of a branch, the cached commit is used where the hub cannot be
    reached.

    Raises:
        HubError: it is not here and cannot be fetched.
    """
    if name.modelscope:
        from roll.configs.hub.modelscope import fetch_model as fetch_from_modelscope

        return fetch_from_modelscope(name)
    folder = cached_folder(name)
    lacking = missing_model_files(folder) if folder is not None else []
    complete = folder if not lacking else None
    if complete is not None and COMMIT.fullmatch(name.revision or ""):
        return name
    try:
        listing = list_files(name)
        fetch(listing, model_files(listing))
    except HubUnreachable as error:
        if complete is None:
            raise HubUnreachable(_explain(name, error, lacking)) from error
        logger.warning("%s: %s; using commit %s of the cache", name, error, complete.name)
        return HubName("model", name.repo, complete.name)
    except HubError as error:
        raise HubError(_explain(name, error, lacking)) from error
    return listing.pinned


def _replace_model(config: BaseConfig, text: str, pinned: str) -> None:
    for worker in config.device_roles().values():
        if worker.model_args.model_name_or_path == text:
            worker.model_args.model_name_or_path = pinned
    if config.pretrain == text:
        config.pretrain = pinned


MAX_FILES = 10_000
"""Most files and folders in the folder of a dataset; a larger one is another folder, such as that of all data."""


class _Hub:
    """Lists repositories; after one request without an answer it tries no other, so that the wait is not repeated."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._said = say, False
        self._unreachable: HubUnreachable | None = None
        self._listed: dict[HubName, Listing] = {}

    def list_files(self, name: HubName) -> Listing:
        """As `names.list_files`."""
        if self._unreachable is not None:
            raise self._unreachable
        if not self._said and not offline():
            self._say(f"looking up {name} at {endpoint()}")
            self._said = True
        key = HubName(name.kind, name.repo, name.revision)
        try:
            if key not in self._listed:
                self._listed[key] = list_files(key)
        except HubUnreachable as error:
            self._unreachable = error
            raise
        return self._listed[key]


def _look_up_model(name: HubName, keys: list[str], hub: _Hub) -> Download:
    """The files of a model; its config.json is fetched.

    Raises:
        HubError: it is not here and cannot be looked up.
    """
    if name.modelscope:
        from roll.configs.hub.modelscope import look_up_model

        return Download(str(name), keys, *look_up_model(name))
    folder = cached_folder(name)
    lacking = missing_model_files(folder) if folder is not None else []
    try:
        if folder is not None and not lacking and COMMIT.fullmatch(name.revision or ""):
            return _cached_download(name, keys, folder)
        listing = hub.list_files(name)
        files = model_files(listing)
        fetch(listing, [CONFIG_NAME])
    except HubUnreachable as error:
        if folder is not None and not lacking:
            return _cached_download(name, keys, folder)
        raise HubUnreachable(_explain(name, error, lacking)) from error
    except HubError as error:
        raise HubError(_explain(name, error, lacking)) from error
    return _listed_download(str(name), keys, listing, files)


def _cached_download(name: HubName, keys: list[str], folder: Path) -> Download:
    sizes = [path.stat().st_size for path in folder.iterdir() if path.is_file()]
    return Download(str(name), keys, len(sizes), sum(sizes), 0)


def _listed_download(name: str, keys: list[str], listing: Listing, paths: Sequence[str]) -> Download:
    sizes = {file.path: file.size for file in listing.files}
    missing = sum(file.size for file in listing.missing(paths))
    return Download(name, keys, len(paths), sum(sizes[path] for path in paths), missing)


def _explain(name: HubName, error: HubError, lacking: Sequence[str]) -> str:
    """Both readings of a name that is neither a path nor can be fetched, and what to place where."""
    thing = "folder" if name.kind == "model" else "file or folder"
    message = f"{name} is not a {thing} here (in {os.getcwd()}), and it cannot be fetched as a {name.kind}: {error}"
    if not isinstance(error, HubUnreachable):
        return message
    cache = f"the cache {cache_folder()} " + (
        f"lacks {', '.join(lacking[:3])} of it" if lacking else "does not have it"
    )
    option = " --repo-type dataset" if name.kind == "dataset" else ""
    needed = "config.json, tokenizer.json and *.safetensors" if name.kind == "model" else "its parquet or JSONL files"
    return (
        f"{message}; {cache}. Where there is a network, run `hf download {name.repo}{option}` and copy "
        f"{name.storage.name} into that cache, or write the path of a folder with {needed}"
    )


def _data_files(text: str, role: str, args: DataArguments, hub: _Hub) -> list[str]:
    """The files that an entry of `file_name` stands for, those of a hub fetched, generated rows written."""
    if is_generated(text):
        return [str(generate(text))]
    if hub_name(text, "dataset") is not None:
        return _DataFiles.find(text, role, args, hub).fetched()
    return folder_files(Path(text), role, args) if os.path.isdir(text) else [text]


def folder_files(folder: Path, role: str, args: DataArguments) -> list[str]:
    """The files of a subset and split of a dataset in a folder of this machine.

    Raises:
        HubError: it has no such split, or is too large to be the folder of a dataset.
    """
    try:
        return [str(folder / path) for path in choose_files(*_contents(folder), args.subset, _splits(role, args))]
    except SplitError as error:
        raise HubError(f"{folder}: {error}") from error


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


def _splits(role: str, args: DataArguments) -> Sequence[str]:
    if args.split is not None:
        return [args.split]
    return VALIDATION_SPLITS if role == "validation" else ["train"]


@dataclass(frozen=True)
class _DataFiles:
    """Files of a dataset on a hub; without a listing they are in the cache."""

    name: HubName
    paths: list[str]
    listing: Listing | None

    @classmethod
    def find(cls, text: str, role: str, args: DataArguments, hub: _Hub) -> _DataFiles:
        """The files of an entry of `file_name`.

        Raises:
            HubError: the dataset cannot be looked up and is not in the cache, or has no such split or file.
        """
        name = hub_name(text, "dataset")
        assert name is not None
        folder = cached_folder(name)
        try:
            return cls._chosen(name, role, args, folder, hub)
        except HubUnreachable as error:
            raise HubUnreachable(_explain(name, error, [])) from error
        except SplitError as error:
            raise HubError(f"{name}: {error}") from error
        except HubError as error:
            raise HubError(_explain(name, error, [])) from error

    @classmethod
    def _chosen(cls, name: HubName, role: str, args: DataArguments, folder: Path | None, hub: _Hub) -> _DataFiles:
        if folder is not None and COMMIT.fullmatch(name.revision or "") and (folder / name.path).is_file():
            return cls(name, [name.path], None)
        listing: Listing | None = None
        try:
            listing = hub.list_files(name)
            paths, card = listing.paths, ""
            if CARD in paths and not name.path:
                card = (fetch(listing, [CARD]) / CARD).read_text(errors="replace")
        except HubUnreachable:
            if folder is None:
                raise
            name = HubName("dataset", name.repo, folder.name, name.path)
            paths, card = _contents(folder)
        if not name.path:
            return cls(name, choose_files(paths, card, args.subset, _splits(role, args)), listing)
        matching = matching_files(paths, name.path)
        if not matching:
            near = ", ".join(sorted(paths)[:5])
            raise SplitError(f"it has no file {name.path}; it has {near}{', ...' if len(paths) > 5 else ''}")
        return cls(name, matching, listing)

    def download(self, role: str) -> Download:
        """What a run would fetch."""
        key = f"{role}.data_args.file_name"
        if self.listing is not None:
            return _listed_download(str(self.name), [key], self.listing, self.paths)
        folder = cached_folder(self.name)
        sizes = [(folder / path).stat().st_size for path in self.paths] if folder is not None else []
        return Download(str(self.name), [key], len(sizes), sum(sizes), 0)

    def fetched(self) -> list[str]:
        """Fetches the files; their names with the commit."""
        pinned = self.name
        if self.listing is not None:
            fetch(self.listing, self.paths)
            pinned = self.listing.pinned
        return [HubName("dataset", pinned.repo, pinned.revision, path).uri for path in self.paths]


def model_uris(config: BaseConfig) -> Iterator[str]:
    """The models of a run that are names on a hub or GGUF files, for the other nodes to fetch or convert."""
    return (text for text in model_names(config) if hub_name(text, "model") is not None or gguf_file(text))

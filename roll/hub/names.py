"""Names of models and datasets on a hub: what a name means, what the cache has of it, and what the hub lists; no torch.

`owner/name`, `owner/name@revision`, and `hf://datasets/owner/name@revision/path` for files of a dataset name something
on the Hugging Face Hub, or on the server at HF_ENDPOINT. A path that exists always wins over a name. The cache is that
of huggingface_hub, so other programs find what a run has fetched, and a run finds what they have fetched.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from roll.base.errors import RunError

Kind = Literal["model", "dataset"]

NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9]\w*(?:[.-]\w+)*/[A-Za-z0-9]\w*(?:[.-]\w+)*)"
    r"(?:@(?P<revision>refs/(?:convert|pr)/\w+|[\w.-]+))?",
    re.ASCII,
)
"""owner/name@revision."""

COMMIT = re.compile(r"[0-9a-f]{40}")

SCHEMES = {"model": ("hf://", "modelscope://"), "dataset": ("hf://datasets/",)}
"""Beginnings that make a text a name on a hub, whatever exists here."""

FOLDER_WORDS = frozenset(("models", "model", "output", "outputs", "data", "datasets", "checkpoints"))
"""First parts of paths; who means an owner of such a name writes hf://."""

FILE_ENDINGS = frozenset(
    (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".txt", ".arrow", ".gz", ".zip", ".yaml")
    + (".safetensors", ".bin", ".pt", ".pth", ".gguf")
)
"""A text with such an ending is the path of a file."""

CONFIG_NAME = "config.json"
WEIGHTS = "*.safetensors"
WEIGHT_FILE = "model.safetensors"
WEIGHT_INDEX = "model.safetensors.index.json"
ADAPTER_FILES = ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Of a LoRA adapter, as peft writes them."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tiktoken.model")
"""Files of which every folder with a tokenizer has one; without them transformers makes one without tokens."""

GGUF_FORMAT = 2
"""Raised when the folder of a GGUF file is made in another way, so that those of the cache are made again."""


class HubError(RunError):
    """A model or dataset is neither here nor can it be fetched."""


class HubUnreachable(HubError):
    """The hub did not answer, or HF_HUB_OFFLINE forbids asking it."""


@dataclass(frozen=True)
class HubName:
    """The name of a model or dataset on a hub.

    Attributes:
        kind: which of the two.
        repo: `owner/name`.
        revision: commit, branch or tag; None is the default branch.
        path: files of a dataset, `*` and `**` allowed; empty means the dataset.
        modelscope: on ModelScope instead of the Hugging Face Hub.
    """

    kind: Kind
    repo: str
    revision: str | None = None
    path: str = ""
    modelscope: bool = False

    def __str__(self) -> str:
        """As a user writes it."""
        return self.repo + (f"@{self.revision}" if self.revision else "") + (f"/{self.path}" if self.path else "")

    @property
    def uri(self) -> str:
        """As it is read back in any folder."""
        return f"{SCHEMES[self.kind][1 if self.modelscope else 0]}{self}"

    @property
    def storage(self) -> Path:
        """The folder of this repository in the cache."""
        return cache_folder() / f"{self.kind}s--{self.repo.replace('/', '--')}"

    @property
    def page(self) -> str:
        return f"{endpoint()}/{'datasets/' if self.kind == 'dataset' else ''}{self.repo}"


def hub_name(text: str, kind: Kind) -> HubName | None:
    """The name on a hub that `text` is by its form; None for a path, so that no misspelt path is sent over a network.

    A path is what exists, what lies in a folder that exists or has a folder's usual name, what ends like a file, and
    whatever is not `owner/name`.
    """
    for scheme in SCHEMES[kind]:
        if text.startswith(scheme):
            return _parse(text.removeprefix(scheme), kind, scheme == "modelscope://")
    parent = text.partition("/")[0]
    if parent in FOLDER_WORDS or os.path.exists(text) or os.path.exists(parent):
        return None
    name = _parse(text, kind, kind == "model" and _is_on("USE_MODELSCOPE"))
    return None if name is None or name.path or Path(text).suffix.lower() in FILE_ENDINGS else name


def _parse(text: str, kind: Kind, modelscope: bool) -> HubName | None:
    match = NAME.match(text)
    if match is None:
        return None
    rest = text[match.end() :]
    if rest and (kind == "model" or not rest.startswith("/") or ".." in rest.split("/")):
        return None
    return HubName(kind, match["repo"], match["revision"], rest.strip("/"), modelscope)


def other_reading(text: str, kind: Kind) -> str:
    """For messages about a path that does not exist: how to write it as a name on the hub, if it could be one."""
    scheme = SCHEMES[kind][0]
    if text.startswith(SCHEMES[kind]):
        return f"; a name on the hub is {scheme}owner/name, with @revision where it is not the default branch"
    if not NAME.fullmatch(text) or Path(text).suffix.lower() in FILE_ENDINGS:
        return ""
    parent = text.partition("/")[0]
    if parent in FOLDER_WORDS and not os.path.isdir(parent):
        return f"; write a path that exists, or the name of a {kind} on the hub, owner/name"
    found = sorted(name for name in os.listdir(parent) if not name.startswith(".")) if os.path.isdir(parent) else []
    holds = f" ({parent} has {', '.join(found[:5])})" if found else ""
    return f"{holds}; for the name on the hub write {scheme}{text}"


def _is_on(variable: str) -> bool:
    """Whether an environment variable says yes, in the spellings of huggingface_hub."""
    return os.environ.get(variable, "").upper() in ("1", "ON", "YES", "TRUE")


def offline() -> bool:
    return _is_on("HF_HUB_OFFLINE") or _is_on("TRANSFORMERS_OFFLINE")


def endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def cache_folder() -> Path:
    """The cache of huggingface_hub; read at each call, because `system_envs` may set it."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{caches}/huggingface"
    hub = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(os.path.expandvars(hub)).expanduser()


def cached_folder(name: HubName) -> Path | None:
    """The snapshot of the revision in the cache, complete or not; no network."""
    if name.modelscope:
        from roll.hub.modelscope import cached_model

        return cached_model(name)
    revision = name.revision or "main"
    try:
        commit = revision if COMMIT.fullmatch(revision) else (name.storage / "refs" / revision).read_text().strip()
    except OSError:
        return None
    folder = name.storage / "snapshots" / commit
    return folder if folder.is_dir() else None


def local_model(text: str | Path) -> Path:
    """The folder of a model: a path as it is, a name on the hub or a GGUF file as its folder in the cache; no network.

    A name that is not in the cache is returned as a path, which does not exist.
    """
    name = hub_name(str(text), "model")
    if name is None:
        file = gguf_file(text)
        return Path(text) if file is None else converted_folder(file)
    return cached_folder(name) or Path(text)


def gguf_file(text: str | Path) -> Path | None:
    """The GGUF file that names a model: the path itself, or the only one in a folder without safetensors."""
    path = Path(text)
    if path.suffix.lower() == ".gguf":
        return path if os.path.isfile(path) else None
    if not os.path.isdir(path) or any(path.glob(WEIGHTS)):
        return None
    files = list(path.glob("*.gguf"))
    return files[0] if len(files) == 1 else None


def converted_folder(file: Path) -> Path:
    """Where the cache has the model of a GGUF file; another size or time of change makes it another model."""
    status = file.stat()
    identity = f"{GGUF_FORMAT} {file.resolve()} {status.st_size} {status.st_mtime_ns}"
    return cache_folder() / ".gguf" / f"{file.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


def local_file(text: str | Path) -> Path:
    """A data file: a path as it is, a file of a hub or generated rows as their copy in the cache; no network."""
    from roll.hub.generated import Generated, is_generated

    if is_generated(str(text)):
        return Generated.parse(str(text)).file
    name = hub_name(str(text), "dataset")
    folder = cached_folder(name) if name is not None else None
    return folder / name.path if folder is not None and name is not None else Path(text)


def missing_model_files(folder: Path) -> list[str]:
    """What a folder lacks of a model that can be run: config.json, the safetensors of its index, a tokenizer."""
    lacking = [] if (folder / CONFIG_NAME).is_file() else [CONFIG_NAME]
    weights = [WEIGHT_FILE]
    if (folder / WEIGHT_INDEX).is_file():
        weights = sorted(set(json.loads((folder / WEIGHT_INDEX).read_text())["weight_map"].values()))
    lacking += [file for file in weights if not (folder / file).is_file()]
    return lacking if has_tokenizer(folder) else [*lacking, TOKENIZER_FILES[0]]


def missing_adapter_files(folder: Path) -> list[str]:
    return [file for file in ADAPTER_FILES if not (folder / file).is_file()]


def has_tokenizer(folder: Path) -> bool:
    return any((folder / file).is_file() for file in TOKENIZER_FILES)

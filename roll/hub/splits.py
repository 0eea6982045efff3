"""Which files of a dataset a subset and a split are, by the dataset's card or else by the names of its files.

These are the rules of the `datasets` library for files of rows: `configs` at the head of README.md lists the files of
each subset and split; without it the split is part of a file's or a folder's name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

READABLE = (".jsonl", ".json", ".parquet")
"""Endings of files of rows; .json holds one list of objects, or one object per line like .jsonl."""

CARD = "README.md"

VALIDATION_SPLITS = ("validation", "test")
"""Splits that validation reads where none is given, the first that exists."""

SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Names of a split within names of files."""

SHARD = re.compile(r"(?:^|/)([\w.-]+?)-\d{5}-of-\d{5}(?:-\w+)?\.\w+$")
"""split-00000-of-00002.parquet, as the `datasets` library writes files."""

Patterns = dict[str, list[str]]
"""Patterns of files by split."""


class SplitError(ValueError):
    """A dataset does not have the subset or split; the message lists the available ones."""


def wanted_splits(role: str, split: str | None) -> Sequence[str]:
    """The given split, or those that the data of a role is taken from."""
    if split is not None:
        return [split]
    return VALIDATION_SPLITS if role == "validation" else ["train"]


def choose_files(paths: Sequence[str], card: str, subset: str | None, splits: Sequence[str]) -> list[str]:
    """The files of a subset and split, in the order of their names.

    Args:
        paths: all files of the dataset, relative to it.
        card: text of its README.md; empty where there is none.
        subset: None takes the only one, or the one that the card marks as the default.
        splits: the first of them that the dataset has is taken.

    Raises:
        SplitError: there is no such subset or split, or no file of a kind that can be read.
    """
    for split in splits:
        if re.search(r"[\[\]+]", split):
            raise SplitError(f"split {split!r} is more than a name; write one, such as train")
    readable = sorted(path for path in paths if path.endswith(READABLE) and not _is_metadata(path))
    if not readable:
        endings = sorted({"." + path.rpartition(".")[2] for path in paths if "." in path.rpartition("/")[2]})
        raise SplitError(f"it has no file ending in {', '.join(READABLE)}; its files end in {', '.join(endings)}")
    of_split = _files_by_split(readable, _subset(_configs(card), subset, readable))
    found = next((of_split[split] for split in splits if of_split.get(split)), None)
    if found is None:
        has = ", ".join(sorted(split for split, files in of_split.items() if files))
        raise SplitError(f"it has no split {' or '.join(splits)}; its splits: {has or 'none'}")
    return found


def matching_files(paths: Iterable[str], pattern: str) -> list[str]:
    """The files that a path names, `*` and `**` allowed; `*` does not cross folders."""
    text = re.escape(pattern).replace(r"\*\*/", "(?:.*/)?").replace(r"\*\*", ".*").replace(r"\*", "[^/]*")
    expression = re.compile(text.replace(r"\?", "[^/]"))
    return sorted(path for path in paths if expression.fullmatch(path))


def _is_metadata(path: str) -> bool:
    return (
        path.endswith(".json") and re.search(r"(^|[/_])(dataset_infos?|state|config|metadata)\.json$", path) is not None
    )


def _configs(card: str) -> dict[str, Mapping[str, Any]]:
    """The entries of `configs` at the head of a card, by name, the default one first."""
    head = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", card, re.DOTALL)
    try:
        data = yaml.safe_load(head[1]) if head else None
    except yaml.YAMLError:
        return {}
    listed = data.get("configs") if isinstance(data, dict) else None
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    entries.sort(key=lambda entry: not (entry.get("default") or entry.get("config_name", "default") == "default"))
    return {str(entry.get("config_name", "default")): entry for entry in entries}


def _subset(configs: Mapping[str, Mapping[str, Any]], subset: str | None, paths: Sequence[str]) -> Patterns | str:
    """The patterns of a subset by split, or the folder in which file names tell the split."""
    if not configs:
        folders = {path.partition("/")[0] for path in paths if "/" in path}
        if subset is not None and subset not in folders | {"default"}:
            raise SplitError(f"it has no subset {subset}; its folders: {', '.join(sorted(folders)) or 'none'}")
        return f"{subset}/" if subset in folders else ""
    names = list(configs)
    if subset is None:
        first = configs[names[0]]
        if len(names) > 1 and not first.get("default") and names[0] != "default":
            raise SplitError(f"it has the subsets {', '.join(names)}; choose one with data_args.subset")
        subset = names[0]
    if subset not in configs:
        raise SplitError(f"it has no subset {subset}; its subsets: {', '.join(names)}")
    folder = str(configs[subset].get("data_dir") or "").strip("/")
    prefix = f"{folder}/" if folder else ""
    files = configs[subset].get("data_files")
    return prefix if files is None else _patterns(files, prefix)


def _patterns(files: Any, prefix: str) -> Patterns:
    """`data_files` of a card: one pattern, a list of them, or a list or mapping with the patterns of each split."""
    if isinstance(files, dict):
        pairs = list(files.items())
    elif isinstance(files, list) and files and all(isinstance(item, dict) for item in files):
        pairs = [(item.get("split", "train"), item.get("path", [])) for item in files]
    else:
        pairs = [("train", files)]
    patterns: Patterns = {}
    for split, paths in pairs:
        listed = paths if isinstance(paths, list) else [paths]
        patterns.setdefault(str(split), []).extend(prefix + str(path).removeprefix("./") for path in listed)
    return patterns


def _files_by_split(paths: Sequence[str], where: Patterns | str) -> dict[str, list[str]]:
    if not isinstance(where, str):
        found = {split: [matching_files(paths, item) for item in patterns] for split, patterns in where.items()}
        return {split: sorted({path for part in parts for path in part}) for split, parts in found.items()}
    inside = [path for path in paths if path.startswith(where)]
    of_split: dict[str, list[str]] = {}
    for path in inside:
        split = _split_of(path.removeprefix(where))
        if split is not None:
            of_split.setdefault(split, []).append(path)
    return of_split or {"train": inside}


def _split_of(path: str) -> str | None:
    """The split that the name of a file or of one of its folders tells."""
    shard = SHARD.search(path)
    if shard is not None:
        return shard[1]
    parts = re.split(r"[/._ \d-]+", path.lower())
    return next((split for split, names in SPLIT_NAMES.items() if any(name in parts for name in names)), None)

"""A configuration given as a file or as keys, checked as the command line does."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from roll.configs.user_code import search_modules_beside
from roll.loading.load import AnyConfig, load_config

CONFIG_FILE = "from_python.yaml"
"""In the run's folder: the keys without overrides, with which `roll run` can continue it."""


@dataclass(frozen=True)
class GivenConfig:
    """A checked configuration and what it was made from.

    Attributes:
        config: complete.
        tree: its keys, with absolute paths of base files.
        file: absolute, where a file was given.
    """

    config: AnyConfig
    tree: dict[str, Any]
    file: Path | None


def checked_config(
    config: str | Path | Mapping[str, Any], overrides: Sequence[str], needs_data: bool = True
) -> GivenConfig:
    """Files that `defaults` names in keys are relative to the current folder; data files must be named if `needs_data`.

    Raises:
        ConfigError: the configuration cannot be used.
    """
    file = Path(config).absolute() if isinstance(config, str | Path) else None
    tree = _with_absolute_bases({"defaults": str(file)} if isinstance(config, str | Path) else config)
    for base in tree["defaults"]:
        search_modules_beside(base)
    with tempfile.TemporaryDirectory(prefix="roll-") as made:  # unknown keys of a base file would only be left out
        checked = load_config(file or write_keys(tree, Path(made)), overrides, needs_data=needs_data)
        return GivenConfig(checked, tree, file)


def _with_absolute_bases(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys, with the files that `defaults` names in the current folder."""
    bases = keys.get("defaults", [])
    return {**keys, "defaults": [str(Path(each).absolute()) for each in ([bases] if isinstance(bases, str) else bases)]}


def write_keys(tree: Mapping[str, Any], folder: Path) -> Path:
    """Writes CONFIG_FILE into a folder, and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / CONFIG_FILE
    plain = json.loads(json.dumps(tree, default=str))  # paths as text
    file.write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")
    return file

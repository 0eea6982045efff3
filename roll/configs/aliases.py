"""Other spellings of keys and values that published recipes use: the one place where they are known."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from roll.configs.errors import ConfigError, Problem

Tree = dict[str, Any]
"""A configuration as nested plain mappings."""

KEYS = {
    "num_gpus_per_node": "num_devices_per_node",
    "rpc_timeout": "rpc_timeout_s",
    "sync_timeout": "sync_timeout_s",
    "sync_retry_delay": "sync_retry_delay_s",
    "generation_timeout": "generation_timeout_s",
}
"""Spelling in other recipes -> key here; they apply at any depth."""

VALUES: dict[str, dict[Any, Any]] = {
    "kl_penalty": {"kl": "k1", "mse": "k2"},
    "top_k": {-1: 0},
}
"""Key -> value in other recipes -> value here that means the same."""


def rename(tree: Mapping[str, Any], source: str) -> Tree:
    """The tree with the keys of `KEYS` under their names here, also inside `${...}`.

    Raises:
        ConfigError: both spellings of one key are given.
    """
    renamed: Tree = {}
    for key, value in tree.items():
        name = KEYS.get(key, key)
        if name in renamed or (name != key and name in tree):
            raise ConfigError([Problem(key, f"is the other spelling of {name}, which is given too; keep one")], source)
        renamed[name] = _renamed_value(value, source)
    return renamed


def _renamed_value(value: Any, source: str) -> Any:
    if isinstance(value, Mapping):
        return rename(value, source)
    if isinstance(value, list):
        return [_renamed_value(item, source) for item in value]
    if isinstance(value, str) and "${" in value:
        return re.sub(r"(?<=[{.])(\w+)(?=[.}])", lambda match: KEYS.get(match[1], match[1]), value)
    return value


def translate(tree: Tree, path: str = "") -> tuple[Tree, list[Problem]]:
    """The tree with the values of `VALUES` in their spelling here, and a note on each."""
    translated: Tree = {}
    notes: list[Problem] = []
    for key, value in tree.items():
        where = f"{path}.{key}" if path else key
        translated[key] = value
        if isinstance(value, dict):
            translated[key], inner = translate(value, where)
            notes += inner
        elif isinstance(value, str | int) and not isinstance(value, bool) and value in VALUES.get(key, {}):
            translated[key] = VALUES[key][value]
            notes.append(Problem(where, f"{value} is read as {translated[key]}"))
    return translated, notes

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
    "batch_timeout": "batch_timeout_s",
    "batch_deadline": "batch_deadline_s",
    "batch_generation_interval": "batch_generation_interval_s",
}
"""Spelling in other recipes -> key here; they apply at any depth."""

PLACES = {
    "async_training.generation_timeout": "actor_infer.generation_timeout_s",
    "async_training.max_sync_retries": "max_sync_retries",
    "async_training.sync_timeout": "sync_timeout_s",
    "async_training.sync_retry_delay": "sync_retry_delay_s",
    "rollout_gpu_ids": "actor_infer.device_mapping",
    "train_gpu_ids": "actor_train.device_mapping",
    "buffer_size": "async_generation_ratio",
    "max_staleness": "async_training.max_staleness_allowed",
    "bypass_mode": "old_log_probs_source",
    "env_monitor.hung_timeout": "trajectory_timeout_s",
}
"""Path in other recipes -> path here."""

PLACE_VALUES: dict[str, dict[bool, str]] = {"bypass_mode": {True: "behavior", False: "recompute"}}
"""Path of `PLACES` -> its values -> values of the path here, where they differ."""

VALUES: dict[str, dict[Any, Any]] = {
    "kl_penalty": {"kl": "k1", "mse": "k2"},
    "top_k": {-1: 0},
}
"""Key -> value in other recipes -> value here that means the same."""


def settle(tree: Mapping[str, Any], source: str, notes: list[Problem]) -> Tree:
    """One file or all overrides in the spelling used here, so that whichever wins does so whatever its spelling.

    Args:
        tree: as written.
        source: for messages.
        notes: gets one for every key that takes effect at another place.

    Raises:
        ConfigError: both spellings of one key are given, or a value has no meaning.
    """
    return rename(_move(tree, source, notes), source)


def _move(tree: Mapping[str, Any], source: str, notes: list[Problem]) -> Tree:
    """The tree with the paths of `PLACES` where they belong."""
    moved = dict(tree)
    for path, target in PLACES.items():
        head, _, key = path.rpartition(".")
        section = moved.get(head) if head else moved
        if not isinstance(section, Mapping) or key not in section:
            continue
        if _is_given(moved, target):
            advice = f"is the other spelling of {target}, which is given too; keep one"
            raise ConfigError([Problem(path, advice)], source)
        there = target.rpartition(".")[0]
        if there and not isinstance(moved.get(there) or {}, Mapping):
            raise ConfigError([Problem(there, f"{moved[there]!r} is not a section of `key: value` lines")], source)
        value, note = _value_there(path, target, section[key], source)
        notes.append(note)
        moved = _put(_without(moved, head, key), target, value)
    return moved


def _value_there(path: str, target: str, value: Any, source: str) -> tuple[Any, Problem]:
    """The value that a path of `PLACES` has there, and the note that says so."""
    values = PLACE_VALUES.get(path)
    if values is None:
        return value, Problem(path, f"is read as {target}")
    if not isinstance(value, bool):
        raise ConfigError([Problem(path, f"{value!r} is not true or false")], source)
    return values[value], Problem(path, f"{str(value).lower()} is read as {target}: {values[value]}")


def _without(tree: Tree, head: str, key: str) -> Tree:
    """The tree without a key of a section (or of the top, where `head` is empty), nor a section that this empties."""
    if not head:
        return {name: item for name, item in tree.items() if name != key}
    rest = {name: item for name, item in tree[head].items() if name != key}
    return {**tree, head: rest} if rest else {name: item for name, item in tree.items() if name != head}


def _is_given(tree: Mapping[str, Any], path: str) -> bool:
    """Whether the path stands in the tree, in any spelling of its last part."""
    head, _, key = path.rpartition(".")
    section = tree.get(head) if head else tree
    return isinstance(section, Mapping) and any(KEYS.get(name, name) == key for name in section)


def _put(tree: Tree, path: str, value: Any) -> Tree:
    """The tree with a value at a path of one or two parts."""
    head, _, key = path.rpartition(".")
    if not head:
        return {**tree, key: value}
    section = tree.get(head)
    return {**tree, head: {**section, key: value} if isinstance(section, Mapping) else {key: value}}


def rename(tree: Mapping[str, Any], source: str) -> Tree:
    """The tree with the keys of `KEYS` under their names here; inside `${...}` those of `PLACES` too.

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
        value = re.sub(r"(?<=\$\{)([\w.]+)(?=\})", lambda match: PLACES.get(match[1], match[1]), value)
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

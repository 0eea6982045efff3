"""Renames, moves, translates or refuses keys in the spelling of other frameworks, by the tables of this folder."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

from roll.configs.compat import (
    MEGATRON,
    Names,
    Tree,
    UnsupportedKey,
    async_trainers,
    roll,
    set_at,
    slime,
    trl,
    two_spellings,
    verl,
    vllm,
    without,
)
from roll.configs.compat.async_trainers import WEIGHT_RANGE, WEIGHT_SWITCH
from roll.configs.errors import ConfigError, Problem
from roll.configs.schema import SECTION, value_at

SHORT_NAMES: Names = {
    "tp_size": (f"{MEGATRON}.tensor_model_parallel_size", "actor_infer.num_gpus_per_worker"),
    "pp_size": f"{MEGATRON}.pipeline_model_parallel_size",
}
"""Short names used by many frameworks."""

MIGRATION: dict[str, tuple[str, ...]] = {
    name: (ours,) if isinstance(ours, str) else ours
    for table in (verl.NAMES, slime.NAMES, trl.NAMES, SHORT_NAMES)
    for name, ours in table.items()
}
"""Name in another framework -> keys of this project; docs/coming_from.md has the same tables."""

RENAMED_KEYS = roll.RENAMED_KEYS | async_trainers.RENAMED_KEYS
"""Other spelling -> key of this project, at any depth."""

MOVED_KEYS = async_trainers.MOVED_KEYS | verl.MOVED_KEYS | roll.MOVED_KEYS
"""Path in another framework -> path in this project."""

MOVED_VALUES = verl.MOVED_VALUES
"""Path of `MOVED_KEYS` -> its values -> values of the path in this project, where they differ."""

RENAMED_VALUES: dict[str, dict[Any, Any]] = {**verl.RENAMED_VALUES, **vllm.RENAMED_VALUES, **roll.RENAMED_VALUES}
"""Key -> value in another framework -> value of this project with the same meaning."""

UNSUPPORTED_KEYS: tuple[UnsupportedKey, ...] = (*verl.UNSUPPORTED_KEYS, *roll.UNSUPPORTED_KEYS)
"""Keys without a counterpart; the first matching pattern applies."""

STUDENT_ROLE, PURE_OPD_KIND = "student_train", "pure_opd_pipeline_type"
"""The role that learns from a teacher alone in recipes of ROLL, and the key whose default in ROLL is rlvr."""

SFT_ROLE = "sft_train"
"""The role that is trained in recipes of ROLL for supervised fine-tuning."""

OPAQUE_SECTIONS = ("env_config",)
"""Sections whose keys belong to a class of the user."""

AMBIGUOUS_WORDS = ("n", "name", "path")
"""Last parts of names that mean nothing without the parts before them."""


def migration(path: str) -> tuple[str, ...]:
    """This project's keys for an unknown path of another framework, or for its end; empty if no table has it."""
    for end in _ends(path):
        if end in MIGRATION:
            return MIGRATION[end]
        section = end.rpartition(".")[0]
        if f"{section}.*" in MIGRATION:
            return MIGRATION[f"{section}.*"]
    return ()


def migration_of_last_part(path: str) -> tuple[str, ...]:
    """As `migration`, for a path that leaves out the sections of a name: `lr` for `actor.optim.lr`."""
    for end in _ends(path):
        found = [ours for name, keys in MIGRATION.items() if name.endswith(f".{end}") for ours in keys]
        if found and end not in AMBIGUOUS_WORDS:
            return tuple(dict.fromkeys(found))
    return ()


def _ends(path: str) -> list[str]:
    """The path, and the path without its first part, its first two, and so on."""
    parts = path.split(".")
    return [".".join(parts[index:]) for index in range(len(parts))]


def normalize_aliases(tree: Mapping[str, Any], source: str, notes: list[Problem]) -> Tree:
    """One file or all overrides in the spelling of this project, so that an override wins in any spelling.

    Args:
        tree: as written.
        source: for messages.
        notes: receives one remark for every moved key.

    Raises:
        ConfigError: two spellings of one key are given, or a value has no meaning.
    """
    moved = _with_sft_role(async_trainers.read_trainer_type(tree, source, notes), source)
    if STUDENT_ROLE in moved:
        moved = {PURE_OPD_KIND: "rlvr"} | moved
    for path, target in MOVED_KEYS.items():
        head, _, key = path.rpartition(".")
        section = value_at(moved, head) if head else moved
        if not isinstance(section, Mapping) or key not in section:
            continue
        target_head, _, target_key = target.rpartition(".")
        target_section = value_at(moved, target_head) if target_head else moved
        given = target_section if isinstance(target_section, Mapping) else {}
        if target_key in given and given[target_key] == section[key]:
            notes.append(Problem(path, f"says the same as {target}"))
            moved = without(moved, path)
            continue
        if any(RENAMED_KEYS.get(name, name) == target_key for name in given):
            raise ConfigError([two_spellings(path, target)], source)
        if target_head and not isinstance(target_section or {}, Mapping):
            raise ConfigError([Problem(target_head, f"{target_section!r} is not {SECTION}")], source)
        value, note = _moved_value(path, target, section[key], source)
        if target not in (WEIGHT_SWITCH, WEIGHT_RANGE):  # what they mean is noted by expand_importance_sampling
            notes.append(note)
        moved = set_at(without(moved, path), target, value)
    renamed: Tree = _renamed(moved, source)
    return renamed


def _with_sft_role(tree: Tree, source: str) -> Tree:
    """The tree with ROLL's role of supervised fine-tuning as `actor_train`; the role also selects the pipeline."""
    if SFT_ROLE not in tree:
        return tree
    if RENAMED_KEYS[SFT_ROLE] in tree:
        raise ConfigError([two_spellings(SFT_ROLE, RENAMED_KEYS[SFT_ROLE])], source)
    return {"pipeline": "sft"} | {RENAMED_KEYS.get(key, key) if key == SFT_ROLE else key: tree[key] for key in tree}


def _moved_value(path: str, target: str, value: Any, source: str) -> tuple[Any, Problem]:
    values = MOVED_VALUES.get(path)
    if values is None:
        return value, Problem(path, f"is read as {target}")
    if not isinstance(value, bool):
        raise ConfigError([Problem(path, f"{value!r} is not true or false")], source)
    return values[value], Problem(path, f"{str(value).lower()} is read as {target}: {values[value]}")


def _renamed(value: Any, source: str, opaque: bool = False) -> Any:
    """A value with the keys of `RENAMED_KEYS` renamed; inside `${...}` those of `MOVED_KEYS` too.

    Of a section of a user's class, which is `opaque`, only the references inside `${...}` are renamed.
    """
    if isinstance(value, Mapping):
        renamed: Tree = {}
        for key, item in value.items():
            name = RENAMED_KEYS[key] if key in RENAMED_KEYS and not opaque else key
            if name in renamed or (name != key and name in value):
                raise ConfigError([two_spellings(key, name)], source)
            renamed[name] = _renamed(item, source, opaque or key in OPAQUE_SECTIONS)
        return renamed
    if isinstance(value, list):
        return [_renamed(item, source, opaque) for item in value]
    if isinstance(value, str) and "${" in value:
        value = re.sub(r"(?<=\$\{)([\w.]+)(?=\})", lambda match: MOVED_KEYS.get(match[1], match[1]), value)
        return re.sub(r"(?<=[{.])(\w+)(?=[.}])", lambda match: RENAMED_KEYS.get(match[1], match[1]), value)
    return value


def translate_values(tree: Tree, path: str = "") -> tuple[Tree, list[Problem]]:
    """The tree with the values of `RENAMED_VALUES` in the spelling of this project, and a remark on each."""
    translated: Tree = {}
    notes: list[Problem] = []
    for key, value in tree.items():
        where = f"{path}.{key}" if path else key
        translated[key] = value
        if isinstance(value, dict) and key not in OPAQUE_SECTIONS:
            translated[key], inner = translate_values(value, where)
            notes += inner
        elif isinstance(value, str | int) and not isinstance(value, bool) and value in RENAMED_VALUES.get(key, {}):
            translated[key] = RENAMED_VALUES[key][value]
            notes.append(Problem(where, f"{value} is read as {translated[key]}"))
    return translated, notes


@cache
def _unsupported_keys(name: str) -> list[UnsupportedKey]:
    """The entries of `UNSUPPORTED_KEYS` for keys of this name."""
    return [item for item in UNSUPPORTED_KEYS if item.matches_name(name)]


def drop_unsupported_keys(tree: Tree, pipeline: str, path: str = "") -> tuple[Tree, list[Problem], list[Problem]]:
    """The tree without unsupported keys, remarks on the harmless ones, and problems for the others."""
    kept: Tree = {}
    notes: list[Problem] = []
    problems: list[Problem] = []
    for key, value in tree.items():
        where = f"{path}.{key}" if path else str(key)
        unsupported = next(
            (
                item
                for item in _unsupported_keys(where.rpartition(".")[2])
                if pipeline in item.pipelines and item.matches(where)
            ),
            None,
        )
        if unsupported is None and isinstance(value, dict) and key not in OPAQUE_SECTIONS:
            kept[key], inner_notes, inner_problems = drop_unsupported_keys(value, pipeline, where)
            notes += inner_notes
            problems += inner_problems
        elif unsupported is None:
            kept[key] = value
        elif unsupported.harmless(value):
            if not unsupported.silent:
                notes.append(Problem(where, f"has no effect: {unsupported.reason}"))
        else:
            shown = "this section" if isinstance(value, dict) else str(value)
            problems.append(Problem(where, f"{shown} is not available: {unsupported.reason}"))
    return kept, notes, problems


def read_systems(
    tree: Tree, pipeline: str, notes: Sequence[Problem], overridden: Collection[str]
) -> tuple[Tree, list[Problem], list[Problem]]:
    """The tree with the keys of other frameworks that concern several keys of this project, remarks, and problems.

    Args:
        tree: all files and overrides together, interpolated.
        pipeline: rlvr, agentic or sft.
        notes: remarks of `normalize_aliases`.
        overridden: paths that the command line sets.
    """
    tree, buffer_remarks, buffer_problems = async_trainers.read_buffer_size(tree, notes)
    tree, pool_remarks, pool_problems = verl.place_pools(tree, pipeline, overridden)
    tree, correction_remarks, correction_problems = verl.read_rollout_correction(tree)
    remarks = buffer_remarks + pool_remarks + correction_remarks
    return tree, remarks, buffer_problems + pool_problems + correction_problems


def expand_importance_sampling(tree: Tree) -> tuple[Tree, list[Problem], list[Problem]]:
    """The tree with `importance_sampling` and its range as `correction.weights`, a remark on it, and problems.

    Without a range the bounds are the defaults of `correction.weights`.
    """
    rest = {key: value for key, value in tree.items() if key not in (WEIGHT_SWITCH, WEIGHT_RANGE)}
    if WEIGHT_SWITCH not in tree and WEIGHT_RANGE not in tree:
        return rest, [], []
    problem = _importance_sampling_problem(tree)
    if problem is not None:
        return rest, [], [problem]
    if not tree[WEIGHT_SWITCH]:
        return rest, [Problem(WEIGHT_SWITCH, "false is the default and does not change correction.weights")], []
    correction = tree.get("correction") or {}
    if not isinstance(correction, dict):
        return rest, [], []  # conversion reports the section
    weights: Tree = {"level": "token", "mode": "clamp"}
    if WEIGHT_RANGE in tree:
        weights["lower"], weights["upper"] = tree[WEIGHT_RANGE]
    shown = ", ".join(f"{key}: {value}" for key, value in weights.items())
    rest["correction"] = {**correction, "weights": weights}
    return rest, [Problem(WEIGHT_SWITCH, f"true is read as correction.weights {{{shown}}}")], []


def _importance_sampling_problem(tree: Tree) -> Problem | None:
    switch, correction = tree.get(WEIGHT_SWITCH, False), tree.get("correction")
    if not isinstance(switch, bool):
        return Problem(WEIGHT_SWITCH, f"{switch!r} is not true or false; use true")
    if isinstance(correction, dict) and "weights" in correction and WEIGHT_SWITCH in tree:
        return two_spellings(WEIGHT_SWITCH, "correction.weights")
    if not switch:
        return Problem(WEIGHT_RANGE, f"has no effect without {WEIGHT_SWITCH}: true") if WEIGHT_RANGE in tree else None
    bounds = tree.get(WEIGHT_RANGE, [0, 1])
    numbers = isinstance(bounds, list) and all(type(item) in (int, float) for item in bounds)
    if not numbers or len(bounds) != 2:
        return Problem(WEIGHT_RANGE, f"{bounds!r} is not a lower and an upper bound; write [0.5, 2.0]")
    return None

"""Loads a YAML file and overrides as a checked configuration."""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Collection, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from roll.algorithms.estimators import ADV_ESTIMATORS
from roll.algorithms.policy_loss import POLICY_LOSSES
from roll.algorithms.registry import Algorithm
from roll.base.custom_modules import use_custom_modules
from roll.base.errors import ConfigError, Problem
from roll.base.schema import (
    ConfigSource,
    Converter,
    Tree,
    and_above,
    declared,
    known_keys,
    leaves,
    one_or_many,
    value_at,
)
from roll.base.text import nearest
from roll.compat.capabilities import missing_capabilities
from roll.compat.names import NAMES, SHORT_NAMES, VALUE_HINTS
from roll.compat.systems.roll_recipes import PAIR_KEYS
from roll.compat.translate import MOVED, SPELLINGS, translate
from roll.configs.agentic import AgenticConfig
from roll.configs.check import check, check_keys
from roll.configs.defaults import fill_in_defaults
from roll.configs.environments import TryEnvironment
from roll.configs.pipeline import DPOConfig, RewardModelConfig, RLConfig, RLVRConfig, RLVREngineRewardConfig, SFTConfig
from roll.configs.trackers import TRACKER_OPTIONS, nest_tracker_kwargs
from roll.configs.user_code import failure_text
from roll.loading.suggestions import VERY_SIMILAR, ForeignNames, drop_keys_of_other_roles, suggest_for
from roll.loading.yaml_files import interpolate, merge, nesting_refused, override_tree, read_tree, referenced

AnyConfig = RLVRConfig | SFTConfig | AgenticConfig | DPOConfig | RewardModelConfig
"""The configuration of one run."""

PIPELINES: dict[str, type[AnyConfig]] = {
    "rlvr": RLVRConfig,
    "sft": SFTConfig,
    "agentic": AgenticConfig,
    "dpo": DPOConfig,
    "reward_model": RewardModelConfig,
}
"""Values of the key `pipeline`."""

ENGINE_REWARD = ("reward.strategy_args.strategy_name", "sglang")
"""Key and value that make the ranks of a reward model engines, which have other keys."""

FOREIGN = ForeignNames(NAMES, SHORT_NAMES, VALUE_HINTS, (*NAMES, *MOVED))
"""Names of keys in other systems."""

KNOWN_KEYS = {key.path for root in PIPELINES.values() for key in known_keys(root) if "." not in key.path}
"""Top-level keys of any pipeline."""

AGENTIC_KEYS = declared(AgenticConfig).keys() - declared(RLVRConfig).keys()
"""Keys by which a file without the key `pipeline` is recognised as agentic."""


MISSPELLED = 0.9
"""Least similarity of a section of a base file to a known one for it to be refused as misspelled."""

HOME = re.compile(r"~[\w.-]*/")
"""Beginning of a path below a home folder."""

NAMED = ("rewards", "custom_envs")
"""Sections whose entries have names of the user; null takes an entry of a base file out."""


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    pipeline: str | None = None,
    try_environment: TryEnvironment | None = None,
    needs_data: bool = True,
) -> AnyConfig:
    """The complete configuration of one run: interpolated, defaults filled in, every rule checked.

    Models and datasets need not be on this machine.

    Args:
        path: YAML file; `defaults` in it lists base files.
        overrides: `a.b=value`, values in YAML.
        pipeline: the pipeline that the file must be for; None takes its key `pipeline`, else the pipeline its other
            keys belong to, else rlvr.
        try_environment: creates an environment of `custom_envs` to check its options, which are not checked without.
        needs_data: whether data files must be named.

    Raises:
        ConfigError: with every unknown key, wrong type and value out of bounds; if there are none, with every broken
            rule.
    """
    notes: list[Problem] = []
    own: set[str] = set()
    with nesting_refused(str(path)):
        base, top = read_tree(Path(path), notes, keys=own), override_tree(overrides, notes)
        tree, overridden = merge(base, top), set(leaves(top))
        given = own | top.keys()
        return build_config(tree, pipeline, str(path), notes, overridden, given, try_environment, needs_data)


def read_pipeline(path: str | Path, overrides: Sequence[str] = ()) -> str:
    """The pipeline of a file with overrides; nothing else is checked.

    Raises:
        ConfigError: they cannot be read, or the pipeline is unknown.
    """
    tree = merge(read_tree(Path(path), []), override_tree(overrides, []))
    return _pipeline(interpolate(tree, str(path))[0], None, str(path))


def build_config(
    tree: Tree,
    pipeline: str | None = None,
    source: str = "",
    notes: Sequence[Problem] = (),
    overridden: Collection[str] = (),
    own: Collection[str] | None = None,
    try_environment: TryEnvironment | None = None,
    needs_data: bool = True,
) -> AnyConfig:
    """`load_config` for a mapping in memory.

    Args:
        tree: as returned by `read_tree`.
        pipeline: as in `load_config`.
        source: for messages.
        notes: remarks about the spelling of the file.
        overridden: paths whose values come from the command line.
        own: top-level keys of the file itself and of the command line; None: all.
        try_environment: as in `load_config`.
        needs_data: as in `load_config`.
    """
    lacking = missing_capabilities(tree)
    if lacking is not None:
        raise ConfigError([lacking], source)
    variables = _variables(tree)
    _check_sections(tree, source)
    written = tree
    tree, unset = interpolate(tree, source)
    tree = {key: _with_home(value) for key, value in tree.items() if key not in variables}
    tree |= {key: _without_nulls(tree[key]) for key in NAMED if key in tree}
    _load_modules(tree.get("custom_modules"), source)
    kind = _pipeline(tree, pipeline, source)
    root = PIPELINES[kind]
    tree, translations, problems = translate(tree, kind, root, notes, overridden)
    tree, tracker_notes, tracker_problems = nest_tracker_kwargs(tree)
    if kind == "rlvr" and value_at(tree, ENGINE_REWARD[0]) == ENGINE_REWARD[1]:
        root = RLVREngineRewardConfig
    tree, library_notes = _without_libraries(tree, tree if own is None else own)
    tree, role_notes, role_problems = drop_keys_of_other_roles(tree, root)
    converter = Converter(suggest_for(root, PIPELINES | {kind: root}, FOREIGN), overridden)
    config = converter.overlay(tree, root())
    _read_tracker_options(config, converter)
    _user_options(config, converter)
    problems += tracker_problems + role_problems
    reasons = dict(unset)
    problems += [Problem(each.path, reasons.get(each.path, each.message)) for each in converter.problems]
    if problems:
        raise ConfigError(problems, source)
    notes = [*notes, *translations, *tracker_notes, *library_notes, *role_notes]
    notes = _grouped([*notes, *_unused(written, variables, notes)])
    given_notes = [(note.path, note.message) for note in notes]
    given = list(leaves(tree)), sorted(overridden), given_notes
    config.source = ConfigSource(source, *given, tree=tree, needs_data=needs_data)
    for path, message in unset:
        config.source.report.missing_resource(path, message)
    problems = fill_in_defaults(config)
    if not problems:
        check_keys(config, config.source.report, try_environment)
        problems = check(config).errors
    if problems:
        raise ConfigError(problems, source)
    return config


def _read_tracker_options(config: AnyConfig, converter: Converter) -> None:
    for name, options in TRACKER_OPTIONS.items():
        if name in config.tracker_kwargs:
            given = config.tracker_kwargs[name]
            checked = converter.overlay(given, options(), f"tracker_kwargs.{name}")
            config.tracker_kwargs[name] = {key: getattr(checked, key) for key in given if hasattr(checked, key)}


def _load_modules(value: Any, source: str) -> None:
    """Imports the modules that `custom_modules` names, which may register values of other keys."""
    names = [] if value is None else one_or_many(value)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return  # reported with other values of a wrong type
    try:
        use_custom_modules(names)
    except Exception as error:
        raise ConfigError([Problem("custom_modules", failure_text(error))], source) from error


def _user_options(config: AnyConfig, converter: Converter) -> None:
    """Makes the mappings of `custom_options` the options that losses and estimators declare."""
    if not isinstance(config, RLConfig):
        return
    every: list[Algorithm] = [*POLICY_LOSSES.values(), *ADV_ESTIMATORS.values()]
    own = {each.name: each for each in every if is_dataclass(each.options) and not each.built_in}
    for name, given in config.custom_options.items():
        if name in own:
            options = own[name].options()
            config.custom_options[name] = converter.overlay(given, options, f"custom_options.{name}")
        else:
            known = ", ".join(own) or "none, see custom_modules"
            message = f"{name} is no loss or estimator of yours with options; known: {known}"
            converter.problems.append(Problem(f"custom_options.{name}", message))


def _with_home(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_home(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_home(item) for item in value]
    return os.path.expanduser(value) if isinstance(value, str) and HOME.match(value) else value


def _check_sections(tree: Tree, source: str) -> None:
    sections = {key for root in PIPELINES.values() for key, value in vars(root()).items() if is_dataclass(value)}
    found = {key: value for key, value in tree.items() if key in sections and isinstance(value, list | int | float)}
    if found:
        message = "{} is not a section of `key: value` lines"
        raise ConfigError([Problem(key, message.format(reprlib.repr(value))) for key, value in found.items()], source)


def _without_nulls(section: Any) -> Any:
    kept = {name: entry for name, entry in section.items() if entry is not None} if isinstance(section, dict) else {}
    return kept or section


def _variables(tree: Tree) -> set[str]:
    """Top-level keys that only `${...}` reads: unknown ones that another value refers to."""
    return referenced(tree) & tree.keys() - KNOWN_KEYS - SPELLINGS


def _unused(tree: Tree, variables: set[str], notes: Sequence[Problem]) -> list[Problem]:
    """A remark on each variable that only keys without effect refer to."""
    dropped = {note.path for note in notes if note.message.startswith("has no effect")}
    effective = [path for path in leaves(tree) if dropped.isdisjoint(and_above(path))]
    used = referenced({path: value_at(tree, path) for path in effective})
    return [Problem(name, "has no effect: no key with an effect refers to it") for name in sorted(variables - used)]


def _without_libraries(tree: Tree, own: Collection[str]) -> tuple[Tree, list[Problem]]:
    """The tree without unknown top-level keys of base files, and a remark on each.

    Names of other frameworks stay, and so do misspelled keys: conversion explains them.
    """
    unknown = [key for key in tree if key not in own and key not in KNOWN_KEYS]
    dropped = [
        key
        for key in unknown
        if not any(map(FOREIGN.find, leaves({key: tree[key]})))
        and not nearest(key, KNOWN_KEYS, MISSPELLED if isinstance(tree[key], dict) else VERY_SIMILAR)
    ]
    notes = [Problem(key, "has no effect: it is a key of a base file that no ${...} refers to") for key in dropped]
    return {key: value for key, value in tree.items() if key not in dropped}, notes


def _grouped(notes: Sequence[Problem]) -> list[Problem]:
    paths: dict[str, list[str]] = {}
    for note in notes:
        paths.setdefault(note.message, []).append(note.path)
    return [Problem(", ".join(dict.fromkeys(found)), message) for message, found in paths.items()]


def _pipeline(tree: Tree, wanted: str | None, source: str) -> str:
    by_keys = "agentic" if _is_agentic(tree) else "dpo" if PAIR_KEYS.keys() & tree.keys() else "rlvr"
    named = tree.get("pipeline", wanted or by_keys)
    if not isinstance(named, str) or named not in PIPELINES:
        shown = "null" if named is None else repr(named)
        like = nearest(str(named), PIPELINES)
        hint = f"; did you mean {like}?" if like else ""
        raise ConfigError([Problem("pipeline", f"{shown} is not one of {', '.join(PIPELINES)}{hint}")], source)
    if wanted not in (None, named):
        message = f"the file is for {named}, but this command starts {wanted}; use the {named} launcher"
        raise ConfigError([Problem("pipeline", message)], source)
    return named


def _is_agentic(tree: Tree) -> bool:
    """Whether a file without the key `pipeline` is for agents; `val_batch_size` alone decides only without prompts."""
    keys = AGENTIC_KEYS & tree.keys()
    if keys != {"val_batch_size"}:
        return bool(keys)
    training = tree.get("actor_train")
    data = training.get("data_args") if isinstance(training, dict) else None
    return "rewards" not in tree and not (isinstance(data, dict) and "file_name" in data)

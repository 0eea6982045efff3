"""Loads a YAML file and overrides as a checked configuration."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from roll.configs.agentic import AgenticConfig
from roll.configs.compat.apply import (
    Tree,
    drop_unsupported_keys,
    expand_importance_sampling,
    translate_values,
    vllm_problems,
)
from roll.configs.defaults import fill_in_defaults
from roll.configs.errors import ConfigError, Problem
from roll.configs.pipeline import RLVRConfig, SFTConfig, Source
from roll.configs.rules import check
from roll.configs.schema import Converter, declared
from roll.configs.suggestions import drop_keys_of_other_roles, nearest, suggest_for
from roll.configs.trackers import TRACKER_OPTIONS, nest_tracker_kwargs
from roll.configs.yaml_files import interpolate, leaves, merge, override_tree, read_tree

AnyConfig = RLVRConfig | SFTConfig | AgenticConfig
"""The configuration of one run."""

PIPELINES: dict[str, type[AnyConfig]] = {"rlvr": RLVRConfig, "sft": SFTConfig, "agentic": AgenticConfig}
"""Values of the key `pipeline`."""

AGENTIC_KEYS = declared(AgenticConfig).keys() - declared(RLVRConfig).keys()
"""Keys by which a file without the key `pipeline` is recognised as agentic."""


def load_config(path: str | Path, overrides: Sequence[str] = (), pipeline: str | None = None) -> AnyConfig:
    """The complete configuration of one run: interpolated, defaults filled in, every rule checked.

    Models and datasets need not be on this machine.

    Args:
        path: YAML file; `defaults` in it lists base files.
        overrides: `a.b=value`, values in YAML.
        pipeline: the pipeline that the file must be for; None takes its key `pipeline`, else the pipeline its other
            keys belong to, else rlvr.

    Raises:
        ConfigError: with every unknown key, wrong type and value out of bounds; if there are none, with every broken
            rule.
    """
    notes: list[Problem] = []
    base, top = read_tree(Path(path), notes), override_tree(overrides, notes)
    return build_config(merge(base, top), pipeline, str(path), notes, set(leaves(top)))


def read_pipeline(path: str | Path, overrides: Sequence[str] = ()) -> str:
    """The pipeline of a file with overrides; nothing else is checked.

    Raises:
        ConfigError: they cannot be read, or the pipeline is unknown.
    """
    tree = merge(read_tree(Path(path), []), override_tree(overrides, []))
    return _pipeline(interpolate(tree, str(path)), None, str(path))


def build_config(
    tree: Tree,
    pipeline: str | None = None,
    source: str = "",
    notes: Sequence[Problem] = (),
    overridden: Collection[str] = (),
) -> AnyConfig:
    """`load_config` for a mapping in memory.

    Args:
        tree: as returned by `read_tree`.
        pipeline: as in `load_config`.
        source: for messages.
        notes: remarks about the spelling of the file.
        overridden: paths whose values come from the command line.
    """
    tree = interpolate(tree, source)
    kind = _pipeline(tree, pipeline, source)
    root = PIPELINES[kind]
    engines = vllm_problems(tree)
    if engines:
        raise ConfigError(engines, source)
    tree, unsupported_notes, problems = drop_unsupported_keys(tree, kind)
    tree, weight_notes, weight_problems = expand_importance_sampling(tree)
    tree, translations = translate_values(tree)
    tree, tracker_notes, tracker_problems = nest_tracker_kwargs(tree)
    tree, role_notes, role_problems = drop_keys_of_other_roles(tree, root)
    converter = Converter(suggest_for(root, PIPELINES), overridden)
    config = converter.overlay(tree, root())
    for name, options in TRACKER_OPTIONS.items():
        if name in config.tracker_kwargs:
            given = config.tracker_kwargs[name]
            checked = converter.overlay(given, options(), f"tracker_kwargs.{name}")
            config.tracker_kwargs[name] = {key: getattr(checked, key) for key in given if hasattr(checked, key)}
    problems += weight_problems + tracker_problems + role_problems + converter.problems
    if problems:
        raise ConfigError(problems, source)
    notes = [*notes, *unsupported_notes, *weight_notes, *translations, *tracker_notes, *role_notes]
    given_notes = [(note.path, note.message) for note in notes]
    config.source = Source(source, list(leaves(tree)), sorted(overridden), given_notes)
    problems = fill_in_defaults(config) or check(config).errors
    if problems:
        raise ConfigError(problems, source)
    return config


def _pipeline(tree: Tree, wanted: str | None, source: str) -> str:
    named = tree.get("pipeline", wanted or ("agentic" if _is_agentic(tree) else "rlvr"))
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

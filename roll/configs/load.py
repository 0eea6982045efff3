"""A YAML file and overrides as a checked configuration."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from roll.configs.agentic import AgenticConfig
from roll.configs.aliases import Tree, translate
from roll.configs.arguments import MegatronConfig
from roll.configs.convert import Converter
from roll.configs.derive import derive
from roll.configs.errors import ConfigError, Problem
from roll.configs.foreign import drop_foreign
from roll.configs.importance_sampling import expand_importance_sampling
from roll.configs.layouts import ROLES, is_megatron
from roll.configs.pipeline import BaseConfig, RLVRConfig, SFTConfig, Source
from roll.configs.rules import check
from roll.configs.schema import declared
from roll.configs.suggestions import nearest, suggest_for
from roll.configs.trackers import TRACKER_OPTIONS
from roll.configs.vllm import vllm_problems
from roll.configs.yaml_files import leaves, merge, override_tree, read_tree

AnyConfig = RLVRConfig | SFTConfig | AgenticConfig
"""The configuration of one run."""

PIPELINES: dict[str, type[AnyConfig]] = {"rlvr": RLVRConfig, "sft": SFTConfig, "agentic": AgenticConfig}
"""Values of the key `pipeline`."""

AGENTIC_KEYS = declared(AgenticConfig).keys() - declared(RLVRConfig).keys()
"""Keys by which a file without the key `pipeline` is taken to be agentic."""


def load_config(path: str | Path, overrides: Sequence[str] = (), pipeline: str | None = None) -> AnyConfig:
    """The configuration of one run, complete: interpolated, derived values filled in, every rule of the file checked.

    Whether models and datasets are on this machine is not asked here.

    Args:
        path: YAML file; `defaults` in it names base files.
        overrides: `a.b=value`, values in YAML.
        pipeline: what the file must be for; None takes its key `pipeline`, or what its other keys are of, or rlvr.

    Raises:
        ConfigError: with every unknown key, wrong type and value out of bounds; when there is none, with every rule
            the values break together.
    """
    settled: list[Problem] = []
    base, top = read_tree(Path(path), settled), override_tree(overrides, settled)
    return build_config(merge(base, top), pipeline, str(path), settled, set(leaves(top)))


def read_pipeline(path: str | Path, overrides: Sequence[str] = ()) -> str:
    """Which pipeline a file and overrides are for; nothing else of them is checked.

    Raises:
        ConfigError: they cannot be read, or name no pipeline there is.
    """
    tree = merge(read_tree(Path(path), []), override_tree(overrides, []))
    return _pipeline(_interpolated(tree, str(path)), None, str(path))


def build_config(
    tree: Tree,
    pipeline: str | None = None,
    source: str = "",
    settled: Sequence[Problem] = (),
    overridden: Collection[str] = (),
) -> AnyConfig:
    """`load_config` for a mapping that is in memory.

    Args:
        tree: as `read_tree` gives it.
        pipeline: as in `load_config`.
        source: for messages.
        settled: what there is to say about how it was written.
        overridden: paths whose values come from a command line.
    """
    tree = _interpolated(tree, source)
    kind = _pipeline(tree, pipeline, source)
    cls = PIPELINES[kind]
    engines = vllm_problems(tree)
    if engines:
        raise ConfigError(engines, source)
    tree, notes, problems = drop_foreign(tree, kind)
    tree, more_notes, more_problems = expand_importance_sampling(tree)
    tree, translations = translate(tree)
    converter = Converter(suggest_for(cls, PIPELINES), overridden)
    config = converter.overlay(tree, cls())
    _convert_strategies(config, converter)
    for name, cls_of_options in TRACKER_OPTIONS.items():
        if name in config.tracker_kwargs:
            options = config.tracker_kwargs[name]
            config.tracker_kwargs[name] = _checked(options, cls_of_options(), f"tracker_kwargs.{name}", converter)
    problems += more_problems + converter.problems
    if problems:
        raise ConfigError(problems, source)
    notes = [*settled, *notes, *more_notes, *translations]
    config.source = Source(source, list(leaves(tree)), [(note.path, note.message) for note in notes])
    problems = derive(config) or check(config).errors
    if problems:
        raise ConfigError(problems, source)
    return config


def _interpolated(tree: Tree, source: str) -> Tree:
    """The tree with every `${...}` replaced."""
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(tree), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        path = getattr(error, "full_key", None) or ""
        message = str(error.msg or error).splitlines()[0]
        advice = "; `${key}` sees what files and overrides give, not defaults" if "not found" in message else ""
        raise ConfigError([Problem(path, f"cannot be interpolated: {message}{advice}")], source) from None
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _pipeline(tree: Tree, wanted: str | None, source: str) -> str:
    named = tree.get("pipeline", wanted or ("agentic" if _is_agentic(tree) else "rlvr"))
    if not isinstance(named, str) or named not in PIPELINES:
        shown = "null" if named is None else repr(named)
        like = nearest(str(named), PIPELINES)
        raise ConfigError(
            [
                Problem(
                    "pipeline",
                    f"{shown} is not one of {', '.join(PIPELINES)}" + (f"; did you mean {like}?" if like else ""),
                )
            ],
            source,
        )
    if wanted not in (None, named):
        raise ConfigError(
            [Problem("pipeline", f"the file is for {named}, but this starts {wanted}; use the {named} launcher")],
            source,
        )
    return str(named)


def _is_agentic(tree: Tree) -> bool:
    """Whether a file that does not say what it is for describes agents.

    `val_batch_size` alone says so where there are neither rewards nor prompts.
    """
    keys = AGENTIC_KEYS & tree.keys()
    if keys != {"val_batch_size"}:
        return bool(keys)
    training = tree.get("actor_train")
    data = training.get("data_args") if isinstance(training, dict) else None
    return "rewards" not in tree and not (isinstance(data, dict) and "file_name" in data)


def _convert_strategies(config: BaseConfig, converter: Converter) -> None:
    """Checks Megatron's options where a role runs Megatron; SGLang's are checked by the rules."""
    unreadable = {problem.path for problem in converter.problems}
    for role in ROLES:
        worker = getattr(config, role, None)
        if worker is None or not is_megatron(worker) or f"{role}.strategy_args.strategy_name" in unreadable:
            continue
        path = f"{role}.strategy_args.strategy_config"
        worker.strategy_args.strategy_config = _checked(
            worker.strategy_args.strategy_config, MegatronConfig(), path, converter
        )


def _checked(options: Tree, defaults: Any, path: str, converter: Converter) -> Tree:
    """The options that were given, as the types of `defaults` have them."""
    checked = converter.overlay(options, defaults, path)
    return {name: getattr(checked, name) for name in options if hasattr(checked, name)}

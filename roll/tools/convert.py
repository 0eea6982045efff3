"""`roll convert`: prints the keys of this project for a file of another system, with a comment on every change."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from roll.base.errors import ConfigError, Problem
from roll.base.schema import Tree, leaves
from roll.envs.registry import try_environment
from roll.loading.load import AnyConfig, build_config
from roll.loading.yaml_files import YamlLoader, merge, override_tree, read_tree

KEPT_REFERENCES = ("oc.env:", "now:")
"""References that are printed as they are: a variable may be a secret, and a time is that of the run."""


class _Dumper(yaml.SafeDumper):
    """Writes every value once, and quotes a text that the loader would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _first, _resolvers in YamlLoader.yaml_implicit_resolvers.items():
    for _tag, _pattern in _resolvers:
        _Dumper.add_implicit_resolver(_tag, _pattern, [_first])


def run(arguments: argparse.Namespace) -> int:
    print(convert(arguments.config, arguments.overrides), end="")
    return 0


def convert(path: str | Path, overrides: Sequence[str] = ()) -> str:
    """The text of a YAML file that loads as the same configuration.

    Raises:
        ConfigError: the file does not load, or not without the command line: a key of it that an override makes
            unused is a warning there, and an error in one file.
    """
    notes: list[Problem] = []
    own: set[str] = set()
    base, top = read_tree(Path(path), notes, keys=own), override_tree(overrides, notes)
    given = (str(path), notes, set(leaves(top)), own | top.keys(), try_environment)
    tree = merge(base, top)
    try:
        config = build_config(_with_kept(tree), None, *given)
    except ConfigError:  # a variable may stand for a number
        config = build_config(tree, None, *given)
    text = yaml.dump(
        {"pipeline": config.pipeline} | config.source.tree,
        Dumper=_Dumper, sort_keys=False, default_flow_style=None, allow_unicode=True, width=120,
    )  # fmt: skip
    _check_same(config, path)
    remarks = [f"# {remark}: {message}\n" for remark, message in config.source.notes]
    return "".join([f"# {path} with the keys of this project.\n", *remarks, _with_references(text)])


def _check_same(config: AnyConfig, path: str | Path) -> None:
    tree: Tree = {"pipeline": config.pipeline} | config.source.tree
    if build_config(tree, None, f"{path}, converted") != config:
        raise ConfigError([Problem("", "the converted file would be another configuration; keep this one")], str(path))


def _with_kept(value: Any) -> Any:
    """A tree whose references to variables and times are plain text."""
    if isinstance(value, dict):
        return {key: _with_kept(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_kept(item) for item in value]
    for name in KEPT_REFERENCES if isinstance(value, str) else ():
        value = value.replace(f"${{{name}", f"$[{name}")
    return value


def _with_references(text: str) -> str:
    for name in KEPT_REFERENCES:
        text = text.replace(f"$[{name}", f"${{{name}")
    return text

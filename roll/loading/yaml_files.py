"""Reads YAML files and overrides as plain mappings, with base files included and `${...}` replaced."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from roll.base.errors import ConfigError, Problem, git_lfs_pointer, similar_path, unreachable
from roll.base.schema import Tree
from roll.compat.systems.environments import base_file
from roll.compat.translate import respell

FLOAT = re.compile(r"[-+]?((?!0[0-9])[0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
"""YAML 1.2 floats: `1e-6` too, which YAML 1.1 reads as text."""

INT = re.compile(r"[-+]?(0|[1-9][0-9]*|0x[0-9a-fA-F]{1,16})")
"""YAML 1.2 whole numbers of 64 bits; YAML 1.1 would read `017` as 15 and `1:30` as 90."""

REPLACED = ("tag:yaml.org,2002:float", "tag:yaml.org,2002:int", "tag:yaml.org,2002:timestamp")
"""Types that YAML 1.1 reads from too many texts; dates are text here."""

MERGE = "tag:yaml.org,2002:merge"
"""Tag of the key `<<`, which inserts the keys of other mappings."""

MAX_CHARACTERS = 128 * 1024
"""Longest text of a configuration; the parser takes about a second for it."""


class YamlLoader(yaml.SafeLoader):
    """A YAML loader that refuses a key that is given twice in one mapping."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Checks the keys of a mapping as written, before `<<` inserts others."""
        node = super().compose_mapping_node(anchor)
        seen: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE:
                continue
            line, known = key.start_mark.line + 1, (key.tag, key.value)
            if known in seen:
                message = f"is given on line {seen[known]} and again on line {line}; keep one"
                raise ConfigError([Problem(key.value, message)])
            seen[known] = line
        return node


YamlLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
YamlLoader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(f"(?:{INT.pattern})\\Z"), list("-+0123456789"))
YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(f"(?:{FLOAT.pattern})\\Z"), list("-+0123456789.")
)


def parse_yaml(text: str, source: str) -> Any:
    """The value of a YAML text.

    Raises:
        ConfigError: it is not YAML, or a key is given twice.
    """
    if len(text) > MAX_CHARACTERS:
        message = f"{len(text)} characters are too many for a configuration; the most allowed are {MAX_CHARACTERS}"
        raise ConfigError([Problem("", message)], source)
    try:
        return yaml.load(text, Loader=YamlLoader)
    except ConfigError as error:
        raise ConfigError(error.problems, source) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        message = f"{where}not YAML: {getattr(error, 'problem', None) or error}"
        raise ConfigError([Problem("", message)], source) from None
    except (ValueError, AttributeError) as error:
        raise ConfigError([Problem("", f"contains a value that is not of its type: {error}")], source) from None


@contextmanager
def nesting_refused(source: str) -> Iterator[None]:
    """Turns nesting without an end, or too deep for Python, into a ConfigError."""
    try:
        yield
    except RecursionError:
        message = "sections, lists or ${...} are nested too deep, or an alias (*name) is inside its own anchor (&name)"
        raise ConfigError([Problem("", message)], source) from None


def read_tree(path: Path, notes: list[Problem], including: Sequence[Path] = (), keys: set[str] | None = None) -> Tree:
    """The mapping of one file merged over the base files in its `defaults`, with the names of this project.

    Base files win over earlier ones, and the file itself wins over those before `_self_`, which is last where it is not
    listed. `notes` receives the remarks of `respell`, `keys` the top-level keys of the file itself. A base
    file may be empty.

    Raises:
        ConfigError: a file is missing, is not a mapping, or includes itself.
    """
    path = Path(os.path.realpath(path))
    chain = [*including, path]
    if path in including:
        names = " -> ".join(item.name for item in chain[chain.index(path) :])
        raise ConfigError([Problem("defaults", f"the files include each other: {names}")], str(including[0]))
    tree = _mapping(path, may_be_empty=bool(including))
    bases = _bases(tree.pop("defaults", None), path)
    own = respell(tree, str(path), notes)
    if keys is not None:
        keys.update(own)
    merged: Tree = {}
    for base in bases:
        merged = merge(merged, own if base is None else _base_tree(base, path, notes, chain))
    return merged


@dataclass(frozen=True)
class _Base:
    """A file that `defaults` lists, and the section that its keys go into; empty for the top level."""

    name: str
    package: str = ""
    optional: bool = False


UNUSED_BASES = ("deepspeed_*",)
"""Names of base files that may be missing: they hold settings of engines that are not here."""


def _base_tree(base: _Base, path: Path, notes: list[Problem], chain: Sequence[Path]) -> Tree:
    file = path.parent / (base.name if base.name.endswith((".yaml", ".yml")) else f"{base.name}.yaml")
    if not os.path.isfile(file):
        unused = any(fnmatchcase(file.name, name) for name in UNUSED_BASES)
        if base.optional or unused:
            if unused:
                notes.append(Problem("defaults", f"{base.name} is left out: the file does not exist and is not needed"))
            return {}
        own = base_file(file.stem)
        if own is not None:
            notes.append(Problem("defaults", f"{base.name} does not exist; the environments of this project are used"))
            return own
        why = unreachable(file) or f"it does not exist (names are relative to {path.name}){_similar_file(file)}"
        raise ConfigError([Problem("defaults", f"{base.name!r} is not a file: {file}: {why}")], str(path))
    tree = read_tree(file, notes, chain)
    for part in reversed(base.package.split(".") if base.package else []):
        tree = {part: tree}
    return tree


def merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> Tree:
    """`top` over `base`: mappings merge key by key, everything else is replaced."""
    merged = dict(base)
    for key, value in top.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def override_tree(overrides: Sequence[str], notes: list[Problem]) -> Tree:
    """The mapping of `a.b=value` overrides; values are YAML, later ones win. `notes` is as in `read_tree`.

    Raises:
        ConfigError: an override has no `=`, no key, or a leading + or ~.
    """
    tree: Tree = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key or not all(key.split(".")):
            raise ConfigError([Problem("", f"override {text!r}: write key=value, such as actor_train.pg_variant=ppo")])
        if key[0] in "+~":
            raise ConfigError(
                [Problem("", f"override {text!r}: write it without {key[0]!r}; every key exists already")]
            )
        item: Any = parse_yaml(value, f"override {key}") if value.strip() else None
        for part in reversed(key.split(".")):
            item = {part: item}
        tree = merge(tree, item)
    return respell(tree, "overrides", notes)


def _mapping(path: Path, may_be_empty: bool) -> Tree:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        why = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise ConfigError([Problem("", why + _similar_file(path))], str(path)) from None
    tree = parse_yaml(text, str(path))
    if tree is None and may_be_empty:
        return {}
    if not isinstance(tree, dict):
        problem = git_lfs_pointer(path) or "the top level must be a mapping of `key: value` lines"
        raise ConfigError([Problem("", problem)], str(path))
    return tree


def _similar_file(path: Path) -> str:
    like = None if os.path.lexists(path) else similar_path(path, lambda file: file.suffix in (".yaml", ".yml"))
    return f"; did you mean {like}?" if like else ""


def _bases(defaults: Any, path: Path) -> list[_Base | None]:
    """The base files in order; None stands for the file itself.

    An entry is a name, relative to the file, with or without `.yaml`; or `group: name`, whose file is `group/name` and
    whose keys go into the section `group`. Hydra's marks are read: `name@section`, `name@_here_` and `name@_global_`,
    `optional` before a name, `_self_` for the file itself. `override` entries are about Hydra and have no effect.
    """
    entries = [defaults] if isinstance(defaults, str | dict) else defaults or []
    if not isinstance(entries, list) or not all(isinstance(entry, str | dict) for entry in entries):
        message = f"{defaults!r} is not a list of base files, such as [base.yaml]"
        raise ConfigError([Problem("defaults", message)], str(path))
    bases: list[_Base | None] = []
    for entry in entries:
        for group, names in entry.items() if isinstance(entry, dict) else [("", entry)]:
            for name in names if isinstance(names, list) else [names]:
                if name == "_self_":
                    bases.append(None)
                elif name is not None and not str(group).startswith("override "):
                    bases.append(_base(str(group), name, path))
    return bases if None in bases else [*bases, None]


def _base(group: str, name: Any, path: Path) -> _Base:
    if not isinstance(name, str):
        raise ConfigError([Problem("defaults", f"{name!r} is not the name of a base file")], str(path))
    text = group or name
    first, _, package = text.removeprefix("optional ").partition("@")
    if package in ("", "_group_"):
        package = first.replace("/", ".") if group else ""
    elif package in ("_here_", "_global_"):
        package = ""
    return _Base(f"{first}/{name}" if group else first, package, text.startswith("optional "))


ENVIRONMENT = re.compile(r"\$\{oc\.env:([A-Za-z_]\w*)\}")
"""A reference to an environment variable, without a value for the case that it is not set."""

REFERENCE = re.compile(r"\$\{\s*([A-Za-z_]\w*)\s*[.\[}]")
"""The first part of the path that a `${...}` refers to."""

OmegaConf.register_resolver("now", lambda form: datetime.now().strftime(form), use_cache=True, replace=True)


REPLACED_TEXT = re.compile(r"\$\{|\?\?\?")
"""`${...}`, and the mark of OmegaConf for a value that has to be given."""


def interpolate(tree: Tree, source: str) -> tuple[Tree, list[tuple[str, str]]]:
    """The tree with every `${...}` replaced, among them `${oc.env:NAME,default}` and `${now:%Y-%m-%d}`.

    Returns:
        The tree, and path and message of each value with an environment variable that is not set: it is null, or
        has `$NAME` in its place inside a longer text.

    Raises:
        ConfigError: a `${...}` refers to a key that is not given.
    """
    unset: list[tuple[str, str]] = []
    tree = _without_unset(tree, "", unset)
    if REPLACED_TEXT.search(repr(tree)):
        try:
            resolved: Any = OmegaConf.to_container(OmegaConf.create(tree), resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            path = getattr(error, "full_key", None) or ""
            message = str(error.msg or error).splitlines()[0]
            hint = "; `${key}` sees the values of files and overrides, not defaults" if "not found" in message else ""
            raise ConfigError([Problem(path, f"cannot be interpolated: {message}{hint}")], source) from None
        tree = resolved
    return {str(key): value for key, value in tree.items()}, unset


def _without_unset(value: Any, path: str, unset: list[tuple[str, str]]) -> Any:
    """The value without references to environment variables that are not set."""
    if isinstance(value, Mapping):
        return {key: _without_unset(item, f"{path}.{key}" if path else str(key), unset) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_unset(item, f"{path}[{index}]", unset) for index, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    names = [name for name in ENVIRONMENT.findall(value) if name not in os.environ]
    unset += [(path, f"the environment variable {name} is not set; export {name}=...") for name in names]
    if names and ENVIRONMENT.fullmatch(value):
        return None
    for name in names:
        value = value.replace(f"${{oc.env:{name}}}", f"${name}")
    return value


def referenced(value: Any) -> set[str]:
    """Top-level keys that a `${...}` anywhere in a value refers to."""
    return set(REFERENCE.findall(repr(value)))

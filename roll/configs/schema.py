"""The tree of known keys, read off the dataclasses."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Any

from roll.configs.arguments import MegatronConfig

SECTION = "a section of `key: value` lines"
"""What a value is that holds keys of its own."""


@dataclass(frozen=True)
class Key:
    """One known key: its dotted path, its declaration and its type."""

    path: str
    field: Field[Any]
    hint: Any

    @property
    def default(self) -> Any:
        """Value when the YAML is silent."""
        if self.field.default is not MISSING:
            return self.field.default
        return self.field.default_factory() if self.field.default_factory is not MISSING else None


@cache
def declared(cls: type) -> dict[str, Key]:
    """The keys of one dataclass by name, without those that no YAML may name."""
    hints = typing.get_type_hints(cls)
    return {
        item.name: Key(item.name, item, hints[item.name]) for item in fields(cls) if not item.metadata.get("internal")
    }


def known_keys(cls: type, prefix: str = "") -> Iterator[Key]:
    """Every key a file for `cls` may hold, sections before what is in them.

    The name of an entry of a mapping (`rewards`) stands as `<name>`; `strategy_config` continues with Megatron's keys,
    but not for actor_infer, whose engine has keys of its own.
    """
    for name, key in declared(cls).items():
        path = f"{prefix}.{name}" if prefix else name
        yield Key(path, key.field, key.hint)
        section, inner = section_of(key.hint)
        if section is not None:
            yield from known_keys(section, f"{path}.<name>" if inner else path)
        elif name == "strategy_config" and not path.startswith("actor_infer."):
            yield from known_keys(MegatronConfig, path)


def section_of(hint: Any) -> tuple[type | None, bool]:
    """The dataclass behind a type, and whether it is the value type of a mapping."""
    arguments = typing.get_args(hint)
    inner = typing.get_origin(hint) is dict
    section: Any = arguments[1] if inner else hint
    return (section, inner) if is_dataclass(section) and isinstance(section, type) else (None, False)


def describe(hint: Any) -> str:
    """What a type allows, in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Any: "anything"}
    if hint in words:
        return words[hint]
    if origin is typing.Literal:
        return "one of " + ", ".join("null" if item is None else str(item) for item in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if item is type(None) else describe(item) for item in arguments)
    if origin is list:
        return f"a list ({describe(arguments[0])} each)"
    return SECTION

"""How configuration keys are declared, listed, and converted from plain mappings to dataclasses."""

from __future__ import annotations

import math
import re
import reprlib
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, make_dataclass
from datetime import datetime
from functools import cache
from typing import Any, TypeVar

from roll.base.errors import Finding, Problem, Report, error, warning

Instance = TypeVar("Instance")

Tree = dict[str, Any]
"""A configuration as nested plain mappings."""

YEAR_S = 366 * 86400.0
"""Longest time in seconds that is accepted; far longer ones overflow in the clocks of threads and sockets."""

SECTION = "a section of `key: value` lines"
"""Description of a value that contains keys."""


@dataclass(frozen=True)
class Condition:
    """When a key has an effect.

    Attributes:
        holds: test of the whole configuration and of the section that contains the key.
        reason: why the key has no effect otherwise, and what to set.
        causes: paths of the keys that `holds` reads; `.name` is a key of the same section.
        is_error: whether a key without effect is an error, because readers would rely on it, or a warning.
        variants: for a key of some variants only, their names.
    """

    holds: Callable[[Any, Any], bool]
    reason: str
    causes: tuple[str, ...]
    is_error: bool = False
    variants: tuple[str, ...] = ()


def needs(name: str, reason: str, accepts: Callable[[Any], bool] = bool, is_error: bool = False) -> Condition:
    """The condition that the value of another key of the same section is accepted."""
    return Condition(lambda config, section: accepts(getattr(section, name)), reason, (f".{name}",), is_error)


def option(
    default: Any = MISSING,
    help: str = "",
    *,
    factory: Callable[[], Any] | Any = MISSING,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    usual: tuple[float, float] | None = None,
    parse: Callable[[Any], Any] | None = None,
    only_for: Condition | Sequence[Condition] = (),
    decides_section: bool = False,
) -> Any:
    """A dataclass field whose metadata has the help text, the bounds that loading enforces and its conditions.

    Args:
        default: value if the YAML does not set the key; give `factory` instead for a mutable one.
        help: one sentence with the unit; the configuration reference is generated from it.
        factory: makes the default of a mutable field.
        ge: smallest allowed value.
        gt: exclusive lower bound.
        le: largest allowed value.
        lt: exclusive upper bound.
        usual: least and largest value that is not warned of; 0 where the help says that it turns something off is none.
        parse: converts the YAML value to the field's type, raises ValueError with a reason.
        only_for: conditions without which the key, or any key of the section, has no effect.
        decides_section: while this key is wrong, the other keys of its section are not checked.
    """
    metadata = {
        "help": help,
        "ge": ge,
        "gt": gt,
        "le": le,
        "lt": lt,
        "usual": usual,
        "parse": parse,
        "only_for": (only_for,) if isinstance(only_for, Condition) else tuple(only_for),
        "decides_section": decides_section,
    }
    if factory is not MISSING:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def internal(factory: Callable[[], Any]) -> Any:
    """A dataclass field that loading fills and no YAML can set."""
    return field(default_factory=factory, metadata={"internal": True}, repr=False, compare=False)


def one_or_many(value: Any) -> Any:
    """A single name as a list of one; any other value unchanged."""
    return [value] if isinstance(value, str) else value


def time_text(value: Any) -> str | None:
    """A time as ISO 8601 text; YAML reads some spellings as times."""
    return None if value is None else datetime.fromisoformat(str(value)).isoformat()


@dataclass(frozen=True)
class Key:
    """One known key: its dotted path, its declaration and its type."""

    path: str
    field: Field[Any]
    hint: Any

    @property
    def default(self) -> Any:
        if self.field.default is not MISSING:
            return self.field.default
        return self.field.default_factory() if self.field.default_factory is not MISSING else None


@cache
def declared(cls: type) -> dict[str, Key]:
    """The keys of one dataclass by name, without internal ones."""
    hints = typing.get_type_hints(cls)
    return {
        item.name: Key(item.name, item, hints[item.name]) for item in fields(cls) if not item.metadata.get("internal")
    }


def known_keys(cls: type, prefix: str = "") -> Iterator[Key]:
    """Every key a file for `cls` may contain, each section before its keys.

    The name of an entry of a mapping (`rewards`) is written as `<name>`.
    """
    for name, key in declared(cls).items():
        path = f"{prefix}.{name}" if prefix else name
        yield Key(path, key.field, key.hint)
        section, inner = section_of(key.hint)
        if section is not None:
            yield from known_keys(section, f"{path}.<name>" if inner else path)


@cache
def keys_by_path(cls: type) -> dict[str, Key]:
    return {key.path: key for key in known_keys(cls)}


def keys_along(cls: type, path: str) -> list[tuple[str, Key]]:
    """The declarations on the way to a dotted path, outermost first, each with the path of its section."""
    keys: list[tuple[str, Key]] = []
    section: type | None = cls
    is_entry_name = False
    parts = path.split(".")
    for index, part in enumerate(parts):
        if is_entry_name:
            is_entry_name = False
        elif section is None or part not in declared(section):
            break
        else:
            key = declared(section)[part]
            keys.append((".".join(parts[:index]), key))
            section, is_entry_name = section_of(key.hint)
    return keys


@cache
def section_of(hint: Any) -> tuple[type | None, bool]:
    """The dataclass of a type, and whether it is the value type of a mapping."""
    arguments = typing.get_args(hint)
    inner = typing.get_origin(hint) is dict
    section: Any = arguments[1] if inner else hint
    return (section, inner) if is_dataclass(section) and isinstance(section, type) else (None, False)


def leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Dotted paths of all values of a tree."""
    for key, value in tree.items():
        where = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and value:
            yield from leaves(value, where)
        else:
            yield where


def and_above(path: str) -> list[str]:
    """A dotted path and those of the sections and lists that it is in."""
    return [path, *(path[: end.start()] for end in re.finditer(r"[.[]", path))]


def value_at(config: Any, path: str) -> Any:
    """The value at a dotted path of a configuration or nested mapping; None if there is none."""
    for part in path.split("."):
        config = config.get(part) if isinstance(config, dict) else getattr(config, part, None)
    return config


def describe(hint: Any) -> str:
    """Describes the values that a type allows, such as "a list (a number each)"."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    descriptions = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Any: "anything"}
    if hint in descriptions:
        return descriptions[hint]
    if origin is typing.Literal:
        return "one of " + ", ".join("null" if item is None else str(item) for item in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if item is type(None) else describe(item) for item in arguments)
    if origin is list:
        return f"a list ({describe(arguments[0])} each)"
    return SECTION


LARGEST = 2**63 - 1
"""Largest whole number: tensors and engines hold 64 bits, so a larger one is explained instead of overflowing."""

TOO_LARGE = f"{{}} is too large; the largest allowed number is {LARGEST}"

INVALID_CHARACTERS = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\x7f\u200b\u2060\ufeff\ud800-\udfff]")
"""Characters that no path and no text should have: control characters, invisible ones, and halves of characters."""

MEANING = r"\b{}(:| is| turns| keeps| means| writes) [^.;,]+"
"""The part of a key's help that says what 0 or null does, which is often what a smaller number is meant to do."""

NUMBER = re.compile(r"[-+]?((\d+\.?\d*|\.\d+)(e[-+]?\d+)?|\.?(inf|nan))", re.ASCII | re.IGNORECASE)
"""Texts that are read as a number: Python's `float` would take digits of every script, and underscores."""

MAX_EXPLAINED = 50
"""Unknown keys for which similar names are looked up, which takes about a millisecond each."""

WHOLE_NUMBER = re.compile(r"[-+]?(0|[1-9]\d{0,29})", re.ASCII)
SWITCHES = {"true": True, "false": False}
"""Texts that are read as a whole number, or as true and false: an environment variable is always text."""

Suggest = Callable[[str, type, Any], list[Problem]]
"""Problems for an unknown path, given the dataclass of its section and its value."""


def _letters(name: str) -> str:
    return name.lower().replace("_", "-")


class Converter:
    """Converts one file and collects every problem instead of stopping at the first.

    Args:
        suggest: makes the problems of an unknown key.
        overridden: paths whose values come from the command line.
    """

    def __init__(self, suggest: Suggest, overridden: Collection[str] = ()) -> None:
        self.problems: list[Problem] = []
        self._suggest = suggest
        self._unknown = 0
        self._overridden = overridden

    def overlay(self, data: Any, default: Instance, path: str = "") -> Instance:
        """`default`, with the values of `data` set in place."""
        cls = type(default)
        if not isinstance(data, Mapping):
            self._fail(path, data, SECTION)
            return default
        keys = declared(cls)  # type: ignore[arg-type]
        deciding = [name for name, key in keys.items() if key.field.metadata.get("decides_section") and name in data]
        for name in [*deciding, *(name for name in data if name not in deciding)]:
            value, before = data[name], len(self.problems)
            where = f"{path}.{name}" if path else str(name)
            if name not in keys:
                self._unknown += 1
                known = self._suggest(where, cls, value) if self._unknown <= MAX_EXPLAINED else []
                self.problems += known or [Problem(where, "unknown key")]
                continue
            setattr(default, name, self._field(value, keys[name], getattr(default, name), where))
            if name in deciding and len(self.problems) > before:
                break
        return default

    def _field(self, value: Any, key: Key, default: Any, path: str) -> Any:
        parse, before = key.field.metadata.get("parse"), len(self.problems)
        try:
            parsed = parse(value) if parse else value
        except TypeError:
            self._fail(path, value, describe(key.hint))
            return default
        except ValueError as error:
            self._add(path, str(error))
            return default
        converted = self._value(parsed, key.hint, default, path)
        if len(self.problems) > before:
            return default
        self._check_text(converted, path)
        self._check_bounds(converted, key, path)
        return converted

    def _value(self, value: Any, hint: Any, default: Any, path: str) -> Any:
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if hint is Any:
            return value
        if isinstance(hint, type) and is_dataclass(hint):
            return self.overlay(value, default if isinstance(default, hint) else hint(), path)
        if origin is typing.Literal:
            same = [item for item in arguments if value == item and type(value) is type(item)]
            return same[0] if same else self._fail_choice(path, value, hint)
        if origin in (typing.Union, types.UnionType):
            return self._union(value, hint, path)
        if origin is list and isinstance(value, list):
            items = [self._value(item, arguments[0], None, f"{path}[{index}]") for index, item in enumerate(value)]
            for index, item in enumerate(items):
                self._check_text(item, f"{path}[{index}]")
            return items
        if origin is dict and isinstance(value, Mapping):
            return {str(key): self._value(item, arguments[1], None, f"{path}.{key}") for key, item in value.items()}
        return self._fail(path, value, describe(hint)) if origin else self._scalar(value, hint, path)

    def _union(self, value: Any, hint: Any, path: str) -> Any:
        if value is None and type(None) in typing.get_args(hint):
            return None
        for member in typing.get_args(hint):
            attempt = Converter(self._suggest, self._overridden)
            converted = attempt._value(value, member, None, path)
            if member is not type(None) and not attempt.problems:
                return converted
        return self._fail_choice(path, value, hint)

    def _scalar(self, value: Any, hint: type, path: str) -> Any:
        if hint is float and isinstance(value, str) and not NUMBER.fullmatch(value):
            return self._fail(path, value, describe(hint))
        if hint is float and isinstance(value, int | float | str) and not isinstance(value, bool):
            try:
                return float(value)
            except OverflowError:
                return self._add(path, TOO_LARGE.format(reprlib.repr(value)))
        if type(value) is hint:
            return value
        if hint is int and isinstance(value, str) and WHOLE_NUMBER.fullmatch(value):
            return int(value)
        if hint is bool and isinstance(value, str) and value.lower() in SWITCHES:
            return SWITCHES[value.lower()]
        suggestion = ""
        if hint is int and isinstance(value, float) and value.is_integer():
            suggestion = f"; write {int(value)}"
        if hint is str and isinstance(value, bool | int | float):
            suggestion = f"; {self._quoted(value, path)}"
        return self._fail(path, value, describe(hint) + suggestion)

    def _quoted(self, value: bool | int | float, path: str) -> str:
        """Advice on quoting a value to make it text; a shell removes the outer quotes."""
        text = f"'{str(value).lower() if isinstance(value, bool) else value}'"
        if path.partition("[")[0] in self._overridden:
            start = f"{path}=" if path in self._overridden else ""
            return f'put it in quotes, and these in double quotes for the shell: {start}"{text}"'
        return f"put it in quotes: {text}"

    def _check_text(self, value: Any, path: str) -> None:
        if value == "":
            self._add(path, "'' is empty; give it a value, or leave it out")
        elif isinstance(value, str) and INVALID_CHARACTERS.search(value):
            self._add(path, f"{value!r} contains a character that no file or tokenizer accepts; remove it")

    def _check_bounds(self, value: Any, key: Key, path: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return
        least, above, most, below = (key.field.metadata.get(name) for name in ("ge", "gt", "le", "lt"))
        off = re.search(MEANING.format("0" if above is None else "null"), key.field.metadata.get("help", ""))
        advice = f" ({off[0]})" if off and 0 in (least, above) else ""
        if isinstance(value, int) and abs(value) > LARGEST:
            self._add(path, TOO_LARGE.format(reprlib.repr(value)))
        elif not math.isfinite(value):
            self._add(path, f"{value} is not a finite number")
        elif least is not None and value < least:
            self._add(path, f"{value} is too small; the least allowed is {least}{advice}")
        elif above is not None and value <= above:
            self._add(path, f"{value} is too small; it must be above {above}{advice}")
        elif most is not None and value > most:
            self._add(path, f"{value} is too large; the most allowed is {most}")
        elif below is not None and value >= below:
            self._add(path, f"{value} is too large; it must be below {below}")

    def _fail_choice(self, path: str, value: Any, hint: Any) -> None:
        """Names the only allowed value that is written alike, if there is one, or all that are allowed."""
        literals = [each for each in (hint, *typing.get_args(hint)) if typing.get_origin(each) is typing.Literal]
        names = ["null" if name is None else str(name) for literal in literals for name in typing.get_args(literal)]
        like = next((name for name in names if _letters(name) == _letters(str(value))), None)
        self._fail(path, value, f"known; did you mean {like}?" if like else describe(hint))

    def _fail(self, path: str, value: Any, expected: str) -> None:
        self._add(path, f"{'null' if value is None else repr(value)} is not {expected}")

    def _add(self, path: str, message: str) -> None:
        self.problems.append(Problem(path, message))


@dataclass
class ConfigSource:
    """Where a configuration came from.

    Attributes:
        file: the YAML file.
        given: paths of the keys that the file or an override sets.
        overridden: paths of the keys that an override sets.
        notes: path and message of each remark of loading.
        report: the findings about its keys.
        tree: the values of `given` in nested mappings, interpolated and in the spelling used here; it loads as the same
            configuration.
        needs_data: whether data files must be named; not where the caller has the prompts.
    """

    file: str = ""
    given: list[str] = field(default_factory=list)
    overridden: list[str] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)
    report: Report = field(default_factory=Report)
    tree: dict[str, Any] = field(default_factory=dict)
    needs_data: bool = True

    def unused(self, path: str, message: str, causes: Sequence[str], is_error: bool = True) -> Finding:
        """A key without effect: an error, unless it has none only because an override changed one of `causes`."""
        by_override = path not in self.overridden and any(cause in self.overridden for cause in causes)
        return (error if is_error and not by_override else warning)(path, message)


def part(cls: type[Instance], config: Any, **others: Any) -> Instance:
    """The settings of one part of a run: the fields of a dataclass that the configuration has too, and `others`."""
    shared = {item.name: getattr(config, item.name) for item in fields(cls) if hasattr(config, item.name)}  # type: ignore[arg-type]
    return cls(**shared | others)


def combined(
    name: str,
    parts: Mapping[str, type],
    owner: Callable[..., Condition],
    keeps: Callable[[Sequence[str]], bool] = lambda readers: True,
) -> type:
    """A dataclass of the keys of several, in which a key has an effect only for those that declare it.

    Args:
        name: of the class.
        parts: dataclass of the keys by the name of what reads them; other classes have none.
        owner: makes the condition of a key from the names of what reads it.
        keeps: whether the class has a key, from the same names.
    """
    found: dict[str, tuple[Key, list[str]]] = {}
    for each, options in parts.items():
        for key in declared(options).values() if is_dataclass(options) else ():
            found.setdefault(key.path, (key, []))[1].append(each)
    keys = []
    for key, readers in found.values():
        if keeps(readers):
            metadata = key.field.metadata | {"only_for": (owner(*readers), *key.field.metadata["only_for"])}
            default = {"default": key.field.default, "default_factory": key.field.default_factory}
            given = {kind: value for kind, value in default.items() if value is not MISSING}
            keys.append((key.path, key.hint, field(metadata=metadata, **given)))  # type: ignore[arg-type]
    return make_dataclass(name, keys)


def check_order(path: str, lower: float, upper: float) -> Iterator[Finding]:
    """Refuses a lower bound above the upper one."""
    if lower > upper:
        yield error(path, f"{lower:g} is above the upper bound {upper:g}; swap them")

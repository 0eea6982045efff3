"""The nearest thing that would have worked."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from roll.configs.coming_from import NAMES, SHORT, keys_here, keys_of_short
from roll.configs.effects import ROLE_KEYS, role_reads
from roll.configs.errors import Problem
from roll.configs.schema import SECTION, declared, describe, known_keys
from roll.configs.yaml_files import leaves

LIKE, MUCH_LIKE = 0.6, 0.75
"""How like a known name of the same section, and of another one, a name has to be to be taken for it."""


def nearest(name: str, known: Iterable[str], cutoff: float = LIKE) -> str | None:
    """The known name most like `name`, or None when nothing is like it."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return close[0] if close else None


def suggest_for(root: type, pipelines: Mapping[str, type] | None = None) -> Callable[[str, type, Any], list[Problem]]:
    """A function that says what an unknown path in a file for `root` was probably meant to be.

    Args:
        root: what the file is converted to.
        pipelines: every root by its name, for keys of another one.
    """
    return _Suggestions(root, pipelines or {}).problems


class _Suggestions:
    """Looks for a path in this order: other pipelines, other frameworks, the same name elsewhere, like names."""

    def __init__(self, root: type, pipelines: Mapping[str, type]) -> None:
        self._paths = [key.path for key in known_keys(root)]
        self._pipeline = next((name for name, cls in pipelines.items() if cls is root), "")
        self._others = {
            name: {key.path for key in known_keys(cls)} for name, cls in pipelines.items() if cls is not root
        }

    def problems(self, path: str, section: type, value: Any) -> list[Problem]:
        """One problem; for a section that is another framework's, one for each key in it."""
        names = declared(section)
        said = self._certain(path, names)
        inner = list(leaves(value, path)) if isinstance(value, Mapping) else []
        if not said and self._are_of_another(inner, path, names):
            missing = "no key is like it; docs/configuration.md lists all"
            return [unknown(leaf, self._certain(leaf) or self._like(leaf) or missing) for leaf in inner]
        if inner:
            names = {name: key for name, key in names.items() if describe(key.hint) == SECTION}
        return [unknown(path, said or self._guess(path, names))]

    def _are_of_another(self, inner: list[str], path: str, names: Collection[str]) -> bool:
        """Whether keys of an unknown section say more than its name does."""
        if not inner:
            return False
        if any(keys_here(_plain(leaf)) for leaf in inner) or any(name.startswith(f"{_plain(path)}.") for name in NAMES):
            return True
        return not nearest(path.rpartition(".")[2], names) and any(self._elsewhere(leaf) for leaf in inner)

    def _certain(self, path: str, names: Collection[str] = ()) -> str:
        """What a path says without guessing, in a section of these `names`; empty where it says nothing."""
        plain = _plain(path)
        known = re.sub(r"^(rewards|custom_envs)\.[^.]+", r"\1.<name>", plain)
        if known in self._paths:
            return _nested(path) if plain == path else f"did you mean {plain}?"
        for name, paths in self._others.items():
            if known in paths:
                return f"it belongs to pipeline {name}, and this is {self._pipeline}"
        said = self._of_another(path, keys_here(plain), names)
        elsewhere = self._elsewhere(path)
        if not said and elsewhere:
            return f"this key belongs at {_best(path, elsewhere)}"
        return said or self._of_another(path, keys_of_short(plain), names)

    def _of_another(self, path: str, keys: tuple[str, ...], names: Collection[str]) -> str:
        """What another framework's name for `keys` is here: in this section or role where they are in it."""
        head, role = path.rpartition(".")[0], path.partition(".")[0]
        inside = [f"{key}.{_leaf(_plain(path))}" for key in keys]
        keys = tuple(inner if inner in self._paths else key for key, inner in zip(keys, inside, strict=True))
        here = [f"{head}.{_leaf(key)}" for key in keys if head and _leaf(key) in names]
        if role in ROLE_KEYS:
            keys = tuple(key.replace("<role>", role) for key in keys)
            here = here or [key for key in keys if key.startswith(f"{role}.")]
        if not keys:
            return ""
        others = (name for name, paths in self._others.items() if any(key in paths - {*self._paths} for key in keys))
        owner = next((f", of pipeline {name}" for name in others), "")
        page = "" if _leaf(_plain(path)) in SHORT else " (docs/coming_from.md)"
        return f"here that is {' and '.join(here or keys)}{owner}{page}"

    def _elsewhere(self, path: str) -> list[str]:
        """Known paths with the same last part."""
        leaf = _leaf(_plain(path))
        return [known for known in self._candidates(path) if _leaf(known) == leaf]

    def _candidates(self, path: str) -> list[str]:
        """Known paths that are read; for a path of a role none of rewards, which have nothing to do with it."""
        of_role = path.partition(".")[0] in ROLE_KEYS
        return [known for known in self._paths if self._read(known) and not (of_role and known.startswith("rewards."))]

    def _read(self, path: str) -> bool:
        """Whether a key, or any key of a section, is read by its role."""
        return role_reads(path) or any(role_reads(inner) for inner in self._paths if inner.startswith(f"{path}."))

    def _guess(self, path: str, names: Collection[str]) -> str:
        head, _, leaf = path.rpartition(".")
        here = {name for name in names if not head or self._read(f"{head}.{name}")}
        like = nearest(_plain(leaf), here)
        if like:
            return f"did you mean {head + '.' if head else ''}{like}?"
        return self._like(path) or (f"known here: {', '.join(sorted(here))}" if here else "nothing is known here")

    def _like(self, path: str) -> str:
        """The key whose last part is most like that of the path, in the same role if there is one."""
        candidates, role = self._candidates(path), path.partition(".")[0]
        for among in ([known for known in candidates if known.startswith(f"{role}.")], candidates):
            like = nearest(_leaf(_plain(path)), {_leaf(known) for known in among}, MUCH_LIKE)
            if like:
                return f"the nearest key is {_best(path, [known for known in among if _leaf(known) == like])}"
        return ""


def unknown(path: str, said: str) -> Problem:
    """The problem of a key that nothing reads."""
    return Problem(path, f"unknown key; {said}")


def _nested(path: str) -> str:
    """How a known path is written in a file that has it as one key."""
    *sections, leaf = path.split(".")
    opened = "".join(f"{name}: {{" for name in sections)
    return f"in a file a dot opens no section; write {opened}{leaf}: ...{'}' * len(sections)}"


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def _plain(path: str) -> str:
    """The path as keys are written here: without dashes and capitals."""
    return path.replace("-", "_").lower().lstrip("_")


def _best(path: str, candidates: list[str]) -> str:
    """The candidate in the same first section as `path`, else the one declared first, validation last."""
    head = path.partition(".")[0]
    same = [known for known in candidates if known.startswith(f"{head}.")]
    return min(same or candidates, key=lambda known: known.startswith("validation."))

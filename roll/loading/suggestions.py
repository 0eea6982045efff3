"""Explains unknown keys: keys of other roles, pipelines and frameworks, and the nearest known name."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from roll.base.errors import Problem
from roll.base.schema import SECTION, Key, Suggest, Tree, declared, describe, keys_by_path, leaves
from roll.base.text import nearest
from roll.configs.roles import ROLES, AbsentKey

VERY_SIMILAR = 0.75
"""Least similarity to a name of another section for a suggestion."""

LISTED_KEYS = 20
"""Most keys of a section that are listed for an unknown one."""

AMBIGUOUS_WORDS = ("n", "name", "path")
"""Last parts of names that mean nothing without the parts before them."""

NOT_SIMILAR = "no key is similar; docs/configuration.md lists all"


@dataclass(frozen=True)
class ForeignNames:
    """Names of keys in other systems.

    Attributes:
        ours: name -> keys here. A name is the end of a path; `.*` is any key.
        short: names that many systems share.
        hints: last part of a name -> which of its values has another name here, or how it is computed.
        paths: of all keys that other systems have.
    """

    ours: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    short: Collection[str] = ()
    hints: Mapping[str, str] = field(default_factory=dict)
    paths: Collection[str] = ()

    def find(self, path: str) -> tuple[str, ...]:
        """This project's keys for an unknown path, or for its end; empty if there are none."""
        for end in _ends(path):
            name = end if end in self.ours else f"{end.rpartition('.')[0]}.*"
            if name in self.ours:
                return self.ours[name]
        return ()

    def find_by_last_part(self, path: str) -> tuple[str, ...]:
        """As `find`, for a path that leaves out the sections of a name: `lr` for `actor.optim.lr`."""
        for end in _ends(path):
            found = [ours for name, keys in self.ours.items() if name.endswith(f".{end}") for ours in keys]
            if found and end not in AMBIGUOUS_WORDS:
                return tuple(dict.fromkeys(found))
        return ()


def _ends(path: str) -> list[str]:
    """The path, and the path without its first part, its first two, and so on."""
    parts = path.split(".")
    return [".".join(parts[index:]) for index in range(len(parts))]


def suggest_for(
    root: type, pipelines: Mapping[str, type] | None = None, foreign: ForeignNames | None = None
) -> Suggest:
    """A function that explains an unknown path in a file for `root`, by other `pipelines` and `foreign` names too."""
    return _Suggestions(root, pipelines or {}, foreign or ForeignNames()).problems


def drop_keys_of_other_roles(tree: Tree, root: type) -> tuple[Tree, list[Problem], list[Problem]]:
    """The tree without keys of roles that only other roles have, remarks on these, and problems.

    A key that has its default gets no remark; one that readers would rely on is a problem.
    """
    roles = {name: key.hint for name, key in declared(root).items() if name in ROLES}
    known = {name: keys_by_path(hint) for name, hint in roles.items()}
    kept = dict(tree)
    notes: list[Problem] = []
    problems: list[Problem] = []
    for role in roles:
        if not isinstance(tree.get(role), dict) or not tree[role]:
            continue
        others = {name: paths for name, paths in known.items() if name != role}
        kept[role], dropped = _without_keys_of(others, tree[role], known[role])
        if not kept[role]:
            del kept[role]
        for path, value in dropped:
            owners = {name: paths[path] for name, paths in others.items() if path in paths}
            if all(value != key.default for key in owners.values()):
                absent = _absence(roles[role], path) or AbsentKey(f"it belongs to {' and '.join(owners)}")
                problem = Problem(f"{role}.{path}", f"has no effect: {absent.reason}")
                (problems if absent.is_error else notes).append(problem)
    return kept, notes, problems


def _without_keys_of(
    others: Mapping[str, Mapping[str, Key]], section: Tree, own: Mapping[str, Key], prefix: str = ""
) -> tuple[Tree, list[tuple[str, Any]]]:
    """A section of a role without keys that only `others` have, and the path and value of each of these."""
    kept: Tree = {}
    dropped: list[tuple[str, Any]] = []
    for name, value in section.items():
        path = f"{prefix}.{name}" if prefix else str(name)
        of_others = path not in own and any(path in paths for paths in others.values())
        nested = any(key.startswith(f"{path}.") for paths in (own, *others.values()) for key in paths)
        if nested and isinstance(value, dict) and value and not (path in own and own[path].hint == dict[str, Any]):
            inner, inner_dropped = _without_keys_of(others, value, own, path)
            dropped += inner_dropped
            if inner:
                kept[name] = inner
        elif of_others:
            dropped.append((path, value))
        else:
            kept[name] = value
    return kept, dropped


def _absence(role: Any, path: str) -> AbsentKey | None:
    """The entry of `absent_keys` for the path or for the innermost section around it."""
    parts = path.split(".")
    candidates = (role.absent_keys.get(".".join(parts[:length])) for length in range(len(parts), 0, -1))
    return next(filter(None, candidates), None)


class _Suggestions:
    """Searches a path in this order: other pipelines, other frameworks, the same name elsewhere, similar names."""

    def __init__(self, root: type, pipelines: Mapping[str, type], foreign: ForeignNames) -> None:
        self._foreign = foreign
        self._paths = keys_by_path(root)
        self._pipeline = next((name for name, cls in pipelines.items() if cls is root), "")
        self._others = {name: keys_by_path(cls) for name, cls in pipelines.items() if cls is not root}

    def problems(self, path: str, section: type, value: Any) -> list[Problem]:
        """One problem; for a section of another framework, one for each of its keys."""
        names = declared(section)
        known = "" if isinstance(value, Mapping) and path in self._foreign.short else self._certain(path, names)
        inner = list(leaves(value, path)) if isinstance(value, Mapping) else []
        if not known and self._are_of_another(inner, path, names):
            return [unknown(leaf, self._certain(leaf) or self._similar(leaf) or NOT_SIMILAR) for leaf in inner]
        if inner:
            names = {name: key for name, key in names.items() if describe(key.hint) == SECTION}
        return [unknown(path, known or self._guess(path, names))]

    def _are_of_another(self, inner: list[str], path: str, names: Collection[str]) -> bool:
        """Whether the keys of an unknown section are known to more tables than its name."""
        if not inner:
            return False
        if any(self._foreign.find(_plain(leaf)) for leaf in inner) or any(
            name.startswith(f"{_plain(path)}.") for name in self._foreign.ours
        ):
            return True
        return not nearest(path.rpartition(".")[2], names) and any(self._elsewhere(leaf) for leaf in inner)

    def _certain(self, path: str, names: Collection[str] = ()) -> str:
        """An explanation without guessing, for a path in a section of these `names`; empty if there is none."""
        plain = _plain(path)
        known = re.sub(r"^(rewards|custom_envs|policies)\.[^.]+", r"\1.<name>", plain)
        if known in self._paths:
            return _nested(path) if plain == path else f"did you mean {plain}?"
        for name, paths in self._others.items():
            if known in paths and not self._foreign.find(plain):
                return f"it belongs to pipeline {name}, and this is {self._pipeline}"
        other = self._of_another(path, self._foreign.find(plain), names)
        elsewhere = self._elsewhere(path)
        if not other and elsewhere:
            return f"this key belongs at {_best(path, elsewhere)}"
        other = other or self._of_another(path, self._foreign.find_by_last_part(plain), names)
        if not other and self._is_foreign(path):
            return f"docs/coming_from.md lists the keys of {path.partition('.')[0]} that are read"
        return other

    def _of_another(self, path: str, keys: tuple[str, ...], names: Collection[str]) -> str:
        """Names `keys`, which another framework calls `path`; only those in the same section or role if any."""
        head, role = path.rpartition(".")[0], path.partition(".")[0]
        inside = [f"{key}.{_leaf(_plain(path))}" for key in keys]
        keys = tuple(inner if inner in self._paths else key for key, inner in zip(keys, inside, strict=True))
        ours = [f"{head}.{_leaf(key)}" for key in keys if head and _leaf(key) in names]
        keys = tuple(key for key in keys if role in ROLES or "<role>" not in key) or keys
        keys = tuple(key.replace("<role>", role if role in ROLES else "actor_train") for key in keys)
        if role in ROLES:
            ours = ours or [key for key in keys if key.startswith(f"{role}.")]
        keys = tuple(key for key in keys if key in self._paths) or keys
        if not keys:
            return ""
        others = (
            name for name, paths in self._others.items() if any(key in paths and key not in self._paths for key in keys)
        )
        owner = next((f", of pipeline {name}" for name in others), "")
        hint = self._foreign.hints.get(_leaf(_plain(path)))
        page = "" if _leaf(_plain(path)) in self._foreign.short else "docs/coming_from.md"
        explained = "; ".join(filter(None, (hint, page)))
        found = " and ".join(dict.fromkeys(ours or keys))
        return f"here that is {found}{owner}" + (f" ({explained})" if explained else "")

    def _is_foreign(self, path: str) -> bool:
        """Whether a path is in a section that only other frameworks have, where the same names mean other things."""
        head, dot, _ = path.partition(".")
        return (
            bool(dot) and head not in self._paths and any(name.startswith(f"{head}.") for name in self._foreign.paths)
        )

    def _elsewhere(self, path: str) -> list[str]:
        leaf = _leaf(_plain(path))
        return [known for known in self._candidates(path) if _leaf(known) == leaf]

    def _candidates(self, path: str) -> list[str]:
        """Known paths that a path may mean; those of policies for one of a policy, no rewards for one of a role."""
        section = path.partition(".")[0]
        others = ("rewards.", "policies.") if section in ROLES else ("policies.",)
        if self._is_foreign(path):
            return []
        return [known for known in self._paths if section == "policies" or not known.startswith(others)]

    def _guess(self, path: str, names: Collection[str]) -> str:
        head, _, leaf = path.rpartition(".")
        like = nearest(_plain(leaf), names)
        if like:
            return f"did you mean {head + '.' if head else ''}{like}?"
        if similar := self._similar(path):
            return similar
        if len(names) > LISTED_KEYS:
            return NOT_SIMILAR
        return f"known here: {', '.join(sorted(names))}" if names else "this section has no keys"

    def _similar(self, path: str) -> str:
        """Names the key whose last part is most similar to that of the path, preferably of the same role."""
        candidates, role = self._candidates(path), path.partition(".")[0]
        for among in ([known for known in candidates if known.startswith(f"{role}.")], candidates):
            like = nearest(_leaf(_plain(path)), {_leaf(known) for known in among}, VERY_SIMILAR)
            if like:
                return f"the nearest key is {_best(path, [known for known in among if _leaf(known) == like])}"
        return ""


def unknown(path: str, explanation: str) -> Problem:
    return Problem(path, f"unknown key; {explanation}")


def _nested(path: str) -> str:
    *sections, leaf = path.split(".")
    opening = "".join(f"{name}: {{" for name in sections)
    return f"in a file a dot does not open a section; write {opening}{leaf}: ...{'}' * len(sections)}"


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def _plain(path: str) -> str:
    return path.replace("-", "_").lower().lstrip("_")


def _best(path: str, candidates: list[str]) -> str:
    """The candidate in the same first section as `path`, else the one declared first, validation last."""
    head = path.partition(".")[0]
    same = [known for known in candidates if known.startswith(f"{head}.")]
    return min(same or candidates, key=lambda known: known.startswith("validation."))

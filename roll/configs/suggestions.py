"""The nearest thing that would have worked."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

from roll.configs.effects import role_reads
from roll.configs.schema import declared, known_keys


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, or None when nothing is like it."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return close[0] if close else None


def suggest_for(root: type) -> Callable[[str, type], str]:
    """A function that says what an unknown path in a file for `root` was probably meant to be.

    Looked for in this order: the same name elsewhere, a like name in the same section, the path most like it.
    """

    def suggest(path: str, section: type) -> str:
        head, _, leaf = path.rpartition(".")
        paths = [key.path for key in known_keys(root)]
        elsewhere = [known for known in paths if known.rpartition(".")[2] == leaf and role_reads(known)]
        if elsewhere:
            return f"this key belongs at {_best(path, elsewhere)}"
        like = nearest(leaf, declared(section))
        if like:
            return f"did you mean {head + '.' if head else ''}{like}?"
        like = nearest(path, paths) or nearest(leaf, [known.rpartition(".")[2] for known in paths])
        if like:
            full = like if like in paths else _best(path, [p for p in paths if p.rpartition(".")[2] == like])
            return f"the nearest key is {full}"
        return f"known here: {', '.join(sorted(declared(section)))}"

    return suggest


def _best(path: str, candidates: list[str]) -> str:
    """The candidate in the same first section as `path`, else the one declared first, validation last."""
    head = path.partition(".")[0]
    same = [known for known in candidates if known.startswith(f"{head}.")]
    return min(same or candidates, key=lambda known: known.startswith("validation."))

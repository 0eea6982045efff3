"""Parts of messages: similar names, alternatives and sizes."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from roll.base.errors import Finding, error

SIMILAR = 0.6
"""Least similarity to a known name for a suggestion."""


def nearest(name: str, known: Iterable[str], cutoff: float = SIMILAR) -> str | None:
    """The known name most similar to `name`, ignoring case; None if no name is similar."""
    by_lower = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[close[0]] if close else None


def check_known(
    path: str, name: str, known: Collection[str], others: Mapping[str, Collection[str]] | None = None
) -> Iterator[Finding]:
    """An unknown name, with the known ones, or the key among `others` whose value it is."""
    if name not in known:
        owner = next((key for key, names in (others or {}).items() if name in names), None)
        like = nearest(name, known)
        hint = f"{name} is a value of {owner}; " if owner else f"did you mean {like}? " if like else ""
        yield error(path, f"{name!r} is not known; {hint}known: {', '.join(known)}")


def either(values: Sequence[int]) -> str:
    """Numbers as `1, 2 or 4`, for messages."""
    return ", ".join(map(str, values[:-1])) + (" or " if len(values) > 1 else "") + str(values[-1])


def format_count(count: int, noun: str) -> str:
    """A count with its noun: `1 group`, `2 trajectories`."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun.removesuffix('y')}ies" if noun.endswith("y") else f"{count:,} {noun}s"


def gibibytes(count: int) -> str:
    """Bytes as text, in MiB below 1 GiB."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"

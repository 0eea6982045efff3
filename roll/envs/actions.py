"""Where in a model's text the action stands."""

from __future__ import annotations

import re
from collections.abc import Sequence

ANSWER = "<answer>(.*?)</answer>"
"""The pattern that recipes of this field use."""


class ActionPattern:
    """Finds one of a few named actions in a text.

    Args:
        pattern: regular expression whose last group holds the action. Case does not matter, and a dot
            matches line breaks too.
        actions: names as they are told to the model.

    Raises:
        ValueError: the pattern is no regular expression, or has no group.
    """

    def __init__(self, pattern: str, actions: Sequence[str]) -> None:
        """Compiles the pattern."""
        try:
            self._regex = re.compile(pattern, re.IGNORECASE | re.DOTALL)
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
        if not self._regex.groups:
            raise ValueError(f"{pattern!r} has no group to hold the action; such as {ANSWER}")
        self._actions = {action.lower(): action for action in actions}

    def read(self, text: str) -> str | None:
        """The action that the first match names, or None: no match, or something else in it."""
        match = self._regex.search(text)
        content = match[self._regex.groups] if match else None
        return self._actions.get(content.strip().lower()) if content else None

    def example(self, action: str) -> str | None:
        """A text that is read as `action`, for the rules to show; None where the pattern is too clever to write one.

        Every group but the last shows as three dots, spaces and anchors are left out.
        """
        bare = re.sub(r"\\s[*+]?", "", self._regex.pattern).removeprefix("^").removesuffix("$")
        *before, last = re.split(r"\(\.[*+]\??\)", bare)
        if not before:
            return None
        text = "...".join(before) + action + last
        return text if self.read(text) == action else None

"""Named actions in a model's text."""

from __future__ import annotations

import re
from collections.abc import Sequence

ANSWER = "<answer>(.*?)</answer>"
"""Default `action_pattern`, the tag that agentic recipes commonly use."""


class ActionPattern:
    """Finds one of several named actions in a text.

    Args:
        pattern: regular expression whose last group holds the action. It ignores case, and a dot matches line breaks.
        actions: names of the actions.

    Raises:
        ValueError: the pattern is not a regular expression, or has no group.
    """

    def __init__(self, pattern: str, actions: Sequence[str]) -> None:
        try:
            self._regex = re.compile(pattern, re.IGNORECASE | re.DOTALL)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
        if not self._regex.groups:
            raise ValueError(f"{pattern!r} has no group to hold the action; an example is {ANSWER}")
        self._actions = {action.lower(): action for action in actions}

    def read(self, text: str) -> str | None:
        """The action in the first match; None if nothing matches or the match holds no action."""
        match = self._regex.search(text)
        content = match[self._regex.groups] if match else None
        return self._actions.get(content.strip().lower()) if content else None

    def example(self, action: str) -> str | None:
        """A text that is read as `action`, to show in the rules; None if none can be derived from the pattern.

        All groups but the last become three dots; spaces and anchors are removed.
        """
        bare = re.sub(r"\\s[*+]?", "", self._regex.pattern).removeprefix("^").removesuffix("$")
        *before, last = re.split(r"\(\.[*+]\??\)", bare)
        if not before:
            return None
        text = "...".join(before) + action + last
        return text if self.read(text) == action else None

"""The space of everything a model may write."""

from __future__ import annotations

import string
from typing import Any

from gymnasium.spaces import Text

SAMPLE_LENGTH = 64
"""Most characters of a sample: enough for tools that try a space out; membership has no bound."""


class FreeText(Text):
    """Every string, the empty one too, in whatever script; samples are short and of printable ASCII."""

    def __init__(self) -> None:
        """Each environment makes its own, because a space carries the generator of its samples."""
        super().__init__(SAMPLE_LENGTH, min_length=0, charset=string.printable)

    def contains(self, x: Any) -> bool:
        """Whether it is text at all."""
        return isinstance(x, str)

    def __repr__(self) -> str:
        """Without the list of characters, which says nothing about what is allowed."""
        return "FreeText()"

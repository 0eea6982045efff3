"""What a key without effect is, as a value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Inert:
    """Keys without effect where `when` holds, and why; `misleads` makes them errors."""

    keys: tuple[str, ...]
    when: Callable[[Any], bool]
    reason: str
    misleads: bool = False

"""Mistakes that a user makes in a reward function; reward processes import them by name."""

from __future__ import annotations

import time
from typing import Any


def divide(response: str) -> float:
    """Raises."""
    return 1 / 0


def forget(response: str) -> None:
    """Returns nothing."""


def sleep(response: str) -> float:
    """Never answers."""
    time.sleep(600)
    return 0.0


def ask(response: str, reference: Any) -> float:
    """Asks for a column that the data does not have."""
    return float(response == reference)


def short(responses: list[str]) -> list[float]:
    """Returns too few scores."""
    return [1.0]

"""What follows from how far generation may run ahead."""

from __future__ import annotations

import math

from roll.configs.pipeline import RLConfig

USUAL_STALENESS = 5
"""Versions; `max_staleness_allowed` where nothing asks for more."""


def versions_ahead(config: RLConfig) -> int:
    """Versions a sample may be old when it is learned from: ceil(async_generation_ratio).

    Rounded first, since 0.1 * 3 + 0.7 in binary is a little more than 1.
    """
    return math.ceil(round(config.async_generation_ratio, 6))


def max_staleness(config: RLConfig) -> int:
    """`max_staleness_allowed` where the file is silent."""
    return max(USUAL_STALENESS, versions_ahead(config))


def runs_in_background(config: RLConfig) -> bool:
    """Whether generation is driven by a process of its own, beside training."""
    kind = config.async_training.rollouter
    return config.async_generation_ratio > 0 if kind == "auto" else kind == "actor"

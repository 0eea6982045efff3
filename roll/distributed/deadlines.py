"""A deadline that all calls of a block share, so that the one that is late can say whom it waits for."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_until: ContextVar[float] = ContextVar("until", default=math.inf)


@contextmanager
def calls_end_by(until: float) -> Iterator[None]:
    """Calls on clusters made in this block, and in tasks it starts, end by `until` on the monotonic clock."""
    token = _until.set(until)
    try:
        yield
    finally:
        _until.reset(token)


def seconds_left(timeout_s: float) -> float:
    """`timeout_s`, or what the block around leaves of it."""
    return max(0.0, min(timeout_s, _until.get() - time.monotonic()))

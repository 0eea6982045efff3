"""Every random choice of a run derives from one seed."""

from __future__ import annotations

import hashlib
from typing import Any


def role_seed(seed: int, *names: Any) -> int:
    """A seed in [0, 2^31) that depends on the run's seed and on `names`, the same in every process."""
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") & 0x7FFFFFFF

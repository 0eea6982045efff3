"""Property tests draw the same cases every time and have no deadline, because the machine may be busy."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("reproducible", deadline=None, derandomize=True)
settings.load_profile("reproducible")

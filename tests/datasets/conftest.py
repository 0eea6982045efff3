"""Property tests here draw the same cases every time and are not timed: the machine may be busy."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")

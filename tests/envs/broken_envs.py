"""Environments with the mistakes that users make."""

from __future__ import annotations

import os
import time
from typing import Any

from roll.envs import TextEnv, Turn


class Good(TextEnv):
    """Works."""

    def rules(self) -> str:
        return "Wait."

    def begin(self) -> str:
        return "Go."

    def act(self, text: str) -> Turn:
        return Turn("Done.", 1.0, terminated=True)


class Raises(Good):
    def act(self, text: str) -> Turn:
        return Turn("x", 1 / 0)


class ReturnsNothing(Good):
    def act(self, text: str) -> Any:
        pass


class BadReward(Good):
    def act(self, text: str) -> Turn:
        return Turn("x", "1")  # type: ignore[arg-type]


class BadStep(Good):
    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "x", 1e39, True, False, {"metrics": {}}


class NoText(Good):
    def begin(self) -> Any:
        return 3


class WantsSeed(Good):
    def begin(self, seed: int) -> str:  # type: ignore[override]
        return str(seed)


class LacksRules(TextEnv):
    def begin(self) -> str:
        return "Go."

    def act(self, text: str) -> Turn:
        return Turn("Done.", 1.0, terminated=True)


class BadInit(Good):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.size = options["size"]


class Dies(Good):
    def act(self, text: str) -> Turn:
        os._exit(7)


class Hangs(Good):
    def begin(self) -> str:
        time.sleep(600)
        return "too late"


class SkipsInit(Good):
    def __init__(self, **options: Any) -> None:
        pass


class OddConfig(Good):
    config_class = dict  # type: ignore[assignment]

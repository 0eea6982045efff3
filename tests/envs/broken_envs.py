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


class LateError(Good):
    """Fails in its third turn."""

    def act(self, text: str) -> Turn:
        if self.steps == 3:
            raise KeyError("score")
        return Turn("x", 0.0)


class SecondFails(Good):
    """Fails in its second episode alone."""

    episodes = 0

    def begin(self) -> str:
        self.episodes += 1
        return "Go."

    def act(self, text: str) -> Turn:
        if self.episodes == 2:
            raise ConnectionError("lost")
        return Turn("Done.", 1.0, terminated=True)


class NeedsWord(Good):
    """Fails with an empty text, which a model writes by ending at once."""

    def act(self, text: str) -> Turn:
        return Turn(text.split()[0], 0.0)


class WrongAnswer(Good):
    """Fails with an action of its own rules."""

    def rules(self) -> str:
        return "Write <answer>left</answer>."

    def act(self, text: str) -> Turn:
        return Turn("x", {"<answer>right</answer>": 1.0}[text] if "<" in text else 0.0)


class Slow(Good):
    """Takes 20 ms a turn."""

    def act(self, text: str) -> Turn:
        time.sleep(0.02)
        return Turn("x", 0.0)

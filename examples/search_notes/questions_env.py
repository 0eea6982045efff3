"""Questions about the notes in a folder."""

import json
import re
from pathlib import Path

from roll.envs import TextEnv, Turn

ROWS = [json.loads(line) for line in Path(__file__).with_name("questions.jsonl").read_text().splitlines()]


class Questions(TextEnv):
    """Reward 1 for the answer of the row."""

    METRICS = {"answered": "last"}

    def rules(self) -> str:
        return "Search before you answer. Write the answer as <answer>...</answer>."

    def begin(self) -> str:
        self.row = ROWS[self.np_random.integers(len(ROWS))]
        return str(self.row["question"])

    def act(self, text: str) -> Turn:
        match = re.search("<answer>(.*?)</answer>", text, re.DOTALL)
        if match is None:
            return Turn("Search, or answer.", 0.0, metrics={"answered": 0.0})
        right = match[1].strip().lower() == self.row["answer"].lower()
        return Turn("", float(right), terminated=True, metrics={"answered": 1.0})

"""FrozenLake as text, on gymnasium's own FrozenLakeEnv."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from gymnasium.utils.seeding import np_random

from roll.configs.schema import option
from roll.envs.moves import MOVES, MoveConfig, MoveEnv

SURE_STEP = 1 / 3
"""On slippery ice, the chance to go where one meant to; the two sides share the rest (gymnasium's own numbers)."""

SYMBOLS = str.maketrans("SFHG", "__OG")
"""From gymnasium's letters to what is drawn."""

PLAYER = {"_": "P", "O": "X", "G": "√"}
"""The player on a cell."""

RULES = """You are on a frozen lake and want to reach the goal without falling into a hole.
The lake is a grid. P: you, _: ice, O: hole, G: goal, X: you in a hole, √: you on the goal.
Each turn you go one cell {moves}; at the edge of the lake you stay where you are.
{ice}"""

SLIPPERY = """The ice is slippery: one move in three goes where you meant to, one to the left of that, one to the right.
"""


@dataclass
class FrozenLakeConfig(MoveConfig):
    """Options of the lake."""

    size: int = option(4, "Rows and columns of the lake.", ge=2, le=20)
    p: float = option(0.8, "Probability that a cell is ice and not a hole.", ge=0, le=1)
    is_slippery: bool = option(True, "Go where it was meant one time in three only, else to either side.")
    map_seed: int | None = option(None, "Seed of one map for all episodes; null draws one for each.", ge=0)


class FrozenLake(MoveEnv):
    """Find the way over the ice: reward 1 on the goal, 0 in a hole and elsewhere; both end the episode.

    The map is a function of the seed of `reset` (or of `map_seed`), `size` and `p` alone, and the goal can be reached:
    in how many moves is not bounded, so leave `max_steps` room (4 x 4 at p 0.8 needs 2.8 on average and at most 6
    in 98 of 100).
    """

    config_class = FrozenLakeConfig
    config: FrozenLakeConfig

    def rules(self) -> str:
        """As the options have it: slippery ice is spoken of only where there is some."""
        ice = SLIPPERY if self.config.is_slippery else ""
        return RULES.format(moves=", ".join(MOVES[:-1]) + f" or {MOVES[-1]}", ice=ice) + self.how_to_answer()

    def begin(self) -> str:
        """A new lake, or the one of `map_seed`."""
        config = self.config
        generator = self.np_random if config.map_seed is None else np_random(config.map_seed)[0]
        rows = draw_map(generator, config.size, config.p)
        self._lake = FrozenLakeEnv(desc=rows, is_slippery=config.is_slippery, success_rate=SURE_STEP)
        self._lake.np_random = self.np_random
        self._lake.reset()
        self._cells = "".join(rows).translate(SYMBOLS)
        return self.draw()

    def draw(self) -> str:
        """The lake with the player in it."""
        here, size = int(self._lake.s), self.config.size
        player = PLAYER[self._cells[here]]
        cells = self._cells[:here] + player + self._cells[here + 1 :]
        return "\n".join(cells[row : row + size] for row in range(0, size * size, size))

    def move(self, move: str) -> tuple[float, bool]:
        """One step of gymnasium's environment."""
        _, reward, terminated, _, _ = self._lake.step(MOVES.index(move))
        return float(reward), bool(terminated)

    @property
    def won(self) -> bool:
        """Whether the player stands on the goal."""
        return self._cells[int(self._lake.s)] == "G"


def draw_map(generator: np.random.Generator, size: int, p: float) -> list[str]:
    """Rows of a lake in gymnasium's letters: S start, F ice, H hole, G goal.

    Start and goal are two different cells, every pair as likely as any; each other cell is ice with probability `p`.
    Maps whose goal cannot be reached are drawn again.
    """
    while True:
        cells = np.where(generator.random((size, size)) < p, "F", "H")
        start, goal = (divmod(int(cell), size) for cell in generator.choice(size * size, 2, replace=False))
        cells[start], cells[goal] = "S", "G"
        if _connected(cells, start, goal):
            return ["".join(row) for row in cells]


def _connected(cells: np.ndarray, start: tuple[int, int], goal: tuple[int, int]) -> bool:
    """Whether a way of neighbouring cells without a hole leads from start to goal; cells is [size, size]."""
    size = len(cells)
    seen, frontier = {start}, [start]
    while frontier and goal not in seen:
        row, column = frontier.pop()
        for cell in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
            if cell not in seen and 0 <= cell[0] < size and 0 <= cell[1] < size and cells[cell] != "H":
                seen.add(cell)
                frontier.append(cell)
    return goal in seen

"""FrozenLake as text: cross a grid of ice to the goal without falling into a hole, on gymnasium's FrozenLakeEnv."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from gymnasium.utils.seeding import np_random

from roll.base.schema import option
from roll.envs.grid_games import MOVE_CHOICES, MOVES, MoveConfig, MoveEnv

INTENDED_MOVE_PROBABILITY = 1 / 3
"""On slippery ice; the moves to the left and right of the intended one share the rest, as in gymnasium."""

SYMBOLS = str.maketrans("SFHG", "__OG")
"""Maps gymnasium's characters (start, frozen, hole, goal) to those of the drawing."""

PLAYER = {"_": "P", "O": "X", "G": "√"}
"""Character of the player on each kind of cell."""

RULES = """You are on a frozen lake and want to reach the goal without falling into a hole.
The lake is a grid. P: you, _: ice, O: hole, G: goal, X: you in a hole, √: you on the goal.
Each turn you go one cell {moves}; at the edge of the lake you stay where you are.
{ice}"""

SLIPPERY = """The ice is slippery: one move in three goes where you meant to, one to the left of that, one to the right.
"""


@dataclass
class FrozenLakeConfig(MoveConfig):
    """Options of FrozenLake."""

    size: int = option(4, "Rows and columns of the map.", ge=2, le=20)
    p: float = option(0.8, "Probability that a cell is ice instead of a hole.", ge=0, le=1)
    is_slippery: bool = option(True, "One move in three goes in the intended direction, the others to its sides.")
    map_seed: int | None = option(None, "Seed of one map for all episodes; null draws a map for each episode.", ge=0)


class FrozenLake(MoveEnv):
    """Reward 1 for reaching the goal, else 0; the goal and holes end the episode.

    The map depends only on the seed of `reset` (or on `map_seed`), `size` and `p`. The goal can always be reached, but
    the number of moves is not bounded, so choose `max_steps` with a margin: 4 x 4 maps with p 0.8 need 2.8 moves on
    average and at most 6 in 98 % of maps.
    """

    config_class = FrozenLakeConfig
    config: FrozenLakeConfig

    def rules(self) -> str:
        """Mentions slippery ice only if `is_slippery` is set."""
        ice = SLIPPERY if self.config.is_slippery else ""
        return RULES.format(moves=MOVE_CHOICES, ice=ice) + self.answer_format()

    def begin(self) -> str:
        """Draws a map, or makes the one of `map_seed`."""
        config = self.config
        generator = self.np_random if config.map_seed is None else np_random(config.map_seed)[0]
        rows = draw_map(generator, config.size, config.p)
        self._game = FrozenLakeEnv(desc=rows, is_slippery=config.is_slippery, success_rate=INTENDED_MOVE_PROBABILITY)
        self._game.np_random = self.np_random
        self._game.reset()
        self._cells = "".join(rows).translate(SYMBOLS)
        return self.draw()

    def draw(self) -> str:
        """The map with the player, [size] lines of [size] characters."""
        position, size = int(self._game.s), self.config.size
        player = PLAYER[self._cells[position]]
        cells = self._cells[:position] + player + self._cells[position + 1 :]
        return "\n".join(cells[row : row + size] for row in range(0, size * size, size))

    def move(self, move: str) -> tuple[float, bool]:
        _, reward, terminated, _, _ = self._game.step(MOVES.index(move))  # type: ignore[no-untyped-call]
        return float(reward), bool(terminated)

    @property
    def won(self) -> bool:
        return self._cells[int(self._game.s)] == "G"


def draw_map(generator: np.random.Generator, size: int, p: float) -> list[str]:
    """Rows of a map in gymnasium's characters: S start, F frozen, H hole, G goal.

    Start and goal are two different cells, drawn uniformly; every other cell is frozen with probability `p`.
    Maps whose goal cannot be reached are rejected and drawn again.
    """
    while True:
        cells = np.where(generator.random((size, size)) < p, "F", "H")
        start, goal = (divmod(int(cell), size) for cell in generator.choice(size * size, 2, replace=False))
        cells[start], cells[goal] = "S", "G"
        if _connected(cells, start, goal):
            return ["".join(row) for row in cells]


def _connected(cells: npt.NDArray[np.str_], start: tuple[int, int], goal: tuple[int, int]) -> bool:
    size = len(cells)
    seen, frontier = {start}, [start]
    while frontier and goal not in seen:
        row, column = frontier.pop()
        for cell in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
            if cell not in seen and 0 <= cell[0] < size and 0 <= cell[1] < size and cells[cell] != "H":
                seen.add(cell)
                frontier.append(cell)
    return goal in seen

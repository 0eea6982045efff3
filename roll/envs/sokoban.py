"""Sokoban as text: push every box onto a target."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from roll.configs.errors import Problem
from roll.configs.schema import option
from roll.envs.moves import MOVES, MoveConfig, MoveEnv
from roll.envs.sokoban_room import DIRECTIONS, draw_room

MOVE_REWARD = -0.1
"""Of every move, so that a short way is worth more. This and the next two are as in gym-sokoban (Schrader 2018)."""

BOX_REWARD = 1.0
"""Of a box that comes onto a target, and taken back when it is pushed off."""

WIN_REWARD = 10.0
"""When the last box is in place."""

FEWEST, MOST = 5, 12
"""Rows or columns of a room with its walls."""

CELLS_PER_BOX = 5
"""Cells inside the walls that each box needs at least: with less, few rooms let every box be moved."""

MOVES_PER_BOX = 5
"""Moves that the search needs at least for each box: fewer seldom get it off its target and the player to the next."""

RULES = """You are in a storehouse and push boxes onto targets, as many as there are boxes.
The room is a grid. #: wall, _: floor, O: target, X: box, √: box on a target, P: you, S: you on a target.
Each turn you go one cell {moves}. You push a box by walking into it, if the cell behind it is free;
you cannot pull, push two boxes at once, or walk through walls. You have won when every box is on a target.
"""


@dataclass
class SokobanConfig(MoveConfig):
    """Options of the room."""

    dim_room: list[int] = option(factory=lambda: [6, 6], help="Rows and columns with the walls around, 5 to 12 each.")
    num_boxes: int = option(1, "Boxes, and as many targets.", ge=1, le=6)
    search_depth: int = option(
        20, "No room needs more moves than this, nor more than `max_steps`: every room can be won.", ge=1
    )

    def check(self) -> Iterable[Problem]:
        """The room has two sides, and space and moves enough for its boxes."""
        yield from super().check()
        if len(self.dim_room) != 2 or not all(FEWEST <= side <= MOST for side in self.dim_room):
            yield Problem("dim_room", f"{self.dim_room} is not two numbers from {FEWEST} to {MOST}; such as [6, 6]")
            return
        cells = (self.dim_room[0] - 2) * (self.dim_room[1] - 2)
        if self.num_boxes * CELLS_PER_BOX > cells:
            most = cells // CELLS_PER_BOX
            yield Problem("num_boxes", f"{self.num_boxes} do not fit into {self.dim_room}; at most {most} do")
        least = self.num_boxes * MOVES_PER_BOX
        for name, also in (("search_depth", ""), ("max_steps", " (max_actions_per_traj, where a run sets none)")):
            if getattr(self, name) < least:
                said = f"{getattr(self, name)} is too small for {self.num_boxes} boxes; write {least}{also}"
                yield Problem(name, said)


class Sokoban(MoveEnv):
    """Push every box onto a target: -0.1 a move, 1 a box, 10 at the end, which is when all are in place.

    The room is a function of the seed of `reset` and the options alone. It can be solved in `search_depth` moves and in
    `max_steps`; a box pushed into a corner cannot come out again, and the episode goes on until `max_steps`.
    """

    config_class = SokobanConfig
    config: SokobanConfig

    def rules(self) -> str:
        """The same for every room."""
        return RULES.format(moves=", ".join(MOVES[:-1]) + f" or {MOVES[-1]}") + self.how_to_answer()

    def begin(self) -> str:
        """A new room."""
        rows, columns = self.config.dim_room
        depth = min(self.config.search_depth, self.config.max_steps)
        self._room = draw_room(self.np_random, rows, columns, self.config.num_boxes, depth)
        return self.draw()

    def draw(self) -> str:
        """The room with its walls."""
        rows, columns = self.config.dim_room
        return "\n".join("".join(self._symbol((row, column)) for column in range(columns)) for row in range(rows))

    def move(self, move: str) -> tuple[float, bool]:
        """One step or push."""
        before = len(self._room.boxes & self._room.targets)
        self._room = self._room.moved(DIRECTIONS[move])
        gained = len(self._room.boxes & self._room.targets) - before
        return MOVE_REWARD + BOX_REWARD * gained + WIN_REWARD * self.won, self.won

    @property
    def won(self) -> bool:
        """Whether every box is on a target."""
        return self._room.solved

    def _symbol(self, cell: tuple[int, int]) -> str:
        room = self._room
        if cell not in room.floor:
            return "#"
        plain, on_target = ("P", "S") if cell == room.player else ("X", "√") if cell in room.boxes else ("_", "O")
        return on_target if cell in room.targets else plain

"""Sokoban as text: push every box onto a target."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from roll.configs.errors import Problem
from roll.configs.fields import option
from roll.envs.text_actions import MOVES, MoveConfig, MoveEnv

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
    num_boxes: int = option(1, "Boxes, and as many targets.", minimum=1, maximum=6)
    search_depth: int = option(
        20, "No room needs more moves than this, nor more than `max_steps`: every room can be won.", minimum=1
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


Cell = tuple[int, int]
"""(row, column), from the upper left."""

DIRECTIONS: dict[str, Cell] = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}

WALL_SHARE = 0.15
"""Probability of a wall inside the room: enough to be in the way, few enough that most rooms can be used."""

ATTEMPTS = 5000
"""Rooms tried before giving up. Most options need a few; the most crowded that are allowed, about 200 on average."""


@dataclass(frozen=True)
class Room:
    """A state of the game: the floor (every cell that is no wall), targets, boxes and the player."""

    floor: frozenset[Cell]
    targets: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell

    @property
    def solved(self) -> bool:
        """Whether every box stands on a target."""
        return self.boxes == self.targets

    def free(self, cell: Cell) -> bool:
        """Whether there is floor without a box."""
        return cell in self.floor and cell not in self.boxes

    def moved(self, direction: Cell) -> Room:
        """The room after the player goes one cell, pushing a box that stands there; itself where nothing gives way."""
        ahead = beside(self.player, direction)
        if self.free(ahead):
            return replace(self, player=ahead)
        beyond = beside(ahead, direction)
        if ahead in self.boxes and self.free(beyond):
            return replace(self, player=ahead, boxes=self.boxes - {ahead} | {beyond})
        return self

    def walks(self) -> dict[Cell, int]:
        """Steps to every cell that the player reaches without pushing, nearest first."""
        steps, frontier = {self.player: 0}, deque([self.player])
        while frontier:
            cell = frontier.popleft()
            for direction in DIRECTIONS.values():
                ahead = beside(cell, direction)
                if ahead not in steps and self.free(ahead):
                    steps[ahead] = steps[cell] + 1
                    frontier.append(ahead)
        return steps


def beside(cell: Cell, direction: Cell, times: int = 1) -> Cell:
    """The cell so many steps away in a direction."""
    return cell[0] + times * direction[0], cell[1] + times * direction[1]


def draw_room(generator: np.random.Generator, rows: int, columns: int, boxes: int, depth: int) -> Room:
    """A room with no box on a target that at most `depth` moves solve.

    Boxes are put on targets, then the game is played backwards: box by box is pulled, and a pull read backwards is a
    push. So the moves back are a solution, and there may be a shorter one.

    Args:
        generator: decides the room.
        rows: of the room with the walls around it.
        columns: likewise.
        boxes: and as many targets.
        depth: moves of the player, walks included, that are played backwards at most.

    Raises:
        RuntimeError: ATTEMPTS rooms were tried in vain; the options leave too little space or too few moves.
    """
    for _ in range(ATTEMPTS):
        start = _solved_room(generator, rows, columns, boxes)
        room = start and _played_backwards(generator, start, depth)
        if room and not room.boxes & room.targets:
            return room
    raise RuntimeError(
        f"no room of {rows} x {columns} with {boxes} boxes was found within {depth} moves; fewer boxes, more space or "
        "more moves (num_boxes, dim_room, search_depth) make it possible"
    )


def _solved_room(generator: np.random.Generator, rows: int, columns: int, boxes: int) -> Room | None:
    """A room whose floor is connected, boxes on targets; None where walls left too little of it."""
    inside = np.zeros((rows, columns), dtype=bool)
    inside[1:-1, 1:-1] = generator.random((rows - 2, columns - 2)) >= WALL_SHARE
    floor = sorted((int(row), int(column)) for row, column in zip(*np.nonzero(inside), strict=True))
    if len(floor) <= boxes + 1:
        return None
    player, *targets = (floor[index] for index in generator.choice(len(floor), boxes + 1, replace=False))
    reached = frozenset(Room(frozenset(floor), frozenset(), frozenset(), player).walks())
    if not reached.issuperset(targets):
        return None
    return Room(reached, frozenset(targets), frozenset(targets), player)


def _played_backwards(generator: np.random.Generator, room: Room, depth: int) -> Room:
    """Random pulls as far as `depth` moves go, off targets first; no arrangement of boxes comes twice.

    What moves are left the player may walk, so that it does not always start beside the box to push.
    """
    arrangements = {room.boxes}
    while True:
        pulls = [(cost, pulled) for cost, pulled in _pulls(room) if cost <= depth and pulled.boxes not in arrangements]
        if not pulls:
            break
        in_place = len(room.boxes & room.targets)
        pulls = [pull for pull in pulls if len(pull[1].boxes & room.targets) < in_place] or pulls
        cost, room = pulls[generator.integers(len(pulls))]
        arrangements.add(room.boxes)
        depth -= cost
    ends = [cell for cell, steps in room.walks().items() if steps <= depth]
    return replace(room, player=ends[generator.integers(len(ends))])


def _pulls(room: Room) -> Iterator[tuple[int, Room]]:
    """Every room from which a walk after one push leads to this one, with the moves of both."""
    walks = room.walks()
    for box in sorted(room.boxes):
        for direction in DIRECTIONS.values():
            stand, back = beside(box, direction), beside(box, direction, 2)
            if stand in walks and room.free(back):
                yield walks[stand] + 1, replace(room, boxes=room.boxes - {box} | {stand}, player=back)

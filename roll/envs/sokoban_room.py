"""Rooms of Sokoban: what a push does, and rooms that can be solved because they were played backwards."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

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

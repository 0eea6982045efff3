from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.base.errors import ConfigError
from roll.envs import make_env
from roll.envs.sokoban import DIRECTIONS, Room, draw_room
from tests.envs.playing import Step, no_deadline, play


def read(drawing: str) -> Room:
    """A room from its drawing."""
    cells = {(row, column): cell for row, line in enumerate(drawing.split("\n")) for column, cell in enumerate(line)}

    def where(symbols: str) -> frozenset:
        return frozenset(position for position, cell in cells.items() if cell in symbols)

    (player,) = where("PS")
    return Room(where("_OX√PS"), where("O√S"), where("X√"), player)


def solution(room: Room) -> list[str] | None:
    """The fewest moves that solve a room, by searching all of them; the rules are written again here."""
    start = (room.player, room.boxes)
    ways: dict = {start: []}
    frontier = deque([start])
    while frontier:
        player, boxes = state = frontier.popleft()
        if boxes == room.targets:
            return ways[state]
        for move, (down, right) in DIRECTIONS.items():
            ahead = (player[0] + down, player[1] + right)
            beyond = (ahead[0] + down, ahead[1] + right)
            if ahead not in room.floor or (ahead in boxes and (beyond in boxes or beyond not in room.floor)):
                continue
            after = (ahead, (boxes - {ahead}) | {beyond} if ahead in boxes else boxes)
            if after not in ways:
                ways[after] = [*ways[state], move]
                frontier.append(after)
    return None


@pytest.mark.parametrize(
    ("options", "rooms"),
    [
        ({}, 60),
        ({"dim_room": [5, 5], "search_depth": 5}, 60),
        ({"dim_room": [6, 6], "num_boxes": 2, "search_depth": 10}, 25),
        ({"dim_room": [5, 8], "num_boxes": 2}, 10),
        ({"dim_room": [5, 6], "num_boxes": 2}, 10),
    ],
)
def test_every_room_is_unsolved_and_can_be_solved_within_search_depth(options, rooms):
    env = make_env("sokoban", {"max_steps": 20, **options})
    for seed in range(rooms):
        room = read(env.reset(seed=seed)[0])
        moves = solution(room)
        assert moves and len(moves) <= env.config.search_depth
        assert not room.boxes & room.targets and len(room.boxes) == env.config.num_boxes
        _, *steps = play(env, seed, [f"<answer>{move}</answer>" for move in moves])
        assert steps[-1].terminated and steps[-1].info["metrics"]["success"] == 1
        earned = sum(step.reward for step in steps)
        assert earned == pytest.approx(10 + len(room.boxes) - 0.1 * len(moves))


@no_deadline
@given(seed=st.integers(0, 2**32), rows=st.integers(5, 9), columns=st.integers(5, 9))
def test_a_drawing_shows_the_whole_room(seed, rows, columns):
    drawing, _ = make_env("sokoban", {"dim_room": [rows, columns]}).reset(seed=seed)
    lines = drawing.split("\n")
    assert [len(line) for line in lines] == [columns] * rows
    assert set(lines[0]) == set(lines[-1]) == {"#"} and all(line[0] == line[-1] == "#" for line in lines)
    assert len(read(drawing).boxes) == len(read(drawing).targets) == 1


@pytest.mark.parametrize(("side", "depth"), [(12, 30), (8, 30)])
def test_the_most_crowded_options_find_a_room(side, depth):
    room = draw_room(np.random.default_rng(0), side, side, 6, depth)
    assert len(room.boxes) == 6 and not room.boxes & room.targets


def test_impossible_options_are_an_error_that_names_the_options():
    with pytest.raises(RuntimeError, match="no room of 5 x 5 with 8 boxes .*num_boxes, dim_room, search_depth"):
        draw_room(np.random.default_rng(0), 5, 5, 8, 8)


WALK = """\
######
#PXO_#
#_#XX#
#____#
#OO__#
######"""


def moved(drawing: str, *moves: str) -> Room:
    room = read(drawing)
    for move in moves:
        room = room.moved(DIRECTIONS[move])
    return room


def test_a_push_moves_a_box_until_a_wall_or_another_box():
    assert moved(WALK, "Right").boxes == {(1, 3), (2, 3), (2, 4)} and moved(WALK, "Right").player == (1, 2)
    assert moved(WALK, "Up") == moved(WALK, "Left") == read(WALK)
    assert moved(WALK, "Right", "Right", "Right") == moved(WALK, "Right", "Right")
    two = "#####\n#PXX_#\n#OO__#\n#####"
    assert moved(two, "Right") == read(two)
    assert moved(WALK, "Down").player == (2, 1) and moved(WALK, "Down", "Right") == moved(WALK, "Down")


def test_the_reward_of_a_box_is_subtracted_when_it_leaves_the_target():
    env = make_env("sokoban", {"num_boxes": 2})
    env.reset(seed=0)
    env._room = read("######\n#PXO_#\n#___##\n#OX__#\n######")
    on, off = (Step(*env.step("<answer>right</answer>")) for _ in range(2))
    assert on.reward == pytest.approx(0.9) and off.reward == pytest.approx(-1.1)
    assert not on.terminated and on.info["metrics"]["success"] == 0
    assert "√" in on.observation and "S" in off.observation


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim_room": [4, 6]}, r"dim_room: \[4, 6\] is not two numbers from 5 to 12; an example is \[6, 6\]"),
        ({"dim_room": [6]}, r"dim_room: \[6\] is not two numbers"),
        ({"num_boxes": 4}, r"num_boxes: 4 do not fit into \[6, 6\]; at most 3 do"),
        ({"num_boxes": 3, "search_depth": 10}, "search_depth: 10 is too small for 3 boxes; use at least 15"),
    ],
)
def test_conflicting_options_are_an_error(options, message):
    with pytest.raises(ConfigError, match=message):
        make_env("sokoban", options)


def test_other_characters_are_drawn_and_explained():
    lookup, vocab = {0: "H", 1: ".", 4: "B"}, {"H": "hedge", "B": "crate"}
    env, plain = make_env("sokoban", {"grid_lookup": lookup, "grid_vocab": vocab}), make_env("sokoban")
    expected = plain.reset(seed=4)[0].translate(str.maketrans("#_X", "H.B"))
    assert env.reset(seed=4)[0] == expected
    assert "The room is a grid. H: hedge, .: floor, O: target, B: crate, √: box on a target" in env.instruction
    with pytest.raises(ConfigError, match="are not 7 different characters"):
        make_env("sokoban", {"grid_lookup": {0: "P"}})

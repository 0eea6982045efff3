from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.envs import make_env
from roll.envs.base import episode_metrics
from roll.envs.frozen_lake import draw_map
from roll.envs.grid_games import MOVES
from tests.envs.playing import Step, no_deadline, play

STEPS = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}


def position(drawing: str) -> tuple[int, int]:
    ((row, line),) = [(row, line) for row, line in enumerate(drawing.splitlines()) if set(line) & set("PX√")]
    return row, next(column for column, cell in enumerate(line) if cell in "PX√")


def shortest(drawing: str) -> list[str] | None:
    """The fewest moves from P to G, found on the drawing alone."""
    rows = drawing.splitlines()
    ways = {position(drawing): []}
    frontier = deque(ways)
    while frontier:
        row, column = frontier.popleft()
        if rows[row][column] == "G":
            return ways[row, column]
        for move, (down, right) in STEPS.items():
            cell = (row + down, column + right)
            inside = 0 <= cell[0] < len(rows) and 0 <= cell[1] < len(rows)
            if inside and cell not in ways and rows[cell[0]][cell[1]] != "O":
                ways[cell] = [*ways[row, column], move]
                frontier.append(cell)
    return None


def answers(moves) -> list[str]:
    return [f"<answer>{move}</answer>" for move in moves]


def test_success_of_random_play_and_shortest_paths_on_two_thousand_maps():
    env = make_env("frozen_lake", {"size": 4, "p": 0.8, "max_steps": 10, "is_slippery": False})
    source = np.random.default_rng(0)
    won, lengths = [], []
    for seed in range(2000):
        (drawing, _), *steps = play(env, seed, answers(source.choice(MOVES, 10)))
        path = shortest(drawing)
        assert path is not None, drawing
        lengths.append(len(path))
        won.append(episode_metrics(env.METRICS, [step.info["metrics"] for step in steps])["success"])
        assert sum(step.reward for step in steps) == won[-1]
    assert np.mean(won) == pytest.approx(0.216, abs=0.03)
    assert np.mean(lengths) == pytest.approx(2.79, abs=0.1)


@no_deadline
@given(seed=st.integers(0, 2**32), size=st.integers(2, 7), p=st.floats(0, 1), slippery=st.booleans())
def test_every_map_has_one_player_one_goal_and_a_path_between_them(seed, size, p, slippery):
    drawing, _ = make_env("frozen_lake", {"size": size, "p": p, "is_slippery": slippery}).reset(seed=seed)
    rows = drawing.split("\n")
    assert [len(row) for row in rows] == [size] * size and set(drawing) <= set("P_OG\n")
    assert drawing.count("P") == drawing.count("G") == 1 and shortest(drawing)


def test_the_map_depends_only_on_the_seed():
    first = make_env("frozen_lake", {"max_steps": 3, "is_slippery": True})
    second = make_env("frozen_lake", {"max_steps": 30, "is_slippery": False})
    for seed in range(20):
        play(first, seed + 1, answers(MOVES))
        assert first.reset(seed=seed) == second.reset(seed=seed)


def test_starts_and_goals_are_drawn_from_all_cells():
    maps = ["".join(draw_map(np.random.default_rng(seed), 3, 0.9)) for seed in range(300)]
    assert {rows.index("S") for rows in maps} == {rows.index("G") for rows in maps} == set(range(9))


@no_deadline
@given(seed=st.integers(0, 2**32))
def test_the_shortest_path_reaches_the_goal(seed):
    env = make_env("frozen_lake", {"is_slippery": False})
    drawing, _ = env.reset(seed=seed)
    *before, last = [Step(*env.step(text)) for text in answers(shortest(drawing))]
    assert last.reward == last.info["metrics"]["success"] == 1 and last.terminated and "√" in last.observation
    assert all(step.reward == 0 and not step.terminated and step.info["metrics"]["success"] == 0 for step in before)


def test_a_hole_ends_the_episode_without_reward():
    env = make_env("frozen_lake", {"size": 2, "p": 0.0, "is_slippery": False})
    drawing, _ = env.reset(seed=0)
    (row, column), goal = position(drawing), drawing.replace("\n", "").index("G")
    hole = next(
        move
        for move, (down, right) in STEPS.items()
        if row + down in (0, 1) and column + right in (0, 1) and (row + down) * 2 + column + right != goal
    )
    step = Step(*env.step(f"<answer>{hole}</answer>"))
    assert (step.reward, step.terminated, step.truncated) == (0.0, True, False) and "X" in step.observation
    assert step.info["metrics"]["success"] == 0 and step.info["metrics"]["action_is_effective"] == 1


def test_a_move_off_the_map_is_valid_and_not_effective():
    env = make_env("frozen_lake", {"p": 1.0, "is_slippery": False})
    env.reset(seed=1)
    steps = [Step(*env.step(f"<answer>{move}</answer>")) for move in ["Up"] * 4]
    assert steps[-1].observation == steps[-2].observation
    assert steps[-1].info["metrics"] == {
        "action_is_valid": 1.0,
        "action_is_effective": 0.0,
        "success": 0.0,
        "format_penalty": 0.0,
    }


def test_a_slippery_move_goes_one_time_in_three_in_each_direction_but_back():
    env = make_env("frozen_lake", {"size": 10, "p": 1.0, "is_slippery": True})
    went = {move: 0 for move in MOVES}
    for seed in range(150):
        (drawing, _), *steps = play(env, seed, answers(["Right"] * 10))
        ways = [position(drawing), *(position(step.observation) for step in steps)]
        for before, after in zip(ways, ways[1:], strict=False):
            if 0 < min(before) and max(before) < 9:
                went[next(move for move, (d, r) in STEPS.items() if (before[0] + d, before[1] + r) == after)] += 1
    total = sum(went.values())
    assert went["Left"] == 0 and all(abs(went[move] / total - 1 / 3) < 0.06 for move in ("Right", "Up", "Down"))


def test_with_map_seed_all_episodes_have_the_same_map_and_different_slips():
    env = make_env("frozen_lake", {"map_seed": 7, "size": 8, "p": 1.0, "max_steps": 10})
    assert len({env.reset(seed=seed)[0] for seed in range(10)}) == 1
    assert len({play(env, seed, answers(["Right"] * 5))[-1].observation for seed in range(10)}) > 1


def test_the_rules_follow_the_options():
    slippery, plain = (make_env("frozen_lake", {"is_slippery": ice}).instruction for ice in (True, False))
    assert "slippery" in slippery and "slippery" not in plain
    assert plain.endswith("Left, Down, Right, Up, written like this: <answer>Right</answer>")
    pattern = r"<think>(.*?)</think>\s*<answer>(.*?)</answer>"
    assert make_env("frozen_lake", {"action_pattern": pattern}).instruction.endswith(
        "<think>...</think><answer>Right</answer>"
    )

"""Writes FrozenLake conversations in which the player follows a shortest path, with some random moves.

    python -m examples.tiny_frozen_lake.play --out output/tiny_frozen_lake/data

They are for a warm start: a model that learns from them answers in the right form and finds the goal about half of the
time, which leaves something for reinforcement learning.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import deque
from pathlib import Path

from roll.configs.pipeline import role_seed
from roll.envs import make_env
from roll.envs.grid_games import MOVES

LAKE = {"size": 4, "p": 0.8, "is_slippery": False, "max_steps": 10, "env_instruction": "Go."}
STEPS = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
TRAIN_EPISODES, VALIDATION_EPISODES, RANDOM_MOVES = 5000, 100, 0.15
WORDS = ("<answer>", "</answer>", *MOVES)
"""One token each for the tiny model; a cell of the lake is one anyway."""


def best_moves(lake: str) -> list[str]:
    """Every move that begins a shortest path from P to G without a hole, read from the drawing."""
    cells = {(row, column): cell for row, line in enumerate(lake.split("\n")) for column, cell in enumerate(line)}
    goal = next(place for place, cell in cells.items() if cell == "G")
    player = next(place for place, cell in cells.items() if cell == "P")
    distance, frontier = {goal: 0}, deque([goal])
    while frontier:
        row, column = frontier.popleft()
        for down, right in STEPS.values():
            near = (row + down, column + right)
            if near not in distance and cells.get(near, "O") != "O":
                distance[near] = distance[row, column] + 1
                frontier.append(near)
    far = distance[player]
    return [
        move for move, (down, right) in STEPS.items() if distance.get((player[0] + down, player[1] + right)) == far - 1
    ]


def conversation(seed: int, chance: float) -> list[dict[str, str]]:
    """One episode as chat messages; each move is any of the four with probability `chance`, else a best one."""
    lake, choose, messages = make_env("frozen_lake", LAKE), random.Random(seed), []
    observation, _ = lake.reset(seed=seed)
    observation, ended = f"{lake.instruction}\n{observation}", False
    while not ended:
        lines = observation.removeprefix(f"{lake.instruction}\n")
        move = choose.choice(MOVES if choose.random() < chance else best_moves(lines))
        messages.append({"role": "user", "content": f"{observation}\n"})
        messages.append({"role": "assistant", "content": f"<answer>{move}</answer>"})
        observation, _, terminated, truncated, _ = lake.step(messages[-1]["content"])
        ended = terminated or truncated
    return messages


def write_play(folder: Path, seed: int, train: int, val: int, chance: float) -> Path:
    """`train.jsonl` and `val.jsonl` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("val", val)):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for number in range(count):
                played = conversation(role_seed(seed, "play", name, number), chance)
                file.write(json.dumps({"id": f"{name}-{number}", "messages": played}) + "\n")
    return folder


def main() -> None:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=42, help="seed of maps and moves")
    parser.add_argument("--train", type=int, default=TRAIN_EPISODES, help="episodes to learn from")
    parser.add_argument("--val", type=int, default=VALIDATION_EPISODES, help="episodes to measure with")
    parser.add_argument("--chance", type=float, default=RANDOM_MOVES, help="share of moves that are random")
    arguments = parser.parse_args()
    print(f"wrote {write_play(arguments.out, arguments.seed, arguments.train, arguments.val, arguments.chance)}")


if __name__ == "__main__":
    main()

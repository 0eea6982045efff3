"""Batches of trajectories with one sample per trajectory or per turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from roll.algorithms.advantages import Advantages, AdvantageSettings, compute_advantages
from roll.algorithms.estimators import ADV_ESTIMATORS
from roll.algorithms.turns import Turns, read_turns

TURN_ESTIMATORS = [name for name, each in ADV_ESTIMATORS.items() if each.needs == "turns"]
RESPONSE_ESTIMATORS = [name for name in ADV_ESTIMATORS if name not in TURN_ESTIMATORS]

JUNK = 77.0
"""Value of every entry that must not be read."""


@dataclass
class Trajectory:
    """Turns with a reward, a state and some tokens each; the score is the sum of the rewards unless given."""

    group: int
    rewards: list[float]
    states: list[int]
    lengths: list[int] = field(default_factory=list)
    tag: int = 0
    score: float | None = None

    def row(self, number: int, turns: Sequence[int]) -> dict[str, object]:
        """A sample with these turns of the trajectory, each after one token of the environment."""
        index: list[int] = []
        for position, turn in enumerate(turns):
            index += [-1] + [position] * (self.lengths[turn] if self.lengths else 2)
        return {
            "number": number,
            "turns": list(turns),
            "index": index,
            "rewards": [self.rewards[turn] for turn in turns],
            "states": [100 * self.group + self.states[turn] for turn in turns],
            "score": sum(self.rewards) if self.score is None else self.score,
            "group": self.group,
            "tag": self.tag,
        }


@dataclass
class Batch:
    """Tensors, and for each sample its trajectory and turns."""

    tensors: dict[str, Tensor]
    rows: list[dict]

    def advantages(self, config: AdvantageSettings, **more) -> Advantages:
        tensors = self.tensors
        return compute_advantages(
            tensors["scores"],
            tensors["group_ids"],
            tensors["response_mask"],
            config,
            turns=read_turns(tensors),
            **more,
        )

    def per_turn(self, values: Tensor) -> dict[tuple[int, int], float]:
        """(trajectory, turn) -> the value of all tokens of the turn; all other tokens must have 0."""
        found = {}
        for row, line in enumerate(self.rows):
            for position, turn in enumerate(line["turns"]):
                of_turn = values[row][self.tensors["turn_index"][row] == position]
                assert (of_turn == of_turn[0]).all()
                found[line["number"], turn] = of_turn[0].item()
        assert (values[~self.tensors["response_mask"]] == 0).all()
        return found


def make_batch(trajectories: Sequence[Trajectory], steps: bool = False, padding: int = 0) -> Batch:
    """One sample per trajectory, or per turn with `steps`, and `padding` samples without response tokens."""
    rows = [
        one.row(number, turns)
        for number, one in enumerate(trajectories)
        for turns in ([[turn] for turn in range(len(one.rewards))] if steps else [range(len(one.rewards))])
    ]
    columns = max((len(row["rewards"]) for row in rows), default=1)
    tokens = max((len(row["index"]) for row in rows), default=1) + 1
    total = len(rows) + padding
    tensors = {
        "turn_index": torch.full((total, tokens), -1),
        "turn_rewards": torch.full((total, columns), JUNK),
        "turn_count": torch.ones(total, dtype=torch.int64),
        "state_ids": torch.zeros(total, columns, dtype=torch.int64),
        "trajectory_ids": torch.arange(total) + 1000,
        "tag_ids": torch.zeros(total, dtype=torch.int64),
        "scores": torch.full((total,), JUNK),
        "group_ids": torch.arange(total) + 500,
    }
    for row, line in enumerate(rows):
        tensors["turn_index"][row, : len(line["index"])] = torch.tensor(line["index"])
        tensors["turn_rewards"][row] = torch.nn.functional.pad(
            torch.tensor(line["rewards"]), (0, columns - len(line["rewards"]))
        )
        tensors["turn_count"][row] = len(line["rewards"])
        tensors["state_ids"][row] = torch.nn.functional.pad(
            torch.tensor(line["states"]), (0, columns - len(line["states"])), value=-1
        )
        named = {"trajectory_ids": "number", "tag_ids": "tag", "scores": "score", "group_ids": "group"}
        for key, name in named.items():
            tensors[key][row] = line[name]
    tensors["response_mask"] = tensors["turn_index"] >= 0
    return Batch(tensors, rows)


def single_turns(scores: Tensor, response_mask: Tensor) -> Turns:
    """Turns of samples that are trajectories of one turn, all from the same state."""
    samples = torch.arange(len(scores))
    return Turns(
        turn_index=torch.where(response_mask.bool(), 0, -1),
        turn_rewards=scores[:, None].float(),
        turn_count=torch.ones_like(samples),
        state_ids=torch.zeros_like(samples)[:, None],
        trajectory_ids=samples,
        tag_ids=torch.zeros_like(samples),
    )

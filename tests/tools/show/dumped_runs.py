"""Folders of finished runs with dumped samples: two groups of trajectories, or one group of responses."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from roll.configs.environments import SampleBy
from roll.datasets.batch import Batch
from roll.datasets.collate import collate_samples
from roll.pipeline.learning.dump import dump_samples
from roll.rollout.rollout_batch import batch_of_groups
from roll.rollout.types import GenerateResult, Group, StopReason, Trajectory

START, RIGHT, GOAL = "P__\n_O_\n__G", "_P_\n_O_\n__G", "___\n_O_\n__√"


def trajectory(
    turns: list[tuple[str, str, float]], outcome: str, stop: StopReason = "terminated", version: int = 3
) -> Trajectory:
    """A trajectory of (observation, answer, reward) turns; an answer has 2 tokens, that of turn 2 is of 2 versions."""
    made = Trajectory()
    for index, (observation, text, reward) in enumerate(turns):
        made.add_context([1, 2])
        versions = [version, version + (index == 1)]
        result = GenerateResult("request", [10 + index, 5], [-0.5, -0.1], versions, "stop")
        made.add_response(list(made.ids), result, observation, text).reward = reward
    made.stop, made.outcome = stop, outcome
    made.metrics = {"success": float(made.score == 1), "action_is_valid": 1.0}
    return made


def lake_groups() -> list[Group]:
    """A FrozenLake map solved once and failed once, and a word game that reached the token limit."""
    right = "I go <answer>Right</answer>"
    won = trajectory([(START, right, 0.0), (RIGHT, "<answer>Down</answer>", 1.0)], GOAL)
    lost = trajectory([(START, right, 0.0), (RIGHT, "hm", -0.01)], RIGHT, "truncated")
    guess = trajectory([("Your guess?", "I say <answer>7</answer>", 0.25)], "Higher.", "sequence_length")
    return [Group(12, "FrozenLake", 77, "FrozenLake-12", [won, lost]), Group(13, "Guess", 78, "Guess-13", [guess])]


def write_step(folder: Path, step: int, data: Batch) -> None:
    """Writes the samples of a step; the advantage of each token is its score minus 0.5."""
    advantages = (data.batch["scores"] - 0.5)[:, None].expand(data.batch["response_mask"].shape)
    data.batch["advantages"] = advantages.contiguous()
    dump_samples(data, folder, step)


def run_folder(folder: Path, model: Path | None = None, **config: object) -> Path:
    """An output_dir with a run.json; its samples are in the subfolder `samples`."""
    folder.mkdir(exist_ok=True)
    role = {"model_args": {"model_name_or_path": None if model is None else str(model)}}
    settings = {"pipeline": "agentic", "output_dir": str(folder), "rollout_dump_dir": str(folder / "samples")}
    settings["rollout_dump_steps"] = 10
    (folder / "run.json").write_text(json.dumps({"config": {**settings, "actor_train": role, **config}}))
    return folder


def agentic_run(folder: Path, *steps: int, groups: list[Group] | None = None, sample_by: SampleBy = "traj") -> Path:
    """A run with the same groups in every step, padded to a multiple of four samples."""
    for step in steps:
        batch = batch_of_groups(groups or lake_groups(), sample_by, multiple=4, episodes=True)
        write_step(folder / "samples", step, batch)
    return run_folder(folder)


def rlvr_run(folder: Path, responses: list[list[int]], model: Path | None = None) -> Path:
    """A run of one step with one group of responses to one prompt."""
    rows = [([7, 8], ids, [-0.1] * len(ids), [4] * len(ids)) for ids in responses]
    tensors = collate_samples(rows)
    tensors["scores"] = torch.arange(len(rows), dtype=torch.float32)
    tensors["group_ids"] = torch.zeros(len(rows), dtype=torch.int64)
    names = {"id": "train-31", "prompt_id": "train-31", "ground_truth": "19"}
    columns = {name: [text] * len(rows) for name, text in names.items()}
    write_step(folder / "samples", 1, Batch(tensors, columns))
    return run_folder(folder, model)

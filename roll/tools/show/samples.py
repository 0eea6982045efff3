"""Reads the samples of a training step from the dump of a run and groups them; turns of a trajectory are joined."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from roll.base.errors import ConfigError
from roll.tools.terminal import option_error
from roll.trackers.files import RUN_FILE
from roll.trackers.sample_files import read_samples

EPISODE = ("tag", "seed", "stop", "outcome", "metrics")
"""What a trajectory of a dump has beside its turns."""


@dataclass(frozen=True)
class ShownTurn:
    """One observation and the model's answer.

    `advantage` is the mean over the answer's tokens if each turn was a sample, None if the trajectory was one sample.
    `branch` is the number of the branch of an agent's session, 0 where there is one only.
    """

    observation: str
    text: str
    reward: float
    versions: Sequence[int]
    advantage: float | None
    branch: int = 0


@dataclass(frozen=True)
class ShownSample:
    """One response or one trajectory.

    Attributes:
        prompt_id: of the prompt, or of the environment and its seed.
        advantages: one per trained token; empty if the dump has none.
        weights: of trained tokens in the gradient (see `token_weights`).
        versions: weight versions that generated it, without duplicates.
        response_ids: tokens of the response, or of all answers of a trajectory.
        episode: EPISODE of the trajectory; None for a response.
        turns: of the trajectory, also where each was a sample.
    """

    id: str
    prompt_id: str
    ground_truth: Any
    score: float
    advantages: Sequence[float]
    weights: Sequence[float]
    versions: Sequence[int]
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    episode: Mapping[str, Any] | None
    turns: Sequence[ShownTurn]

    @property
    def advantage(self) -> float | None:
        """Mean over trained tokens."""
        return _mean(self.advantages)

    @property
    def weight(self) -> float:
        """Of all its tokens in the gradient."""
        return sum(self.weights)

    @property
    def content(self) -> tuple[object, ...]:
        """What equal responses or trajectories have in common."""
        return (self.score, *self.response_ids, *((turn.observation, turn.text) for turn in self.turns))


@dataclass(frozen=True)
class SampleGroup:
    """Samples of one prompt or environment seed; `number` is the group's number in the dump."""

    number: int
    samples: Sequence[ShownSample]

    @property
    def scores(self) -> list[float]:
        return [sample.score for sample in self.samples]

    @property
    def advantage(self) -> float | None:
        """Mean over the trained tokens of all samples."""
        return _mean([value for sample in self.samples for value in sample.advantages])

    @property
    def weight(self) -> float:
        """Of all its samples in the gradient."""
        return sum(sample.weight for sample in self.samples)

    def distinct(self) -> list[list[ShownSample]]:
        """Equal samples together, those with the most weight first."""
        equal: dict[tuple[object, ...], list[ShownSample]] = {}
        for sample in self.samples:
            equal.setdefault(sample.content, []).append(sample)
        return sorted(equal.values(), key=lambda same: -sum(sample.weight for sample in same))


def find_dump(run: Path) -> tuple[Path, str | None]:
    """The folder with the samples of a run, and its model, from its run.json, which a run writes as it starts.

    Raises:
        ConfigError: the folder is not the `output_dir` of a run, or the run does not write samples.
    """
    file = run / RUN_FILE
    try:
        config: Mapping[str, Any] = json.loads(file.read_text())["config"]
        if "rollout_dump_dir" not in config:
            raise option_error("RUN_DIR", f"{run} is a run of the {config['pipeline']} pipeline, which has no samples")
        dump_dir, output_dir = config["rollout_dump_dir"], config["output_dir"]
        steps_kept = config["rollout_dump_steps"]
        model = config["actor_train"]["model_args"]["model_name_or_path"]
    except (FileNotFoundError, NotADirectoryError):
        raise option_error("RUN_DIR", f"{run} has no {RUN_FILE}; give the output_dir of a run") from None
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise option_error("RUN_DIR", f"{file} is not a valid run.json: {type(error).__name__} {error}") from None
    if steps_kept == 0:
        raise option_error(
            "rollout_dump_steps", f"is 0 in {file}, so the run wrote no samples; leave it out, and run again"
        )
    start = working_directory(run, output_dir)
    return start / dump_dir, str(start / model) if model and (start / model).is_dir() else model


def working_directory(run: Path, output_dir: str) -> Path:
    """The folder that a run was started in, to which relative paths of its configuration refer.

    This is the run's folder without its trailing `output_dir`; the current folder if `output_dir` is absolute or the
    run's folder does not end with it.
    """
    absolute, parts = run.resolve(), Path(output_dir).parts
    if not Path(output_dir).is_absolute() and parts and absolute.parts[-len(parts) :] == parts:
        return Path(*absolute.parts[: -len(parts)])
    return Path()


def choose_step(steps: Sequence[int], requested: int | None, folder: Path) -> int:
    """The step to show: `requested`, or the last one of the ascending `steps` if that is None.

    Raises:
        ConfigError: there is no step yet, or not the requested one.
    """
    if not steps:
        raise option_error("RUN_DIR", f"{folder} has no steps yet; wait until the first step has finished")
    if requested is None:
        return steps[-1]
    if requested in steps:
        return requested
    below = max((step for step in steps if step < requested), default=None)
    above = min((step for step in steps if step > requested), default=None)
    nearest = " and ".join(str(step) for step in (below, above) if step is not None)
    raise option_error(
        "--step", f"{requested} is not in {folder}; nearest: {nearest} (steps are {steps[0]} to {steps[-1]})"
    )


def read_groups(folder: Path, step: int) -> list[SampleGroup]:
    """Groups of a step.

    Raises:
        ConfigError: the file of the step cannot be read, or lacks fields of a dump.
    """
    try:
        return groups_of(read_samples(folder, step))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise option_error("--step", f"{step} in {folder} is not valid: {type(error).__name__} {error}") from None


def groups_of(rows: Iterable[Mapping[str, Any]]) -> list[SampleGroup]:
    """Groups in the order of the dump.

    Rows with the same trajectory are turns or branches of it and become one sample. Responses to one prompt share their
    id, so each of their rows is a sample.

    Raises:
        KeyError: a row lacks a field that every dump has.
    """
    groups: dict[int, dict[tuple[str, Any], list[Mapping[str, Any]]]] = {}
    for index, row in enumerate(rows):
        key = ("trajectory", row["episode"]["trajectory"]) if "episode" in row else ("response", index)
        groups.setdefault(row["group"], {}).setdefault(key, []).append(row)
    return [SampleGroup(number, [_sample(rows) for rows in samples.values()]) for number, samples in groups.items()]


def sample_weight(row: Mapping[str, Any]) -> float:
    """Sum of `token_weights` of a row."""
    return sum(token_weights(row))


def token_weights(row: Mapping[str, Any]) -> list[float]:
    """|advantage| (1 - probability) of each trained token of a row: its weight in the gradient.

    The gradient of the logits of a token with log-prob l and coefficient A has a norm of |A| (1 - e^l) within sqrt(2).
    """
    advantages = row.get("advantages") or []
    names = ("train_log_probs", "old_log_probs", "behavior_log_probs")
    log_probs = next(filter(None, map(row.get, names)), [-math.inf] * len(advantages))
    return [abs(a) * (1 - math.exp(min(0.0, log_prob))) for a, log_prob in zip(advantages, log_probs, strict=False)]


def _sample(rows: Sequence[Mapping[str, Any]]) -> ShownSample:
    """The sample of a response (one row) or a trajectory (one row, or one per turn)."""
    first = rows[0]
    return ShownSample(
        id=str(first["episode"]["trajectory"] if "episode" in first else first["id"]),
        prompt_id=str(first["prompt_id"]),
        ground_truth=first["ground_truth"],
        score=float(first["score"]),
        advantages=[value for row in rows for value in row.get("advantages") or []],
        weights=[weight for row in rows for weight in token_weights(row)],
        versions=sorted({version for row in rows for version in row.get("weight_version", [])}),
        prompt_ids=first["prompt_ids"],
        response_ids=[token for row in rows for token in row["response_ids"]],
        episode={name: first["episode"][name] for name in EPISODE} if "episode" in first else None,
        turns=_turns(rows) if "episode" in first else [],
    )


def _turns(rows: Sequence[Mapping[str, Any]]) -> list[ShownTurn]:
    """Turns of all rows; the last one of a branch has the reward of the session, which every branch is trained with."""
    turns = [
        ShownTurn(
            turn["observation"],
            turn["text"],
            turn["reward"],
            turn["versions"],
            _mean(row.get("advantages", [])) if len(rows) > 1 and len(row["episode"]["turns"]) == 1 else None,
            row["episode"].get("branch", 0),
        )
        for row in rows
        for turn in row["episode"]["turns"]
    ]
    ends = {turn.branch: number for number, turn in enumerate(turns) if turn.branch}
    for number in ends.values():
        turns[number] = replace(turns[number], reward=float(rows[0]["score"]))
    return turns


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None

"""Lines of a dump as groups of samples; the turns of a trajectory together, also where each was a sample."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from roll.configs.errors import ConfigError, Problem
from roll.pipeline.rollout_dump import read_samples
from roll.trackers.run_json import FILE_NAME


@dataclass(frozen=True)
class Turn:
    """One answer; `advantage` is told where the turns of a trajectory were samples of their own."""

    observation: str
    text: str
    reward: float
    versions: Sequence[int]
    advantage: float | None


@dataclass(frozen=True)
class Episode:
    """What a trajectory consists of, as the dump says it."""

    tag: str
    seed: int
    stop: str | None
    outcome: str
    metrics: Mapping[str, float]
    turns: Sequence[Turn]


@dataclass(frozen=True)
class Sample:
    """One response or one trajectory.

    Attributes:
        advantages: of each token that was learned from; empty where the dump has none.
        versions: weight versions that sampled it, each once.
        episode: of a trajectory; None of a response.
    """

    id: str
    score: float
    advantages: Sequence[float]
    versions: Sequence[int]
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    episode: Episode | None

    @property
    def advantage(self) -> float | None:
        """Mean over its tokens."""
        return _mean(self.advantages)


@dataclass(frozen=True)
class SampleGroup:
    """Samples that were compared with each other; `number` is what the dump calls it."""

    number: int
    samples: Sequence[Sample]

    @property
    def scores(self) -> list[float]:
        """Of each sample."""
        return [sample.score for sample in self.samples]

    @property
    def advantage(self) -> float | None:
        """Mean over the tokens of all samples."""
        return _mean([value for sample in self.samples for value in sample.advantages])


def groups_of(rows: Iterable[Mapping[str, Any]]) -> list[SampleGroup]:
    """Groups in the order of the dump.

    Rows whose `episode` names one trajectory are turns of it; responses to one prompt share their id
    and stay apart.

    Raises:
        KeyError: a row lacks what every dump has.
    """
    groups: dict[int, dict[Any, list[Mapping[str, Any]]]] = {}
    for place, row in enumerate(rows):
        name = ("trajectory", row["episode"]["trajectory"]) if "episode" in row else ("response", place)
        groups.setdefault(row["group"], {}).setdefault(name, []).append(row)
    return [SampleGroup(number, [_sample(same) for same in samples.values()]) for number, samples in groups.items()]


def _sample(rows: Sequence[Mapping[str, Any]]) -> Sample:
    """Of the rows of one trajectory, or of the one row of a response."""
    first = rows[0]
    return Sample(
        id=str(first["episode"]["trajectory"] if "episode" in first else first["id"]),
        score=float(first["score"]),
        advantages=[value for row in rows for value in row.get("advantages", [])],
        versions=sorted({version for row in rows for version in row.get("weight_version", [])}),
        prompt_ids=first["prompt_ids"],
        response_ids=[token for row in rows for token in row["response_ids"]],
        episode=_episode(rows) if "episode" in first else None,
    )


def _episode(rows: Sequence[Mapping[str, Any]]) -> Episode:
    told = rows[0]["episode"]
    turns = [
        Turn(
            turn["observation"],
            turn["text"],
            turn["reward"],
            turn["versions"],
            _mean(row.get("advantages", [])) if len(rows) > 1 else None,
        )
        for row in rows
        for turn in row["episode"]["turns"]
    ]
    return Episode(told["tag"], told["seed"], told["stop"], told["outcome"], told["metrics"], turns)


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


@dataclass(frozen=True)
class RunDump:
    """What a run's configuration says of its samples.

    Attributes:
        folder: with one file for each step.
        model: folder of the trained model, beside which the tokenizer lies; None where the configuration names none.
    """

    folder: Path
    model: str | None


def wrong(path: str, message: str) -> ConfigError:
    """One problem of what was asked for, ready to be raised."""
    return ConfigError([Problem(path, message)])


def find_dump(run: Path) -> RunDump:
    """Reads `run`/run.json, which is there from the start of a run on.

    Raises:
        ConfigError: the folder is not that of a run that writes its samples.
    """
    file = run / FILE_NAME
    try:
        config: Mapping[str, Any] = json.loads(file.read_text())["config"]
        if "rollout_dump_dir" not in config:
            raise wrong("RUN_DIR", f"{run} is a run of {config['pipeline']}, which samples nothing to show")
        dumped, output = config["rollout_dump_dir"], config["output_dir"]
        model = config["actor_train"]["model_args"]["model_name_or_path"]
    except (FileNotFoundError, NotADirectoryError):
        raise wrong("RUN_DIR", f"{run} has no {FILE_NAME}; give the output_dir of a run") from None
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise wrong("RUN_DIR", f"{file} is not the record of a run: {type(error).__name__} {error}") from None
    if dumped is None:
        raise wrong(
            "rollout_dump_dir",
            f"is null in {file}, so the run kept no samples; set it to a folder, such as "
            f"rollout_dump_dir={os.path.join(output, 'samples')}, and run again",
        )
    start = started_in(run, output)
    local = None if model is None else start / model
    return RunDump(start / dumped, str(local) if local is not None and local.is_dir() else model)


def started_in(run: Path, output_dir: str) -> Path:
    """The folder that relative paths of a run's configuration are relative to.

    That is what is left of the run's folder without its `output_dir`; where they do not match, the folder we are in.
    """
    here, parts = run.resolve(), Path(output_dir).parts
    if not Path(output_dir).is_absolute() and parts and here.parts[-len(parts) :] == parts:
        return Path(*here.parts[: -len(parts)])
    return Path()


def choose_step(steps: Sequence[int], wanted: int | None, folder: Path) -> int:
    """The step to show: the last one where none is wanted.

    Args:
        steps: that are there, in order.
        wanted: by the user.
        folder: of the dump, for errors.

    Raises:
        ConfigError: there is no step yet, or not this one.
    """
    if not steps:
        raise wrong("RUN_DIR", f"{folder} holds no step yet; wait for the first one to end")
    if wanted is None or wanted in steps:
        return steps[-1] if wanted is None else wanted
    near = [max((step for step in steps if step < wanted), default=None)]
    near += [min((step for step in steps if step > wanted), default=None)]
    names = " and ".join(str(step) for step in near if step is not None)
    raise wrong("--step", f"{wanted} is not in {folder}; nearest: {names} (there are {steps[0]} to {steps[-1]})")


def read_groups(folder: Path, step: int) -> list[SampleGroup]:
    """The groups of a step.

    Raises:
        ConfigError: the file cannot be read or has other lines than a dump.
    """
    try:
        return groups_of(read_samples(folder, step))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise wrong("--step", f"{step} in {folder} cannot be shown: {type(error).__name__} {error}") from None

"""Lines of a dump as groups of samples; the turns of a trajectory together, also where each was a sample."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any


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

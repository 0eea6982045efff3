"""After a run: which side waited for the other, and what split or ratio to try."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WAITS = 0.15
"""Share of a step that training waits for its batch, from which on the wait is worth a change: less is within the
spread of steps."""

IDLE = 0.3
"""Share of a step that engines stand still, from which on some of their devices would do more for training: a publish
and the bound on running ahead cost some of it in any run."""

LONG_TAIL = 3.0
"""Longest response over the mean one, from which on a batch waits for a few stragglers: lengths spread evenly below
the longest have a mean of half of it, 2."""

WARM_UP = 1
"""Steps left out at the start of a run: its first batch was not generated ahead."""

TRAINING = ("time/old_log_probs", "time/advantages", "time/train")
"""What training computes in a step."""

Lines = Sequence[Mapping[str, float | None]]
"""The lines of a metrics.jsonl."""


@dataclass(frozen=True)
class Split:
    """How a run was set up.

    Attributes:
        ratio: `async_generation_ratio`.
        generation: devices of actor_infer.
        training: devices of actor_train.
        shared: they are the same devices.
        drains: `in_flight_policy` is drain, so a publish waits for running responses.
    """

    ratio: float
    generation: int
    training: int
    shared: bool
    drains: bool = False

    @property
    def there(self) -> str:
        """In words."""
        if self.shared:
            return f"all {self.training} devices shared"
        return f"{self.generation} devices for generation, {self.training} for training"


@dataclass(frozen=True)
class Means:
    """Means over the steps of a run without validation and checkpoints, in seconds and shares of a step."""

    step: float
    wait: float
    drain: float
    generate: float
    train: float
    trainer_idle: float
    rollout_idle: float
    tail: float

    @property
    def waits(self) -> float:
        """Share of a step that training waits for responses."""
        return (self.wait + self.drain) / self.step

    @property
    def numbers(self) -> str:
        """What the advice is based on."""
        drain = f" and time/publish {self.drain:.2f} s" if self.drain else ""
        return (
            f"time/wait_prev_gen {self.wait:.2f} s{drain} of time/step {self.step:.2f} s, "
            f"trainer_idle {self.trainer_idle:.0%}, rollout_idle {self.rollout_idle:.0%}, "
            f"longest response {self.tail:.1f} x the mean"
        )


def advise(lines: Lines, split: Split) -> str:
    """One line: who waited, the numbers that say so, and what to try; empty without steps that generated.

    Generation and training take G and T seconds. Taking turns, a step takes G + T; side by side, the larger of both,
    and it is least where devices are split in proportion to G and T times the devices each has now.
    """
    means = measure(lines, split.drains)
    if means is None:
        return ""
    told = _synchronous(means, split) if split.ratio == 0 else _asynchronous(means, split)
    return f"{told} ({means.numbers}; {split.there})"


def measure(lines: Lines, drains: bool = False) -> Means | None:
    """Means over steps, without the first where there are more; `drains` as in `Split`."""
    steps = [line for line in lines if _at(line, "step") > 0 and line.get("time/wait_prev_gen") is not None]
    steps = steps[WARM_UP:] or steps
    if not steps:
        return None

    def mean(*names: str) -> float:
        return statistics.fmean(sum(_at(line, name) for name in names) for line in steps)

    longest, usual = mean("rollout/response_length_max"), mean("rollout/response_length_mean")
    return Means(
        step=max(mean("time/step") - mean("time/val", "time/checkpoint"), 1e-9),
        wait=mean("time/wait_prev_gen"),
        drain=mean("time/publish") if drains else 0.0,
        generate=mean("time/generate"),
        train=mean(*TRAINING),
        trainer_idle=mean("throughput/trainer_idle"),
        rollout_idle=mean("throughput/rollout_idle"),
        tail=longest / usual if usual else 1.0,
    )


def _synchronous(means: Means, split: Split) -> str:
    """What running ahead could save at most: the shorter of both, which the longer one hides."""
    longer, shorter = max(means.generate, means.train), min(means.generate, means.train)
    head = f"training and generation took turns: G {means.generate:.2f} s, then T {means.train:.2f} s"
    if split.shared:
        return (
            f"{head}, on the same devices; async_generation_ratio 1 needs separate ones, where a step takes "
            f"max(G/a, T/(1-a)), G + T at best: a gain only as far as one of them does not get slower on fewer devices"
        )
    return (
        f"{head}; async_generation_ratio 1 could save at most {shorter:.2f} s of a step ({shorter / means.step:.0%}): "
        f"max(G, T) = {longer:.2f} s instead of G + T = {longer + shorter:.2f} s"
    )


def _asynchronous(means: Means, split: Split) -> str:
    further = f"try async_generation_ratio {split.ratio + 1:g}"
    if split.shared:
        return "training and generation share their devices, so neither ran while the other did; try separate devices"
    if means.waits >= WAITS:
        if means.tail >= LONG_TAIL:
            return f"training waited for a long tail of responses, which more devices do not shorten; {further}"
        if means.rollout_idle >= IDLE:
            return f"training waited, and the engines stood still as well: each waited for the other; {further}"
        return f"training waited for generation, whose responses are of like length; {_move(means, split, 1)}"
    if means.rollout_idle >= IDLE:
        return f"the engines waited for training; {_move(means, split, -1)}"
    return "neither side waited for the other: the split is right"


def _move(means: Means, split: Split, direction: int) -> str:
    """The split in proportion to the work of both, at least one device further in `direction` (1: to generation)."""
    total = split.generation + split.training
    if (split.training if direction > 0 else split.generation) == 1:
        role, other = ("generation", "training") if direction > 0 else ("training", "generation")
        return f"{role} needs more devices, and {other} has only one to give: add some"
    work, training = means.generate * split.generation, means.train * split.training
    share = round(total * work / (work + training)) if work + training > 0 else split.generation
    least = split.generation + direction
    devices = max(share, least) if direction > 0 else min(share, least)
    devices = min(max(devices, 1), total - 1)
    return f"try {devices} devices for generation and {total - devices} for training"


def _at(line: Mapping[str, float | None], name: str) -> float:
    return line.get(name) or 0.0

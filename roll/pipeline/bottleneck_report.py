"""Bottleneck report of a finished run: whether training or generation waited, and which split or ratio to try."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WAITS = 0.15
"""Share of a step that training waits for its batch above which a change helps; less is within the noise of steps."""

IDLE = 0.3
"""Idle share of the engines above which some of their devices are better used for training; weight updates and the
bound on running ahead cost some of it in any run."""

LONG_TAIL = 3.0
"""Longest over mean response length above which a batch waits for a few stragglers; it is 2 if lengths are uniform."""

WARM_UP = 1
"""Steps left out at the start of a run: its first batch was not generated ahead."""

CRITIC = {"time/old_log_probs": "time/values", "time/train": "time/train_critic"}
"""Work of actor_train, and the work of the critic that belongs to it."""

Lines = Sequence[Mapping[str, float | None]]
"""The lines of a metrics.jsonl."""


@dataclass(frozen=True)
class Split:
    """Devices and ratio of a run.

    Attributes:
        ratio: `async_generation_ratio`.
        generation: devices of actor_infer.
        training: devices of actor_train and the critic.
        shared: both use the same devices.
        drains: `in_flight_policy` is drain, so a weight update waits for running responses.
        critic_apart: the critic works at the same time as actor_train, on its own devices.
    """

    ratio: float
    generation: int
    training: int
    shared: bool
    drains: bool = False
    critic_apart: bool = False

    @property
    def description(self) -> str:
        """For the report."""
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
        """The measured values, for the report."""
        drain = f" and time/weight_update {self.drain:.2f} s" if self.drain else ""
        return (
            f"time/wait_prev_gen {self.wait:.2f} s{drain} of time/step {self.step:.2f} s, "
            f"trainer_idle {self.trainer_idle:.0%}, rollout_idle {self.rollout_idle:.0%}, "
            f"longest response {self.tail:.1f} x the mean"
        )


def bottleneck_report(lines: Lines, split: Split) -> str:
    """One line: which side waited, the measured values, and what to try; empty without steps that generated.

    Generation and training take G and T seconds. One after the other, a step takes G + T; concurrently, the larger of
    both, which is smallest where devices are split in proportion to G and T times the devices each has now.
    """
    means = measure(lines, split.drains, split.critic_apart)
    if means is None:
        return ""
    finding = _synchronous(means, split) if split.ratio == 0 else _asynchronous(means, split)
    return f"{finding} ({means.numbers}; {split.description})"


def measure(lines: Lines, drains: bool = False, critic_apart: bool = False) -> Means | None:
    """Means over steps, without the first WARM_UP if there are more; `drains` and `critic_apart` as in `Split`."""
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
        drain=mean("time/weight_update") if drains else 0.0,
        generate=mean("time/generate"),
        train=mean("time/advantages")
        + statistics.fmean(sum(trained_seconds(line, name, critic_apart) for name in CRITIC) for line in steps),
        trainer_idle=mean("throughput/trainer_idle"),
        rollout_idle=mean("throughput/rollout_idle"),
        tail=longest / usual if usual else 1.0,
    )


def trained_seconds(line: Mapping[str, float | None], name: str, critic_apart: bool) -> float:
    """Seconds of a step for the work `name` of actor_train (a key of CRITIC) and the critic's that belongs to it."""
    both = _at(line, name), _at(line, CRITIC[name])
    return max(both) if critic_apart else sum(both)


def _synchronous(means: Means, split: Split) -> str:
    """Running ahead saves at most the shorter of both times."""
    longer, shorter = max(means.generate, means.train), min(means.generate, means.train)
    head = f"training and generation took turns: G {means.generate:.2f} s, then T {means.train:.2f} s"
    if split.shared:
        return (
            f"{head}, on the same devices; async_generation_ratio 1 needs separate ones, where a step takes "
            f"max(G/a, T/(1-a)) if a is the share of the devices that generate, G + T at best: a gain only as far "
            f"as one of them does not get slower on fewer devices"
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
            return f"training waited, and the engines were idle too: each waited for the other; {further}"
        return f"training waited for generation, whose responses have similar lengths; {_move(means, split, 1)}"
    if means.rollout_idle >= IDLE:
        return f"the engines waited for training; {_move(means, split, -1)}"
    return "neither side waited for the other: the split is right"


def _move(means: Means, split: Split, direction: int) -> str:
    """The split in proportion to the work of both, at least one device off in `direction` (1: to generation)."""
    total = split.generation + split.training
    if (split.training if direction > 0 else split.generation) == 1:
        role, other = ("generation", "training") if direction > 0 else ("training", "generation")
        return f"{role} needs more devices, and {other} has only one: add devices"
    work, training = means.generate * split.generation, means.train * split.training
    share = round(total * work / (work + training)) if work + training > 0 else split.generation
    least = split.generation + direction
    devices = max(share, least) if direction > 0 else min(share, least)
    devices = min(max(devices, 1), total - 1)
    return f"try {devices} devices for generation and {total - devices} for training"


def _at(line: Mapping[str, float | None], name: str) -> float:
    return line.get(name) or 0.0

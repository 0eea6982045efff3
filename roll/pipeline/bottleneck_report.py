"""Bottleneck report of a finished run: whether training or generation waited, and which split or ratio to try."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roll.configs.asynchronous import exact_ratio

WAITS = 0.15
"""Share of a step that training waits for its batch above which a change helps; less is within the noise of steps."""

IDLE = 0.3
"""Idle share of the engines above which some of their devices are better used for training; weight updates and the
bound on running ahead cost some of it in any run."""

LONG_TAIL = 3.0
"""Longest over mean response length above which a batch waits for a few stragglers; it is 2 if lengths are uniform."""

WARM_UP = 1
"""Steps left out at the start of a run: its first batch was not generated ahead."""

LEAST_STEPS = 10
"""Measured steps below which there is no report: the mean of fewer is within the noise of steps."""

CRITIC = {"time/old_log_probs": "time/values", "time/train": "time/train_critic"}
"""Work of actor_train, and the work of the critic that belongs to it."""

Lines = Sequence[Mapping[str, float | None]]
"""The lines of a metrics.jsonl."""


@dataclass(frozen=True)
class Split:
    """Devices, ratio, environments and rewards of a run.

    Attributes:
        ratio: `async_generation_ratio`.
        generation: devices of actor_infer.
        training: devices of actor_train and the critic.
        shared: both use the same devices.
        drains: `in_flight_policy` is drain, so a weight update waits for running responses.
        critic_apart: the critic works at the same time as actor_train, on its own devices.
        cpu: devices are slots of the cores of one machine, so moving or adding some does not help.
        groups: of environments that run at a time; None without environments.
        batch_groups: groups of one batch.
        reward_keys: keys that let more responses be scored at a time.
    """

    ratio: float
    generation: int
    training: int
    shared: bool
    drains: bool = False
    critic_apart: bool = False
    cpu: bool = False
    groups: int | None = None
    batch_groups: int = 1
    reward_keys: tuple[str, ...] = ()

    @property
    def description(self) -> str:
        """For the report."""
        if self.cpu:
            return "on a CPU"
        if self.shared:
            return f"all {self.training} devices shared"
        return f"{self.generation} devices for generation, {self.training} for training"

    def admitted(self, ratio: float) -> int:
        """Groups that may run at a time with this ratio."""
        return math.floor((1 + exact_ratio(ratio)) * self.batch_groups)


@dataclass(frozen=True)
class Means:
    """Means over `steps` steps of a run without validation and checkpoints, in seconds and shares of a step."""

    steps: int
    step: float
    wait: float
    drain: float
    generate: float
    environments: float
    rewards: float
    train: float
    update: float
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
        work = {"generate": self.generate, "env": self.environments, "reward": self.rewards}
        busy = "".join(f"time/{name} {seconds:.2f} s, " for name, seconds in work.items() if seconds)
        return (
            f"time/wait_prev_gen {self.wait:.2f} s{drain} of time/step {self.step:.2f} s, {busy}"
            f"trainer_idle {self.trainer_idle:.0%}, rollout_idle {self.rollout_idle:.0%}, "
            f"longest response {self.tail:.1f} x the mean"
        )


def bottleneck_report(lines: Lines, split: Split) -> str:
    """One line: which side waited, the measured values, and what to try; empty below LEAST_STEPS that generated.

    Generation and training take G and T seconds. One after the other, a step takes G + T; concurrently, the larger of
    both, which is smallest where devices are split in proportion to G and T times the devices each has now.
    """
    means = measure(lines, split.drains, split.critic_apart)
    if means is None or means.steps < LEAST_STEPS:
        return ""
    finding = _slow_users_code(means, split)
    finding = finding or (_synchronous(means, split) if split.ratio == 0 else _asynchronous(means, split))
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
        steps=len(steps),
        step=max(mean("time/step") - mean("time/val", "time/checkpoint"), 1e-9),
        wait=mean("time/wait_prev_gen"),
        drain=mean("time/weight_update") if drains else 0.0,
        generate=mean("time/generate"),
        environments=mean("time/env"),
        rewards=mean("time/reward"),
        update=mean("time/weight_update"),
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


def _slow_users_code(means: Means, split: Split) -> str:
    """Environments or rewards that training waited for, while the engines were idle; empty for neither."""
    slower = max(means.environments, means.rewards)
    idle = means.rollout_idle if split.ratio else 1 - means.generate / max(means.wait, 1e-9)
    if means.waits < WAITS or idle < IDLE or slower <= means.generate:
        return ""
    head, seconds = "environments take", f"{slower:.2f} s of a step of {means.step:.2f} s"
    if means.environments == slower:
        return f"{head} {seconds}, longer than generation; {_more_environments(split)}"
    keys = " or ".join(split.reward_keys)
    return f"rewards take {seconds}, longer than generation; " + (f"raise {keys}" if keys else "use a faster reward")


def _more_environments(split: Split) -> str:
    """How more environments run at a time: as many as the ratio admits, or those of a higher ratio."""
    key, now, further = "train_env_manager.num_env_groups", split.groups or 1, math.floor(split.ratio) + 1
    admitted, target = split.admitted(split.ratio), split.admitted(further)
    if now < admitted:
        return f"raise {key} from {now} to {admitted}"
    apart = " and separate devices for training" if split.shared and not split.cpu else ""
    more = f"raise {key} from {now} to {target}" if now < target else f"let more of {key} {now} run"
    return f"{more} with async_generation_ratio {further}{apart}"


def _synchronous(means: Means, split: Split) -> str:
    """Running ahead saves at most the shorter of both times; G is the time of a whole batch, with its scoring."""
    batch, train = means.wait, means.train
    head = f"training and generation took turns: a batch took G {batch:.2f} s, then training T {train:.2f} s"
    if split.shared and split.cpu:
        return head
    if split.shared:
        return (
            f"{head}, on the same devices; async_generation_ratio 1 needs separate ones, where a step takes "
            f"max(G/a, T/(1-a)) if a is the share of the devices that generate, G + T at best: a gain only as far "
            f"as one of them does not get slower on fewer devices"
        )
    longer, shorter = max(batch, train), min(batch, train)
    return (
        f"{head}; async_generation_ratio 1 saves up to {shorter:.2f} s of a step ({shorter / means.step:.0%}) if both "
        f"take as long as now: max(G, T) = {longer:.2f} s instead of G + T = {longer + shorter:.2f} s"
    )


def _asynchronous(means: Means, split: Split) -> str:
    if split.shared and not split.cpu:
        return "training and generation share their devices, so each is slower while both run; try separate devices"
    further = f"try async_generation_ratio {split.ratio + 1:g}" if split.groups is None else _more_environments(split)
    if means.waits >= WAITS:
        if means.tail >= LONG_TAIL:
            stays = "" if split.cpu else ", which more devices do not shorten"
            return f"training waited for a long tail of responses{stays}; {further}"
        if means.rollout_idle >= IDLE:
            return f"training waited, and the engines were idle too: each waited for the other; {further}"
        return f"training waited for generation{_move(means, split, 1)}"
    if means.rollout_idle >= IDLE and means.update > means.train:
        return f"weight updates take {means.update:.2f} s of a step, longer than training, and the engines were idle"
    if means.rollout_idle >= IDLE:
        behind = max(means.environments, means.rewards) <= means.generate
        head = "the engines waited for training" if behind else "training hardly waited, and the engines were idle"
        return f"{head}{_move(means, split, -1)}"
    return "neither side waited for the other: the split is right"


def _move(means: Means, split: Split, direction: int) -> str:
    """The split in proportion to the work of both, at least one device off in `direction`; empty on a CPU."""
    if split.cpu:
        return ""
    total = split.generation + split.training
    if (split.training if direction > 0 else split.generation) == 1:
        role, other = ("generation", "training") if direction > 0 else ("training", "generation")
        return f"; {role} needs more devices, and {other} has only one: add devices"
    work, training = means.generate * split.generation, means.train * split.training
    share = round(total * work / (work + training)) if work + training > 0 else split.generation
    least = split.generation + direction
    devices = max(share, least) if direction > 0 else min(share, least)
    devices = min(max(devices, 1), total - 1)
    return f"; try {devices} devices for generation and {total - devices} for training"


def _at(line: Mapping[str, float | None], name: str) -> float:
    return line.get(name) or 0.0

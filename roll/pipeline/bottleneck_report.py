"""Bottleneck report of a finished run: whether training or generation waited, and what to try."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roll.configs.asynchronous import exact_ratio

WAITS = 0.15
"""Share of a step below which a wait or a gain is within the noise of steps."""

LEAST_GAIN_S = 0.1
"""Seconds of a step below which a gain is not worth a change, whatever its share of a short step."""

IDLE = 0.3
"""Idle share of the engines above which they waited; weight updates and the bound on running ahead cost some anyway."""

LONG_TAIL = 3.0
"""Longest over mean response length above which a batch waits for a few stragglers; it is 2 if lengths are uniform."""

WARM_UP = 1
"""Steps left out at the start of a run: its first batch was not generated ahead."""

LEAST_STEPS = 10
"""Measured steps below which there is no report: the mean of fewer is within the noise of steps."""

CRITIC = {"time/old_log_probs": "time/values", "time/train": "time/train_critic"}
"""Work of actor_train, and the work of the critic that belongs to it."""


@dataclass(frozen=True)
class Split:
    """Devices, ratio, environments and rewards of a run."""

    ratio: float  # async_generation_ratio
    generation: int  # devices of actor_infer
    training: int  # devices of actor_train and the critic
    shared: bool  # both use the same devices
    drains: bool = False  # in_flight_policy is drain, so a weight update waits for running responses
    critic_apart: bool = False  # the critic works at the same time as actor_train, on its own devices
    cpu: bool = False  # devices are slots of the cores of one machine, so moving or adding some does not help
    own_cores: bool = False  # on a CPU, each device is pinned to its own cores
    groups: int | None = None  # of environments that run at a time; None without environments
    batch_groups: int = 1  # groups of one batch
    reward_keys: tuple[str, ...] = ()  # keys that let more responses be scored at a time

    @property
    def description(self) -> str:
        apart = f"{self.generation} devices for generation, {self.training} for training"
        return "on a CPU" if self.cpu else f"all {self.training} devices shared" if self.shared else apart

    def admitted(self, ratio: float) -> int:
        return math.floor((1 + exact_ratio(ratio)) * self.batch_groups)


@dataclass(frozen=True)
class Means:
    """Means over `steps` steps of a run without validation and checkpoints, in seconds and shares of a step."""

    steps: int
    step: float
    wait: float
    drain: float  # wait of weight updates for running responses, which update does not include
    generate: float
    environments: float
    rewards: float
    train: float
    update: float
    pause: float  # part of update in which the engines generate nothing
    trainer_idle: float
    rollout_idle: float
    tail: float

    @property
    def least_gain(self) -> float:
        return max(WAITS * self.step, LEAST_GAIN_S)

    @property
    def numbers(self) -> str:
        """The measured values, for the report."""
        drain = f" and time/weight_update {self.drain + self.update:.2f} s" if self.drain else ""
        work = {"generate": self.generate, "env": self.environments, "reward": self.rewards}
        busy = "".join(f"time/{name} {seconds:.2f} s, " for name, seconds in work.items() if seconds)
        return (
            f"time/wait_prev_gen {self.wait:.2f} s{drain} of time/step {self.step:.2f} s, {busy}"
            f"trainer_idle {self.trainer_idle:.0%}, rollout_idle {self.rollout_idle:.0%}, "
            f"longest response {self.tail:.1f} x the mean"
        )


def bottleneck_report(lines: Sequence[Mapping[str, float | None]], split: Split) -> str:
    """One line: what limits a step, the measured values, and what to try; empty below LEAST_STEPS that generated.

    Of all changes it names the one that shortens `predicted_step` most, if by more than `Means.least_gain`.
    """
    means = mean_times(lines, split.drains and split.ratio > 0, split.critic_apart)
    if means is None or means.steps < LEAST_STEPS:
        return ""
    changes = [_faster_users_code(means, split), _faster_updates(means, split)]
    changes += [_synchronous(means, split)] if split.ratio == 0 else _asynchronous(means, split)
    return f"{max(changes)[1]} ({means.numbers}; {split.description})"


def predicted_step(means: Means, ratio: float, **times: float) -> float:
    """Seconds of a step without variance, if its parts took so many `times` as long as they did.

    A batch takes the longest of generation, environments and rewards. With ratio 0 the trainer's work, weight update
    included, follows it; otherwise both run at the same time, except that the engines pause for part of the update.
    """
    parts = {"generation": means.generate, "environments": means.environments, "rewards": means.rewards}
    most = means.step - means.pause  # a request that is running at a pause counts as generation
    batch = max(min(seconds, most) * times.get(name, 1) for name, seconds in parts.items())
    training, update = times.get("training", 1), times.get("update", 1)
    trainer = means.step - means.wait - means.drain + means.train * (training - 1) + means.update * (update - 1)
    if ratio == 0:
        return means.wait + batch - min(max(parts.values()), most) + trainer
    return max(batch + means.pause * update, trainer)


def mean_times(
    lines: Sequence[Mapping[str, float | None]], drains: bool = False, critic_apart: bool = False
) -> Means | None:
    """Means over steps, without the first WARM_UP if there are more; `drains` and `critic_apart` as in `Split`."""
    steps = [line for line in lines if _at(line, "step") > 0 and line.get("time/wait_prev_gen") is not None]
    steps = steps[WARM_UP:] or steps
    if not steps:
        return None

    def mean(*names: str) -> float:
        return statistics.fmean(sum(_at(line, name) for name in names) for line in steps)

    update = mean("time/weight_update")
    pause = mean("time/weight_update_pause") if "time/weight_update_pause" in steps[0] else update
    longest, usual = mean("rollout/response_length_max"), mean("rollout/response_length_mean")
    return Means(
        steps=len(steps),
        step=max(mean("time/step") - mean("time/val", "time/checkpoint"), 1e-9),
        wait=mean("time/wait_prev_gen"),
        drain=update - pause if drains else 0.0,
        generate=mean("time/generate"),
        environments=mean("time/env"),
        rewards=mean("time/reward"),
        update=pause if drains else update,
        pause=pause,
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


def _faster_users_code(means: Means, split: Split) -> tuple[float, str]:
    """Environments and rewards that take longer than generation and, concurrently, than training."""
    seconds = {"environments": means.environments, "rewards": means.rewards}
    slow = [name for name in seconds if seconds[name] > max(means.generate, means.train if split.ratio else 0)]
    raised = "raise " + " or ".join(split.reward_keys) if split.reward_keys else "use a faster reward"
    advice = " and ".join(_more_environments(split) if name == "environments" else raised for name in slow)
    head = " and ".join(f"{name} take {seconds[name]:.2f} s" for name in slow)
    gain = predicted_step(means, split.ratio) - predicted_step(means, split.ratio, **dict.fromkeys(slow, 0.0))
    return gain, f"{head} of a step of {means.step:.2f} s, longer than generation; {advice}"


def _faster_updates(means: Means, split: Split) -> tuple[float, str]:
    return predicted_step(means, split.ratio) - predicted_step(means, split.ratio, update=0), (
        f"weight updates{' (in_flight_policy drain)' if split.drains else ''} take {means.update:.2f} s of a step of "
        f"{means.step:.2f} s ({means.update / means.step:.0%}): training waits, and generation pauses for "
        f"{means.pause:.2f} s; raise model_update_buffer_size_mb if the weights fill several buckets"
    )


def _more_environments(split: Split) -> str:
    """How more environments run at a time: as many as the ratio admits, or those of a higher ratio."""
    key, now, further = "train_env_manager.num_env_groups", split.groups or 1, math.floor(split.ratio) + 1
    admitted, target = split.admitted(split.ratio), split.admitted(further)
    if now < admitted:
        return f"raise {key} from {now} to {admitted}"
    apart = " and separate devices for training" if split.shared and not split.cpu else ""
    more = f"raise {key} from {now} to {target}" if now < target else f"let more of {key} {now} run"
    return f"{more} with async_generation_ratio {further}{apart}"


def _synchronous(means: Means, split: Split) -> tuple[float, str]:
    """Running ahead saves at most the shorter of both times; G is the time of a whole batch, with its scoring."""
    longer, shorter = max(means.wait, means.train), min(means.wait, means.train)
    head = f"training and generation took turns: a batch took G {means.wait:.2f} s, then training T {means.train:.2f} s"
    if split.shared and not split.cpu:
        head += (
            ", on the same devices; on separate ones, async_generation_ratio 1 takes max(G/a, T/(1-a)) if a is "
            "the share of the devices that generate: G + T at best, or less as far as one does not need all devices"
        )
    if shorter < means.least_gain or split.shared or (split.cpu and not split.own_cores):
        return means.least_gain, head
    return shorter, (
        f"{head}; async_generation_ratio 1 saves up to {shorter:.2f} s of a step ({shorter / means.step:.0%}) if both "
        f"take as long as now: max(G, T) = {longer:.2f} s instead of G + T = {longer + shorter:.2f} s"
    )


def _asynchronous(means: Means, split: Split) -> list[tuple[float, str]]:
    """No change, a higher ratio and another split; with a long tail more steps of time, and not devices, help."""
    if split.shared and not split.cpu:
        return [(means.least_gain, "training and generation share their devices, so each is slower while both run")]
    further = f"try async_generation_ratio {split.ratio + 1:g}" if split.groups is None else _more_environments(split)
    gain, tail = means.step - predicted_step(means, split.ratio), means.tail >= LONG_TAIL
    finding = f"training waited, and the engines were idle too: each waited for the other; {further}"
    if means.drain > means.wait:
        finding = f"weight updates waited {means.drain:.2f} s of a step for running responses; in_flight_policy "
        finding += "retract and abort_resume do not wait"
    elif tail:
        gain = means.step - predicted_step(means, split.ratio, generation=(1 + split.ratio) / (2 + split.ratio))
        stays = "" if split.cpu else ", which more devices do not shorten"
        finding = f"training waited for a long tail of responses{stays}; {further}"
    changes = [(means.least_gain, _no_change(means, split)), (gain, finding)]
    return changes if split.cpu else [*changes, _move(means, split, tail)]


def _no_change(means: Means, split: Split) -> str:
    if means.wait + means.drain < WAITS * means.step and means.rollout_idle < IDLE:
        return "neither side waited for the other: the split is right"
    parts = {"generation": means.generate, "training": means.train, "weight updates": means.update + means.drain}
    parts |= {"environments": means.environments, "rewards": means.rewards}
    parts["other work"] = means.step - means.wait - means.train - parts["weight updates"]
    name = max(parts, key=parts.__getitem__)
    gain = predicted_step(means, split.ratio) - predicted_step(means, split.ratio, **{name: 0.5})
    add = gain > means.least_gain and name in ("generation", "training") and not split.cpu
    return (
        f"of a step of {means.step:.2f} s, {name} took the longest, {parts[name]:.2f} s; no other split or "
        f"async_generation_ratio saves {means.least_gain:.2f} s" + (f": add devices for {name}" if add else "")
    )


def _move(means: Means, split: Split, tail: bool) -> tuple[float, str]:
    now, total, ratio = split.generation, split.generation + split.training, split.ratio
    steps = {
        devices: predicted_step(means, ratio, generation=now / devices, training=split.training / (total - devices))
        for devices in range(1, total if not tail else now + 1)
    }
    best = min(steps, key=steps.__getitem__)
    head = "training waited for generation" if best > now else "the engines waited for training"
    finding = f"{head}; try {best} devices for generation and {total - best} for training"
    return predicted_step(means, ratio) - steps[best], finding


def _at(line: Mapping[str, float | None], name: str) -> float:
    return line.get(name) or 0.0

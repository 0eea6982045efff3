"""From the measurements of one run to scenarios with other devices, ratios and batches of the same model."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from itertools import accumulate
from statistics import NormalDist
from typing import Any

from roll.algorithms.options.policy_options import proximal_source
from roll.configs.learning.log_prob_passes import samples_with_own_pass
from roll.configs.pipeline import RLConfig
from roll.lab.simulate.calibration import Measurements, RunShape, fit_doubling_batch
from roll.lab.simulate.simulator import DecodeSpeed, Scenario, StepCosts, generation_seconds, simulate
from roll.rollout.admission import AdmissionSettings

DEFAULT_DOUBLING_BATCH = {"cpu": 8.0, "cuda": 256.0}
"""Used if no run measures it: a CPU is bound by computation of each request, a GPU by reading the weights."""

SLOWDOWN_RANGE = (1.0, 4.0)
"""Range in which `fit_slowdown` searches."""

LENGTH_COUNT = 16_384
"""Response lengths of one table: quantiles of the distribution in random order, so that their mean is exact."""


@dataclass(frozen=True)
class CostModel:
    """How fast one model trains and generates; `scenario` derives the costs of a device split.

    The speed of an engine does not depend on the number of engines, which share a batch. Training and log-probs take
    time in proportion to samples and in inverse proportion to devices.

    Attributes:
        measured: measurements of a synchronous run.
        lengths: response lengths in tokens.
        newer: see `Scenario`.
        overhead: seconds of a step on the driver.
        slowdown: factor on both sides while training and generation run at once.
    """

    config: RLConfig
    measured: Measurements
    speed: DecodeSpeed
    lengths: Sequence[float]
    newer: int | None = None
    overhead: float = 0.0
    slowdown: float = 1.0

    @cached_property
    def shape(self) -> RunShape:
        return RunShape.of(asdict(self.config))

    def scenario(self, train_devices: int, engines: int, ratio: float, steps: int) -> Scenario:
        """The configuration with this number of training devices and engines, this ratio, and `steps` batches."""
        config, times, shape, measured_shape = self.config, self.measured.times, self.shape, self.measured.shape
        batch_factor = shape.samples / measured_shape.samples
        padding = padded_mean(self.lengths, shape.chunks) / padded_mean(self.lengths, measured_shape.chunks)
        train_factor = batch_factor * padding * measured_shape.train_devices / train_devices
        return Scenario(
            settings=_admission_settings(config, ratio),
            samples_per_prompt=config.responses_per_group,
            engines=engines,
            slots=shape.slots,
            speed=self.speed,
            costs=StepCosts(
                train=times.train * train_factor,
                log_probs=times.log_probs * train_factor * self._log_probs_fraction(ratio),
                overhead=self.overhead,
                weight_update=times.weight_update,
                weight_update_pause=times.weight_update_pause,
                reward=times.reward * batch_factor,
            ),
            lengths=self.lengths,
            slowdown=self.slowdown,
            newer=self.newer,
            drain=config.in_flight_policy == "drain",
            steps=steps,
        )

    def _log_probs_fraction(self, ratio: float) -> float:
        """Fraction of the measured log-prob time that a run with this ratio spends.

        It is the share of samples that actor_train and the reference compute in passes of their own, in proportion to
        that of the measured run, which was synchronous. Loading resolved keys left at `auto` for the configured ratio;
        they are resolved again for these two.
        """
        config = self.config
        auto_keys = {"old_log_probs_source", "pg_ratio_base"} - set(config.source.given)
        reset: dict[str, Any] = dict.fromkeys(auto_keys, "auto")
        reference = config.filled_samples_per_batch if config.uses_reference else 0

        def computed(at_ratio: float) -> int:
            source = proximal_source(replace(config, **reset), config.actor_train.pg_variant, at_ratio)
            resolved: dict[str, Any] = {"old_log_probs_source": source}
            return samples_with_own_pass(replace(config, **resolved)) + reference

        measured = computed(0.0)
        return computed(ratio) / measured if measured else 1.0


def padded_mean(lengths: Sequence[float], chunks: int) -> float:
    """Mean length of samples padded to multiples of `chunks`: context parallelism makes short ones no faster."""
    return sum(math.ceil(length / chunks) * chunks for length in lengths) / len(lengths)


def _admission_settings(config: RLConfig, ratio: float) -> AdmissionSettings:
    """Settings of admission; queue limits of the configuration apply only to its own ratio."""
    bounds = config.async_training
    configured = ratio == config.async_generation_ratio
    max_queue = bounds.max_queue_size if configured else None
    return AdmissionSettings(
        batch_size=config.rollout_batch_size,
        ratio=ratio,
        max_queue=None if max_queue is None else max_queue // config.num_return_sequences_in_group,
        min_batches=bounds.min_batch_count if configured else 1,
    )


def fit_cost_model(
    config: RLConfig,
    measured: Measurements,
    platform: str,
    doubling_batch: float | None = None,
    seed: int = 0,
) -> CostModel:
    """Fits the engines' speed and the driver's overhead so that simulating the measured run gives its step time.

    At `doubling_batch` requests a decode iteration takes twice as long as with none; None fits it to the steps measured
    in a synchronous run, or uses DEFAULT_DOUBLING_BATCH.
    """
    shape = measured.shape
    limit = max(float(config.response_length or 0), measured.max_length)
    lengths = response_lengths(measured.mean_length, measured.max_length, shape.samples, limit, seed)
    doubling_batch = doubling_batch or fit_doubling_batch(measured) or DEFAULT_DOUBLING_BATCH[platform]
    unit_speed = Scenario(
        settings=AdmissionSettings(shape.samples, 0.0),
        samples_per_prompt=1,
        engines=shape.engines,
        slots=shape.slots,
        speed=DecodeSpeed(1.0, doubling_batch),
        costs=StepCosts(train=0.0),
        lengths=lengths,
    )
    speed = DecodeSpeed(measured.times.generate / generation_seconds(unit_speed), doubling_batch)
    newer = config.actor_infer.newer_requests(platform)
    return CostModel(config, measured, speed, lengths, newer, overhead=_overhead(measured))


def _overhead(measured: Measurements) -> float:
    """Seconds of a measured step that are in none of its parts."""
    times = measured.times
    if times.step is None:
        return 0.0
    parts = times.generate + times.reward + times.log_probs + times.train + times.weight_update
    return max(0.0, times.step - parts)


def fit_slowdown(model: CostModel, run: Measurements) -> CostModel:
    """The model with the slowdown that gives the step time of a run with overlap, found by bisection.

    The run has a ratio above 0, and the configuration of the model except for ratio and devices.
    """
    shape, target = run.shape, run.times.step or 0.0

    def is_too_fast(slowdown: float) -> bool:
        slowed = replace(model, slowdown=slowdown)
        scenario = slowed.scenario(shape.train_devices, shape.engines, shape.ratio, steps=12)
        return simulate(scenario).step_seconds < target

    return replace(model, slowdown=_least(is_too_fast, *SLOWDOWN_RANGE, rounds=12))


def response_lengths(mean: float, longest: float, batch: int, limit: float, seed: int) -> list[float]:
    """LENGTH_COUNT log-normal response lengths in tokens, between 1 and `limit`.

    Their spread is the one at which the longest of `batch` responses is typically `longest`: with z the normal quantile
    of that rank, longest / mean = exp(sigma * z - sigma^2 / 2). If mean and longest are equal, so are all lengths.

    Raises:
        ValueError: not 1 <= mean <= longest, or mean > limit.
    """
    if not 1 <= mean <= longest or mean > limit:
        raise ValueError(
            f"response lengths need 1 <= mean <= longest and mean <= limit; "
            f"got mean {mean:g}, longest {longest:g}, limit {limit:g}"
        )
    sigma = log_normal_sigma(longest / mean, batch)
    if sigma == 0:
        return [float(mean)] * LENGTH_COUNT
    shape = [math.exp(sigma * quantile) for quantile in _normal_quantiles()]
    scale = _scale(shape, mean, limit)
    lengths = [min(limit, max(1.0, scale * value)) for value in shape]
    random.Random(seed).shuffle(lengths)
    return lengths


def log_normal_sigma(longest_by_mean: float, batch: int) -> float:
    """Sigma of the log-normal of which the largest of `batch` draws is typically `longest_by_mean` times the mean."""
    if longest_by_mean <= 1 or batch < 2:
        return 0.0
    z = NormalDist().inv_cdf(1 - 1 / (batch + 1))
    discriminant = z * z - 2 * math.log(longest_by_mean)
    return z - math.sqrt(discriminant) if discriminant > 0 else z


@cache
def _normal_quantiles() -> list[float]:
    return [NormalDist().inv_cdf((i + 0.5) / LENGTH_COUNT) for i in range(LENGTH_COUNT)]


def _scale(shape: list[float], mean: float, limit: float) -> float:
    """The factor at which ascending lengths, clamped to [1, limit], have this mean; by bisection."""
    sums = [0.0, *accumulate(shape)]

    def is_too_small(factor: float) -> bool:
        below, above = bisect_left(shape, 1 / factor), bisect_left(shape, limit / factor)
        total = below + factor * (sums[above] - sums[below]) + (LENGTH_COUNT - above) * limit
        return total < mean * LENGTH_COUNT

    return _least(is_too_small, 0.0, limit / shape[0], rounds=60)


def _least(is_too_small: Callable[[float], bool], low: float, high: float, rounds: int) -> float:
    """The smallest value that is not too small, by bisection."""
    for _ in range(rounds):
        middle = (low + high) / 2
        low, high = (middle, high) if is_too_small(middle) else (low, middle)
    return high

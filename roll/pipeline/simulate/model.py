"""From what was measured to scenarios: any split, ratio and batch of the same model on the same kind of device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from roll.configs.pipeline import RLConfig
from roll.configs.policy import proximal_source
from roll.pipeline.simulate.measured import Measured, Shape, doubling_batch
from roll.rollout.admission import PolicySettings
from roll.rollout.lengths import response_lengths
from roll.rollout.simulated_engines import DecodeSpeed
from roll.rollout.simulation import Scenario, StepCosts, generation_seconds, simulate

USUAL_DOUBLING_BATCH = {"cpu": 8.0, "cuda": 256.0}
"""Taken where no run tells: a CPU computes for every request, a GPU first of all reads the weights."""

SLOWDOWNS = (1.0, 4.0)
"""Between these a slowdown is searched for; four sides do not share the cores."""


@dataclass(frozen=True)
class Model:
    """How fast one model trains and generates; `scenario` says what follows for a placement.

    Engines keep their speed, and more of them share a batch. Training and log-probs take time in proportion to samples
    and in inverse proportion to devices.
    """

    config: RLConfig
    measured: Measured
    speed: DecodeSpeed
    lengths: Sequence[float]
    overhead: float = 0.0
    slowdown: float = 1.0

    def scenario(self, train_devices: int, engines: int, ratio: float, steps: int) -> Scenario:
        """A run of the configuration with so many devices for training, so many engines, and that ratio."""
        config, measured = self.config, self.measured
        shape = Shape.of_config(config)
        times, was = measured.times, measured.shape
        share = shape.samples / was.samples
        training = share * was.train_devices / train_devices
        return Scenario(
            settings=_settings(config, ratio),
            samples_per_prompt=config.num_return_sequences_in_group,
            engines=engines,
            slots=shape.slots,
            speed=self.speed,
            costs=StepCosts(
                train=times.train * training,
                log_probs=times.log_probs * training * self._log_probs_share(ratio),
                overhead=self.overhead,
                publish=times.publish,
                publish_pause=times.publish_pause,
                reward=times.reward * share,
            ),
            lengths=self.lengths,
            slowdown=self.slowdown,
            drain=config.in_flight_policy == "drain",
            steps=steps,
        )

    def _log_probs_share(self, ratio: float) -> float:
        """Part of the measured log-prob time that a run with this ratio spends.

        Where none are recomputed, what is left is the reference's, half of the two. Loading has settled what the file
        leaves to `auto` for its own ratio; it is settled anew for this one.
        """
        config = self.config
        left_open = {"old_log_probs_source", "pg_ratio_base"} - set(config.source.given)
        settle: dict[str, Any] = dict.fromkeys(left_open, "auto")
        anew = replace(config, **settle)
        if proximal_source(anew, config.actor_train.pg_variant, ratio) == "recompute":
            return 1.0
        return 0.5 if config.uses_reference else 0.0


def _settings(config: RLConfig, ratio: float) -> PolicySettings:
    bounds = config.async_training
    own = ratio == config.async_generation_ratio
    queue = None if bounds.max_queue_size is None or not own else bounds.max_queue_size
    return PolicySettings(
        batch_size=config.rollout_batch_size,
        ratio=ratio,
        max_queue=None if queue is None else queue // config.num_return_sequences_in_group,
        min_batches=bounds.min_batch_count if own else 1,
    )


def make_model(
    config: RLConfig,
    measured: Measured,
    platform: str,
    doubling: float | None = None,
    seed: int = 0,
) -> Model:
    """Fits the engines' speed and the driver's overhead so that the simulation gives back what was measured.

    Args:
        config: what is to be simulated.
        measured: of a synchronous run.
        platform: `cpu` or `cuda`.
        doubling: batch at which a decode iteration takes twice as long as an empty one; None: told from the steps
            measured, else USUAL_DOUBLING_BATCH.
        seed: of the order of response lengths.
    """
    was = measured.shape
    limit = max(float(config.response_length or 0), measured.longest)
    lengths = response_lengths(measured.mean_length, measured.longest, was.samples, limit, seed)
    doubling = doubling or doubling_batch(measured) or USUAL_DOUBLING_BATCH[platform]
    as_measured = Scenario(
        PolicySettings(was.samples, 0.0), 1, was.engines, was.slots, DecodeSpeed(1.0, doubling), StepCosts(0.0), lengths
    )
    speed = DecodeSpeed(measured.times.generate / generation_seconds(as_measured), doubling)
    return Model(config, measured, speed, lengths, overhead=_overhead(measured))


def _overhead(measured: Measured) -> float:
    """Seconds of a measured step that none of its parts explains."""
    times = measured.times
    if times.step is None:
        return 0.0
    return max(0.0, times.step - times.generate - times.reward - times.log_probs - times.train - times.publish)


def with_slowdown_of(model: Model, run: Measured) -> Model:
    """The slowdown at which the simulation takes as long for a step as a run with overlap did, by bisection.

    Args:
        model: fitted to a synchronous run.
        run: with a ratio above 0, of the same configuration but for ratio and devices.
    """
    low, high = SLOWDOWNS
    target = run.times.step or 0.0
    for _ in range(12):
        middle = (low + high) / 2
        scenario = replace(model, slowdown=middle).scenario(
            run.shape.train_devices, run.shape.engines, run.shape.ratio, 12
        )
        if simulate(scenario).step_seconds < target:
            low = middle
        else:
            high = middle
    return replace(model, slowdown=high)

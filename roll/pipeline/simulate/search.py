"""Tries splits of the devices and ratios, and says which is best."""

from __future__ import annotations

from dataclasses import dataclass

from roll.configs.batches import samples_per_optimizer_step
from roll.configs.layouts import is_megatron, megatron_config
from roll.configs.pipeline import RLConfig
from roll.pipeline.simulate.measured import Shape
from roll.pipeline.simulate.model import Model
from roll.rollout.simulation import Outcome, simulate

RATIOS = (0.0, 0.5, 1.0, 2.0)
"""Ratios that are tried besides the configured one; beyond 2 there is staleness to lose and little left to gain."""

MOST_SPLITS = 4
"""Splits that are simulated: those with the smallest max(G/a, T/(1-a))."""

WITHIN = 0.02
"""A placement this much slower than the fastest is as good, and the one with the smaller ratio is taken."""

SAMPLES = 400_000
"""Responses simulated in all; some seconds."""

FEWEST_STEPS, MOST_STEPS = 4, 30
"""Batches measured for one placement."""


@dataclass(frozen=True)
class Split:
    """Devices for each side; `shared` where both have all of them and take turns."""

    train_devices: int
    infer_devices: int
    shared: bool = False


@dataclass(frozen=True)
class Candidate:
    """One placement and what the simulation says of it."""

    split: Split
    ratio: float
    outcome: Outcome


@dataclass(frozen=True)
class Prediction:
    """What `roll simulate` found."""

    devices: int
    generate_seconds: float
    """G: one batch on all devices."""
    train_seconds: float
    """T: log-probs and training on all devices."""
    configured: Candidate
    candidates: list[Candidate]
    """The configured one among them, fastest first."""
    best: Candidate


def predict(model: Model) -> Prediction:
    """Simulates the configuration as it is, then the other splits and ratios of its devices."""
    config = model.config
    devices = set(config.actor_train.device_mapping) | set(config.actor_infer.device_mapping)
    own, total = configured_split(config), len(devices)
    tried = [(own, config.async_generation_ratio)]
    splits = [Split(total, total, shared=True), *_promising(model, total)] if total > 1 else []
    for split in splits:
        for ratio in (0.0,) if split.shared else RATIOS:
            if (split, ratio) not in tried and _fits(config, split):
                tried.append((split, ratio))
    samples = Shape.of_config(config).samples
    steps = max(FEWEST_STEPS, min(MOST_STEPS, SAMPLES // (samples * len(tried))))
    candidates = [_candidate(model, split, ratio, steps) for split, ratio in tried]
    fastest = min(candidate.outcome.step_seconds for candidate in candidates)
    good = [candidate for candidate in candidates if candidate.outcome.step_seconds <= fastest * (1 + WITHIN)]
    generate, train = _alone(model, total)
    return Prediction(
        devices=total,
        generate_seconds=generate,
        train_seconds=train,
        configured=candidates[0],
        candidates=sorted(candidates, key=lambda candidate: candidate.outcome.step_seconds),
        best=min(good, key=lambda candidate: (candidate.ratio, candidate.outcome.step_seconds)),
    )


def configured_split(config: RLConfig) -> Split:
    """The split the file asks for."""
    train, infer = config.actor_train.device_mapping, config.actor_infer.device_mapping
    return Split(len(train), len(infer), shared=set(train) == set(infer))


def possible_splits(config: RLConfig, devices: int) -> list[Split]:
    """Ways to divide all devices that the parallel sizes and the optimizer step's samples allow."""
    splits = [Split(devices - infer, infer) for infer in range(1, devices)]
    return [split for split in splits if _fits(config, split)]


def _fits(config: RLConfig, split: Split) -> bool:
    worker = config.actor_train
    unit = 1
    if is_megatron(worker):
        megatron = megatron_config(worker)
        unit = megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size
    if split.train_devices % unit or split.infer_devices % config.actor_infer.num_gpus_per_worker:
        return False
    return samples_per_optimizer_step(config) % (split.train_devices // unit) == 0


def _alone(model: Model, devices: int) -> tuple[float, float]:
    """G and T on all devices, by proportion."""
    was, times = model.measured.shape, model.measured.times
    share = Shape.of_config(model.config).samples / was.samples
    engines = devices / model.config.actor_infer.num_gpus_per_worker
    generate = times.generate * share * was.engines / engines
    return generate, (times.train + times.log_probs) * share * was.train_devices / devices


def _promising(model: Model, devices: int) -> list[Split]:
    generate, train = _alone(model, devices)

    def bound(split: Split) -> float:
        share = split.infer_devices / devices
        return max(generate / share, train / (1 - share))

    return sorted(possible_splits(model.config, devices), key=bound)[:MOST_SPLITS]


def _candidate(model: Model, split: Split, ratio: float, steps: int) -> Candidate:
    engines = max(1, split.infer_devices // model.config.actor_infer.num_gpus_per_worker)
    return Candidate(split, ratio, simulate(model.scenario(split.train_devices, engines, ratio, steps)))

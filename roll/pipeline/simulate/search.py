"""Tries splits of the devices and ratios, and says which is best."""

from __future__ import annotations

from dataclasses import dataclass

from roll.configs.pipeline import RLConfig
from roll.pipeline.simulate.measured import Shape
from roll.pipeline.simulate.model import Model
from roll.pipeline.simulate.size import devices_of
from roll.rollout.simulation import Outcome, generation_seconds, simulate

RATIOS = (0.0, 0.5, 1.0, 2.0)
"""Ratios that are tried besides the configured one; beyond 2 there is staleness to lose and little left to gain."""

MOST_SPLITS = 4
"""Splits that are simulated: those whose slower side, by itself, is fastest."""

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
    generate_seconds: float
    """One batch on these engines, when nothing else runs."""
    train_seconds: float
    """Log-probs and training on these devices, when nothing else runs."""


@dataclass(frozen=True)
class Prediction:
    """What `roll simulate` found."""

    devices: int
    generate_seconds: float
    """G: one batch with engines on all devices."""
    train_seconds: float
    """T: log-probs and training in turns with it, on all devices."""
    configured: Candidate
    candidates: list[Candidate]
    """The configured one among them, fastest first."""
    best: Candidate


def predict(model: Model) -> Prediction:
    """Simulates the configuration as it is, then the other splits and ratios of its devices."""
    config = model.config
    own, total = configured_split(config), len(devices_of(config))
    alone = _Alone(model, total)
    tried = [(own, config.async_generation_ratio)]
    splits = [Split(total, total, shared=True), *_promising(model, alone, total)] if total > 1 else []
    for split in splits:
        for ratio in (0.0,) if split.shared else RATIOS:
            if (split, ratio) not in tried and _fits(config, split):
                tried.append((split, ratio))
    samples = Shape.of_config(config).samples
    steps = max(FEWEST_STEPS, min(MOST_STEPS, SAMPLES // (samples * len(tried))))
    candidates = [_candidate(model, alone, split, ratio, steps) for split, ratio in tried]
    fastest = min(candidate.outcome.step_seconds for candidate in candidates)
    good = [candidate for candidate in candidates if candidate.outcome.step_seconds <= fastest * (1 + WITHIN)]
    return Prediction(
        devices=total,
        generate_seconds=alone.generate(total),
        train_seconds=alone.train(total, 0.0),
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
    layout = config.actor_train.layout
    unit = layout.tensor * layout.pipeline
    if split.train_devices % unit or split.infer_devices % config.actor_infer.num_gpus_per_worker:
        return False
    return config.actor_train.samples_per_optimizer_step % (split.train_devices // unit) == 0


class _Alone:
    """Seconds of each side by itself on so many devices.

    Training goes by proportion. Generation does not, because an engine with fewer requests has shorter iterations but
    not fewer: it is simulated.
    """

    def __init__(self, model: Model, devices: int) -> None:
        self._model = model
        self._per_engine = model.config.actor_infer.num_gpus_per_worker
        self._most = self._engines(devices)
        self._known: dict[int, float] = {}

    def _engines(self, devices: int) -> int:
        return max(1, devices // self._per_engine)

    def generate(self, devices: int) -> float:
        engines = self._engines(devices)
        if engines not in self._known:
            self._known[engines] = generation_seconds(self._model.scenario(1, engines, 0.0, 1), batches=4)
        return self._known[engines]

    def generate_roughly(self, devices: int) -> float:
        """By p + q / engines through the fewest and the most engines: enough to leave out what is far off."""
        few, many = self.generate(self._per_engine), self.generate(self._most * self._per_engine)
        slope = (few - many) / (1 - 1 / self._most) if self._most > 1 else 0.0
        return few - slope + slope / self._engines(devices)

    def train(self, devices: int, ratio: float) -> float:
        costs = self._model.scenario(devices, 1, ratio, 1).costs
        return costs.train + costs.log_probs


def _promising(model: Model, alone: _Alone, devices: int) -> list[Split]:
    def bound(split: Split) -> float:
        return max(alone.generate_roughly(split.infer_devices), alone.train(split.train_devices, 1.0))

    return sorted(possible_splits(model.config, devices), key=bound)[:MOST_SPLITS]


def _candidate(model: Model, alone: _Alone, split: Split, ratio: float, steps: int) -> Candidate:
    engines = max(1, split.infer_devices // model.config.actor_infer.num_gpus_per_worker)
    return Candidate(
        split,
        ratio,
        simulate(model.scenario(split.train_devices, engines, ratio, steps)),
        alone.generate(split.infer_devices),
        alone.train(split.train_devices, ratio),
    )

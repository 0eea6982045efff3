"""Simulates the configured device split and ratio and alternatives to them, and picks the best."""

from __future__ import annotations

from dataclasses import dataclass

from roll.base.errors import ConfigError, Problem
from roll.configs.asynchronous import versions_ahead
from roll.configs.pipeline import RLConfig
from roll.lab.simulate.cost_model import CostModel
from roll.lab.simulate.simulator import Outcome, generation_seconds, simulate

RATIOS = (0.0, 0.5, 1.0, 2.0)
"""Ratios tried besides the configured one; above 2 staleness grows and step time hardly improves."""

MAX_SPLITS = 4
"""Splits simulated: those whose slower side, alone, is fastest."""

EQUALLY_FAST = 0.02
"""Candidates within this fraction of the fastest count as equally fast; the smallest ratio among them is best."""

TOTAL_SAMPLES = 400_000
"""Responses simulated in all, which takes some seconds; sets the number of steps per candidate."""

MIN_STEPS, MAX_STEPS = 4, 30
"""Range of the batches measured per candidate."""

MAX_SAMPLES = 100_000
"""Largest batch in samples; a third of it took two minutes."""

MAX_SAMPLES_AHEAD = 2_000_000
"""Most samples generated before the simulation is in steady state; near this limit it takes over two minutes."""

MAX_SIMULATED_DEVICES = 10_000
"""Most devices; 4,100 took half a minute."""


@dataclass(frozen=True)
class DeviceSplit:
    """Number of devices of each side; `shared` if both sides use all devices in turns."""

    train_devices: int
    infer_devices: int
    shared: bool = False


@dataclass(frozen=True)
class Candidate:
    """One split and ratio with its simulated outcome.

    Attributes:
        generate_seconds: one batch on these engines when nothing else runs.
        train_seconds: log-probs and training on these devices when nothing else runs.
    """

    split: DeviceSplit
    ratio: float
    outcome: Outcome
    generate_seconds: float
    train_seconds: float


@dataclass(frozen=True)
class Prediction:
    """Result of `predict`.

    Attributes:
        generate_seconds: G, one batch with engines on all devices.
        train_seconds: T, log-probs and training on all devices.
        candidates: all candidates, the configured one included, fastest first.
    """

    devices: int
    generate_seconds: float
    train_seconds: float
    configured: Candidate
    candidates: list[Candidate]
    best: Candidate


def predict(model: CostModel) -> Prediction:
    """Simulates the configured split and ratio, then the most promising others with the same devices."""
    config = model.config
    configured, total = configured_split(config), len(all_devices(config))
    search = _Search(model, total)
    candidates = [(configured, config.async_generation_ratio)]
    splits = [DeviceSplit(total, total, shared=True), *search.promising_splits()] if total > 1 else []
    for split in splits:
        for ratio in (0.0,) if split.shared else RATIOS:
            if (split, ratio) not in candidates and _is_valid(config, split):
                candidates.append((split, ratio))
    steps = max(MIN_STEPS, min(MAX_STEPS, TOTAL_SAMPLES // (model.shape.samples * len(candidates))))
    simulated = [search.simulate(split, ratio, steps) for split, ratio in candidates]
    fastest = min(candidate.outcome.step_seconds for candidate in simulated)
    good = [candidate for candidate in simulated if candidate.outcome.step_seconds <= fastest * (1 + EQUALLY_FAST)]
    return Prediction(
        devices=total,
        generate_seconds=search.generate(total),
        train_seconds=search.train(total, 0.0),
        configured=simulated[0],
        candidates=sorted(simulated, key=lambda candidate: candidate.outcome.step_seconds),
        best=min(good, key=lambda candidate: (candidate.ratio, candidate.outcome.step_seconds)),
    )


class _Search:
    """Seconds of each side alone by number of devices, the splits that they favour, and outcomes of splits.

    Training scales with devices. Generation does not, because an engine with fewer requests has shorter iterations but
    not fewer of them, so it is simulated.
    """

    def __init__(self, model: CostModel, devices: int) -> None:
        self._model, self._devices = model, devices
        self._generate: dict[int, float] = {}

    def _engines(self, devices: int) -> int:
        return max(1, devices // self._model.config.actor_infer.num_gpus_per_worker)

    def generate(self, devices: int) -> float:
        engines = self._engines(devices)
        if engines not in self._generate:
            self._generate[engines] = generation_seconds(self._model.scenario(1, engines, 0.0, 1), batches=4)
        return self._generate[engines]

    def train(self, devices: int, ratio: float) -> float:
        costs = self._model.scenario(devices, 1, ratio, 1).costs
        return costs.train + costs.log_probs

    def promising_splits(self) -> list[DeviceSplit]:
        """Those whose slower side is fastest; generation is interpolated as p + q / engines from one and all."""
        one, most = self.generate(1), self.generate(self._devices)
        engines = self._engines(self._devices)
        slope = (one - most) / (1 - 1 / engines) if engines > 1 else 0.0

        def lower_bound(split: DeviceSplit) -> float:
            generate = one - slope + slope / self._engines(split.infer_devices)
            return max(generate, self.train(split.train_devices, 1.0))

        return sorted(possible_splits(self._model.config, self._devices), key=lower_bound)[:MAX_SPLITS]

    def simulate(self, split: DeviceSplit, ratio: float, steps: int) -> Candidate:
        scenario = self._model.scenario(split.train_devices, self._engines(split.infer_devices), ratio, steps)
        alone = self.generate(split.infer_devices), self.train(split.train_devices, ratio)
        return Candidate(split, ratio, simulate(scenario), *alone)


def check_size(config: RLConfig) -> None:
    """Checks that simulating the configuration takes minutes at most.

    Raises:
        ConfigError: its batch, ratio or number of devices is too large.
    """
    prompts, group = config.rollout_batch_size, config.num_return_sequences_in_group
    samples, devices = prompts * group, len(all_devices(config))
    too_large = {}
    if samples > MAX_SAMPLES:
        product = f"{prompts} prompts x num_return_sequences_in_group {group} = {samples} samples per batch"
        too_large["rollout_batch_size"] = product, f"{MAX_SAMPLES} samples"
    elif samples * versions_ahead(config.async_generation_ratio) > MAX_SAMPLES_AHEAD:
        ratio = f"{config.async_generation_ratio:g} with {samples} samples per batch"
        too_large["async_generation_ratio"] = ratio, f"{MAX_SAMPLES_AHEAD // samples}"
    if devices > MAX_SIMULATED_DEVICES:
        too_large["device_mapping"] = f"{devices} devices", f"{MAX_SIMULATED_DEVICES}"
    if too_large:
        problems = [
            Problem(path, f"{value} takes too long to simulate; use at most {most}")
            for path, (value, most) in too_large.items()
        ]
        raise ConfigError(problems, config.source.file)


def all_devices(config: RLConfig) -> set[int]:
    return set(config.actor_train.device_mapping) | set(config.actor_infer.device_mapping)


def configured_split(config: RLConfig) -> DeviceSplit:
    train, infer = config.actor_train.device_mapping, config.actor_infer.device_mapping
    return DeviceSplit(len(train), len(infer), shared=set(train) == set(infer))


def possible_splits(config: RLConfig, devices: int) -> list[DeviceSplit]:
    """Splits of all devices that the parallel sizes and the samples per optimizer step allow."""
    splits = [DeviceSplit(devices - infer, infer) for infer in range(1, devices)]
    return [split for split in splits if _is_valid(config, split)]


def _is_valid(config: RLConfig, split: DeviceSplit) -> bool:
    layout = config.actor_train.layout
    model_parallel = layout.model_size
    if split.train_devices % model_parallel or split.infer_devices % config.actor_infer.num_gpus_per_worker:
        return False
    return config.actor_train.samples_per_optimizer_step % (split.train_devices // model_parallel) == 0

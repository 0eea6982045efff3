"""Simulated engines, and step times of simple runs against their closed forms."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from roll.lab.simulate.cost_model import response_lengths
from roll.lab.simulate.simulator import (
    DecodeSpeed,
    Scenario,
    SimulatedEngine,
    StepCosts,
    generation_seconds,
    simulate,
)
from roll.rollout.admission import AdmissionSettings

TOKENS = 100.0


def scenario(generate: float, train: float, ratio: float, slots: int = 8, **changes: object) -> Scenario:
    """Responses of equal length; the 16 samples of a batch fill two engines of 8 slots."""
    made = Scenario(
        settings=AdmissionSettings(batch_size=8, ratio=ratio),
        samples_per_prompt=2,
        engines=2,
        slots=slots,
        speed=DecodeSpeed(generate / TOKENS),
        costs=StepCosts(train),
        lengths=[TOKENS],
    )
    return replace(made, **changes)


CASES = [(10.0, 6.0), (6.0, 10.0), (8.0, 8.0)]
TAIL = response_lengths(100, 700, 16, 1000, seed=0)


@pytest.mark.parametrize(("generate", "train"), CASES)
def test_synchronous_step_takes_generation_plus_training(generate: float, train: float) -> None:
    outcome = simulate(scenario(generate, train, ratio=0))
    assert outcome.step_seconds == pytest.approx(generate + train)
    assert outcome.wait_seconds == pytest.approx(generate)
    assert outcome.trainer_idle == pytest.approx(generate / (generate + train))
    assert outcome.rollout_idle == pytest.approx(train / (generate + train))
    assert outcome.staleness == {0: 1.0}


@pytest.mark.parametrize(("generate", "train"), CASES)
def test_step_at_ratio_1_on_full_engines_takes_the_longer_side(generate: float, train: float) -> None:
    outcome = simulate(scenario(generate, train, ratio=1))
    assert outcome.step_seconds == pytest.approx(max(generate, train))
    assert outcome.trainer_idle == pytest.approx(1 - train / max(generate, train))
    assert max(outcome.staleness) == 1


@pytest.mark.parametrize("ratio", [1, 2, 3])
@pytest.mark.parametrize(("generate", "train"), CASES)
def test_step_on_engines_with_free_slots_is_bound_by_the_ratio(ratio: int, generate: float, train: float) -> None:
    """A batch takes G + T from the weight update that admits it to the end of training; 1 + ratio batches overlap."""
    outcome = simulate(scenario(generate, train, ratio, slots=1000, steps=60))
    assert outcome.step_seconds == pytest.approx(max(train, (generate + train) / (1 + ratio)))


def test_every_part_of_a_synchronous_step_counts_once() -> None:
    costs = StepCosts(train=4.0, log_probs=1.0, overhead=0.5, weight_update=0.3, weight_update_pause=0.2, reward=0.8)
    outcome = simulate(scenario(10.0, 0.0, ratio=0, costs=costs))
    assert outcome.step_seconds == pytest.approx(10.0 + 0.8 + 0.5 + 5.0 + 0.3)
    assert outcome.trainer_idle == pytest.approx(1 - 5.0 / outcome.step_seconds)


def test_only_the_pause_of_a_weight_update_stops_the_engines() -> None:
    costs = StepCosts(train=2.0, weight_update=1.0, weight_update_pause=0.25)
    assert simulate(scenario(10.0, 0.0, ratio=1, costs=costs)).step_seconds == pytest.approx(10.25)


def test_slowdown_applies_while_both_sides_run() -> None:
    both = scenario(8.0, 8.0, ratio=1)
    assert simulate(replace(both, slowdown=1.5)).step_seconds == pytest.approx(12.0)
    synchronous = scenario(8.0, 8.0, ratio=0)
    assert simulate(replace(synchronous, slowdown=1.5)).step_seconds == pytest.approx(16.0)
    generation_bound = scenario(10.0, 4.0, ratio=1, slowdown=2.0)
    assert simulate(generation_bound).step_seconds == pytest.approx(14.0), (
        "4 s of both take 8 s, the other 6 s of generation run alone"
    )


def test_larger_ratio_never_makes_a_step_longer() -> None:
    steps = [simulate(scenario(8.0, 6.0, ratio, lengths=TAIL, steps=60)).step_seconds for ratio in (0, 0.5, 1, 2, 3)]
    assert all(later <= earlier * 1.01 for earlier, later in zip(steps, steps[1:], strict=False)), steps
    assert steps[-1] < 0.7 * steps[0]


def test_more_engines_never_make_a_step_longer() -> None:
    steps = [simulate(scenario(30.0, 1.0, 1, engines=engines, lengths=TAIL)).step_seconds for engines in (1, 2, 4, 8)]
    assert steps == sorted(steps, reverse=True)


@pytest.mark.parametrize("ratio", [0, 0.5, 1, 2, 2.7])
def test_staleness_stays_within_the_ratio(ratio: float) -> None:
    outcome = simulate(scenario(8.0, 6.0, ratio, lengths=TAIL))
    assert max(outcome.staleness) <= -(-ratio // 1)
    assert sum(outcome.staleness.values()) == pytest.approx(1.0)


def test_draining_before_a_weight_update_costs_time_with_long_tailed_lengths() -> None:
    ahead = scenario(8.0, 6.0, 1, lengths=TAIL)
    assert simulate(replace(ahead, drain=True)).step_seconds > 1.1 * simulate(ahead).step_seconds


def test_generation_alone_takes_the_time_of_a_step_without_training() -> None:
    assert generation_seconds(scenario(10.0, 6.0, ratio=2)) == pytest.approx(10.0)


def test_simulation_is_deterministic() -> None:
    ahead = scenario(8.0, 6.0, 2.7, lengths=TAIL)
    assert simulate(ahead) == simulate(ahead)


def run_engine(engine: SimulatedEngine, until: float = math.inf) -> list[tuple[float, int]]:
    """(time, request) of each end, in order."""
    ends: list[tuple[float, int]] = []
    engine.start_waiting()
    while (now := engine.next_end()) < until:
        engine.advance(now)
        ends += [(now, request) for request in engine.pop_finished()]
        engine.start_waiting()
    return ends


def test_requests_end_in_the_order_of_their_lengths() -> None:
    engine = SimulatedEngine(DecodeSpeed(0.5), slots=4)
    for request, tokens in enumerate((10, 4, 10, 6)):
        engine.submit(request, tokens)
    assert run_engine(engine) == [(2.0, 1), (3.0, 3), (5.0, 0), (5.0, 2)]


def test_requests_wait_for_a_free_slot() -> None:
    engine = SimulatedEngine(DecodeSpeed(1.0), slots=2)
    for request, tokens in enumerate((3, 5, 4)):
        engine.submit(request, tokens)
    assert run_engine(engine) == [(3.0, 0), (5.0, 1), (7.0, 2)]


def test_iterations_of_a_larger_batch_take_longer() -> None:
    engine = SimulatedEngine(DecodeSpeed(1.0, doubling_batch=2), slots=2)
    engine.submit(0, 4)
    engine.submit(1, 8)
    assert run_engine(engine) == [(8.0, 0), (14.0, 1)], "4 iterations of 1 + 2/2, then 4 of 1 + 1/2"


def test_paused_engine_keeps_its_progress() -> None:
    engine = SimulatedEngine(DecodeSpeed(1.0), slots=1)
    engine.submit(0, 5)
    engine.start_waiting()
    engine.advance(2.0)
    engine.paused = True
    assert engine.next_end() == math.inf
    engine.advance(10.0)
    engine.paused = False
    assert engine.next_end() == 13.0
    engine.stretch = 2.0
    assert engine.next_end() == 16.0


def test_engine_that_admits_nothing_finishes_its_requests() -> None:
    engine = SimulatedEngine(DecodeSpeed(1.0), slots=1)
    engine.submit(0, 1)
    engine.submit(1, 1)
    engine.start_waiting()
    engine.admitting = False
    engine.advance(1.0)
    assert engine.pop_finished() == [0] and engine.start_waiting() == [] and not engine.active


def test_older_requests_start_first_and_few_newer_ones_beside_them() -> None:
    engine = SimulatedEngine(DecodeSpeed(1.0), slots=8, newer=1)
    for request, version in enumerate((1, 2, 2, 0)):
        engine.submit(request, 10, version)
    assert engine.start_waiting() == [3, 0], "one newer than version 0"
    assert run_engine(engine) == [(10.0, 3), (10.0, 0), (20.0, 1), (20.0, 2)]


def test_newer_requests_beside_older_ones_cost_time_where_steps_grow_with_their_requests() -> None:
    """The older ones delay training, and then the newer ones are complete before it needs them."""
    settings, speed = AdmissionSettings(batch_size=64, ratio=1), DecodeSpeed(0.001, doubling_batch=4)
    growing = scenario(8.0, 0.0, 1, slots=64, speed=speed, settings=settings, lengths=TAIL, steps=60)
    alone = generation_seconds(growing)
    growing = replace(growing, costs=StepCosts(0.8 * alone))
    few, any_number = (simulate(replace(growing, newer=newer)).step_seconds for newer in (4, None))
    assert few < alone < 1.1 * alone < any_number

"""What simple runs take is known in closed form; the simulation must give exactly that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roll.rollout.policy import PolicySettings
from roll.tools.simulate.cost_model import response_lengths
from roll.tools.simulate.simulator import DecodeSpeed, Scenario, StepCosts, generation_seconds, simulate

TOKENS = 100.0


def scenario(generate: float, train: float, ratio: float, slots: int = 8, **changes: object) -> Scenario:
    """Equal responses; 16 samples on two engines of 8 slots, so that one batch fills the engines."""
    made = Scenario(
        settings=PolicySettings(batch_size=8, ratio=ratio),
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
def test_in_turns_a_step_takes_the_sum(generate: float, train: float) -> None:
    outcome = simulate(scenario(generate, train, ratio=0))
    assert outcome.step_seconds == pytest.approx(generate + train)
    assert outcome.wait_seconds == pytest.approx(generate)
    assert outcome.trainer_idle == pytest.approx(generate / (generate + train))
    assert outcome.rollout_idle == pytest.approx(train / (generate + train))
    assert outcome.staleness == {0: 1.0}


@pytest.mark.parametrize(("generate", "train"), CASES)
def test_one_batch_ahead_on_full_engines_takes_the_longer_of_the_two(generate: float, train: float) -> None:
    outcome = simulate(scenario(generate, train, ratio=1))
    assert outcome.step_seconds == pytest.approx(max(generate, train))
    assert outcome.trainer_idle == pytest.approx(1 - train / max(generate, train))
    assert max(outcome.staleness) == 1


@pytest.mark.parametrize("ratio", [1, 2, 3])
@pytest.mark.parametrize(("generate", "train"), CASES)
def test_where_batches_share_the_engines_at_no_cost_only_the_lead_limits(
    ratio: int, generate: float, train: float
) -> None:
    """A batch is back G + T after the publish that admitted it, and 1 + ratio of them are on their way."""
    outcome = simulate(scenario(generate, train, ratio, slots=1000, steps=60))
    assert outcome.step_seconds == pytest.approx(max(train, (generate + train) / (1 + ratio)))


def test_every_part_of_a_step_in_turns_counts_once() -> None:
    costs = StepCosts(train=4.0, log_probs=1.0, overhead=0.5, publish=0.3, publish_pause=0.2, reward=0.8)
    outcome = simulate(scenario(10.0, 0.0, ratio=0, costs=costs))
    assert outcome.step_seconds == pytest.approx(10.0 + 0.8 + 0.5 + 5.0 + 0.3)
    assert outcome.trainer_idle == pytest.approx(1 - 5.0 / outcome.step_seconds)


def test_a_pause_stops_the_engines_and_the_rest_of_a_publish_does_not() -> None:
    costs = StepCosts(train=2.0, publish=1.0, publish_pause=0.25)
    assert simulate(scenario(10.0, 0.0, ratio=1, costs=costs)).step_seconds == pytest.approx(10.25)


def test_sharing_cores_slows_both_sides_down_while_both_run() -> None:
    both = scenario(8.0, 8.0, ratio=1)
    assert simulate(replace(both, slowdown=1.5)).step_seconds == pytest.approx(12.0)
    in_turns = scenario(8.0, 8.0, ratio=0)
    assert simulate(replace(in_turns, slowdown=1.5)).step_seconds == pytest.approx(16.0)
    generation_bound = scenario(10.0, 4.0, ratio=1, slowdown=2.0)
    assert simulate(generation_bound).step_seconds == pytest.approx(14.0), "4 s of work each take 8, 6 are left alone"


def test_running_ahead_never_makes_a_step_longer() -> None:
    steps = [simulate(scenario(8.0, 6.0, ratio, lengths=TAIL, steps=60)).step_seconds for ratio in (0, 0.5, 1, 2, 3)]
    assert all(later <= earlier * 1.01 for earlier, later in zip(steps, steps[1:], strict=False)), steps
    assert steps[-1] < 0.7 * steps[0]


def test_more_engines_never_make_a_step_longer() -> None:
    steps = [simulate(scenario(30.0, 1.0, 1, engines=engines, lengths=TAIL)).step_seconds for engines in (1, 2, 4, 8)]
    assert steps == sorted(steps, reverse=True)


@pytest.mark.parametrize("ratio", [0, 0.5, 1, 2, 2.7])
def test_samples_are_never_staler_than_the_ratio_allows(ratio: float) -> None:
    outcome = simulate(scenario(8.0, 6.0, ratio, lengths=TAIL))
    assert max(outcome.staleness) <= -(-ratio // 1)
    assert sum(outcome.staleness.values()) == pytest.approx(1.0)


def test_draining_before_a_publish_costs_time_where_responses_have_a_tail() -> None:
    ahead = scenario(8.0, 6.0, 1, lengths=TAIL)
    assert simulate(replace(ahead, drain=True)).step_seconds > 1.1 * simulate(ahead).step_seconds


def test_generation_alone_is_what_a_step_without_training_takes() -> None:
    assert generation_seconds(scenario(10.0, 6.0, ratio=2)) == pytest.approx(10.0)


def test_the_same_scenario_gives_the_same_outcome() -> None:
    ahead = scenario(8.0, 6.0, 2.7, lengths=TAIL)
    assert simulate(ahead) == simulate(ahead)

"""The advantages of `adv_estimator: optimal_token_baseline` against loops over tokens, and what makes them optimal."""

import pytest
import torch

from roll.algorithms.advantages import AdvantageSettings, compute_advantages
from roll.algorithms.estimators.token_baseline import EPSILON, token_baselines
from tests.algorithms.trajectories import Trajectory, make_batch

OTB = AdvantageSettings(adv_estimator="optimal_token_baseline")


def batch(seed, samples=12, columns=9, groups=3):
    """Random scores, groups, masks with gaps and an empty row, log-probs and sums of squared probabilities."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(samples, columns, 6, generator=generator)
    chosen = torch.randint(0, 6, (samples, columns, 1), generator=generator)
    mask = torch.rand(samples, columns, generator=generator) < 0.6
    mask[0] = False
    return {
        "scores": torch.randn(samples, generator=generator),
        "groups": torch.randint(0, groups, (samples,), generator=generator),
        "mask": mask,
        "logits": logits,
        "chosen": chosen,
        "log_probs": logits.log_softmax(-1).gather(-1, chosen).squeeze(-1),
        "sum_pi_squared": logits.softmax(-1).square().sum(-1),
    }


def advantages(given, weights=None, config=OTB, **changes):
    given = given | changes
    return compute_advantages(
        given["scores"],
        given["groups"],
        given["mask"],
        config,
        log_probs=given["log_probs"],
        sum_pi_squared=given["sum_pi_squared"],
        correction_weights=weights,
    ).advantages


def by_loops(given, weights):
    """The formula, one token at a time."""
    mask, result = given["mask"], torch.zeros(given["mask"].shape, dtype=torch.float64)
    energies = []
    for row in range(len(mask)):
        total, own = EPSILON, []
        for column in mask[row].nonzero().flatten().tolist():
            logits = given["logits"][row, column].double().requires_grad_()
            log_prob = logits.log_softmax(-1)[given["chosen"][row, column, 0]]
            [gradient] = torch.autograd.grad(log_prob, logits)
            total += float((weights[row, column] * gradient).square().sum())
            own.append(total)
        energies.append(own)
    for row in range(len(mask)):
        group = [other for other in range(len(mask)) if given["groups"][other] == given["groups"][row]]
        for place, column in enumerate(mask[row].nonzero().flatten().tolist()):
            while True:
                there = [other for other in group if len(energies[other]) > place]
                if len(there) > 1 or place == 0:
                    break
                place -= 1
            if len(there) > 1:
                total = sum(energies[other][place] for other in there)
                baseline = sum(energies[other][place] * float(given["scores"][other]) for other in there) / total
                result[row, column] = float(given["scores"][row]) - baseline
    return result.float()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("weighted", [False, True])
def test_advantages_are_those_of_the_formula(seed, weighted):
    given = batch(seed)
    weights = torch.rand(given["mask"].shape, generator=torch.Generator().manual_seed(seed)) * 3
    found = advantages(given, weights if weighted else None)
    expected = by_loops(given, weights if weighted else torch.ones_like(weights))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_no_other_baseline_gives_a_smaller_square_of_the_gradient():
    """The sum of W (G - B)^2 has its minimum at B."""
    generator = torch.Generator().manual_seed(3)
    returns, weights = torch.randn(5, 4, generator=generator), torch.rand(5, 4, generator=generator) + 0.1
    groups = torch.tensor([0, 0, 1, 1, 1])
    baselines, _ = token_baselines(returns, weights, torch.ones(5, 4), groups)
    best = (weights * (returns - baselines) ** 2).sum()
    for change in (0.01, -0.01):
        for group in (0, 1):
            moved = baselines + change * (groups == group)[:, None]
            assert (weights * (returns - moved) ** 2).sum() > best


def test_equal_scores_have_no_advantage_wherever_responses_end():
    given = batch(1)
    assert (advantages(given, scores=torch.full((12,), 0.3)) == 0).all()


def of_trajectories(many, steps, log_probs, squares):
    """Advantages of all tokens, trajectory by trajectory, of whole trajectories or of a sample for each turn."""
    made = make_batch(many, steps)
    mask, ids = made.tensors["response_mask"], made.tensors["trajectory_ids"]
    rows, columns = mask.nonzero(as_tuple=True)
    order = ids[rows].argsort(stable=True)
    places = (rows[order], columns[order])
    tables = [torch.zeros(mask.shape).index_put_(places, values) for values in (log_probs, squares)]
    return made.advantages(OTB, log_probs=tables[0], sum_pi_squared=tables[1]).advantages[places]


def test_a_trajectory_counts_on_over_its_turns_and_samples():
    many = [
        Trajectory(0, [0.0, 1.0], [0, 1], [2, 3]),
        Trajectory(0, [0.5], [0], [4]),
        Trajectory(0, [0.0, 0.0, 2.0], [0, 1, 2], [1, 1, 2]),
    ]
    generator = torch.Generator().manual_seed(6)
    log_probs, squares = -torch.rand(13, generator=generator), torch.rand(13, generator=generator) + 0.5
    whole, steps = (of_trajectories(many, steps, log_probs, squares) for steps in (False, True))
    torch.testing.assert_close(whole, steps)
    returns = [[1, 1, 1, 1, 1], [0.5] * 4, [2, 2, 2, 2]]
    energies = [
        (1 - 2 * each.exp() + more).clamp(min=0).cumsum(0) + EPSILON
        for each, more in zip(log_probs.split([5, 4, 4]), squares.split([5, 4, 4]), strict=True)
    ]
    baselines = [
        sum(own[t] * gain[t] for own, gain in zip(energies, returns, strict=True)) / sum(own[t] for own in energies)
        for t in range(4)
    ]
    expected = [gain - baselines[min(t, 3)] for own in returns for t, gain in enumerate(own)]
    torch.testing.assert_close(whole, torch.stack(expected))


def test_a_batch_without_probabilities_is_refused():
    given = batch(5)
    with pytest.raises(ValueError, match="optimal_token_baseline needs the log-probs and the sums of squared"):
        advantages(given, sum_pi_squared=None)

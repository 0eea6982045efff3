"""Advantages against their formulas, written as loops over the responses and tokens of random batches.

`draw` makes the batches: responses without a token and of one token, groups of one and of equal scores.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from roll.algorithms.advantages import AdvantageSettings, GreedyResponses, compute_advantages
from tests.algorithms.batches import CLOSE, DRAWS, Draw, draw
from tests.algorithms.trajectories import RESPONSE_ESTIMATORS


def mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and unbiased standard deviation."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def normalized(values: Sequence[float], own: float, mean: bool = True, std: bool = True) -> float:
    """One value against those of its set; 0 where they are all equal."""
    if min(values) == max(values):
        return 0.0
    centre, spread = mean_std(values)
    return (own - (centre if mean else 0.0)) / (spread + 1e-6 if std else 1.0)


def whitened(values: Sequence[float]) -> list[float]:
    return [normalized(values, value) for value in values]


def of_response(data: Draw, value: Callable[[list[float], float, int], float]) -> list[float]:
    """A value of the group's scores, the own score and the sample's number, for every token."""

    def per_response(sample: int) -> list[float]:
        scores = [data.scores[other] for other in data.group(sample)]
        return [value(scores, data.scores[sample], sample)] * data.length(sample)

    return data.tokens(per_response)


def to_go(data: Draw, sample: int, gamma: float) -> list[float]:
    """The score discounted from the last token."""
    length = data.length(sample)
    return [data.scores[sample] * gamma ** (length - 1 - token) for token in range(length)]


def centred(scores: list[float], own: float, sample: int) -> float:
    return normalized(scores, own, std=False)


def rloo(scores: list[float], own: float, sample: int) -> float:
    return own - (sum(scores) - own) / (len(scores) - 1) if len(scores) > 1 else 0.0


def best_of_k(k: int) -> Callable[[list[float], float, int], float]:
    def value(scores: list[float], own: float, sample: int) -> float:
        size = min(k, len(scores))
        sets = list(itertools.combinations(range(len(scores)), size))
        best = [max(scores[i] for i in chosen) for chosen in sets]
        mean, spread = statistics.fmean(best), statistics.pstdev(best)
        if spread <= 1e-6:
            return 0.0
        mine = scores.index(own)
        with_own = statistics.fmean(b for b, chosen in zip(best, sets, strict=True) if mine in chosen)
        return (with_own - mean) / (spread + 1e-6)

    return value


def opo(data: Draw) -> list[float]:
    def value(scores: list[float], own: float, sample: int) -> float:
        lengths = [data.length(other) for other in data.group(sample)]
        if min(scores) == max(scores):
            return 0.0
        return own - sum(n * score for n, score in zip(lengths, scores, strict=True)) / max(sum(lengths), 1e-6)

    return of_response(data, value)


def gpg(data: Draw) -> list[float]:
    sets = [{data.scores[i] for i in data.group(sample)} for sample in data.samples]
    moving = {data.groups[sample] for sample in data.samples if len(sets[sample]) > 1}
    return [len(set(data.groups)) / len(moving) * value for value in of_response(data, centred)]


def gae(data: Draw, gamma: float, lambd: float) -> list[float]:
    def per_response(sample: int) -> list[float]:
        values, result, following, after = data.response(sample, "values"), [], 0.0, 0.0
        for token in reversed(range(len(values))):
            reward = data.scores[sample] if token == len(values) - 1 else 0.0
            delta = reward + gamma * after - values[token]
            following, after = delta + gamma * lambd * following, values[token]
            result.append(following)
        return result[::-1]

    return data.tokens(per_response)


def gdpo(data: Draw, parts: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    sums = []
    for sample in data.samples:
        group = data.group(sample)
        sums.append(
            sum(weight * normalized([parts[i][k] for i in group], parts[sample][k]) for k, weight in enumerate(weights))
        )
    sampled = [total for sample, total in enumerate(sums) if data.length(sample)]
    return data.tokens(lambda sample: [normalized(sampled, sums[sample])] * data.length(sample))


def optimal_token_baseline(data: Draw, gamma: float) -> list[float]:
    def weights(sample: int) -> list[float]:
        pairs = zip(data.response(sample, "log_probs"), data.response(sample, "sum_pi_squared"), strict=True)
        squares = [max(1 - 2 * math.exp(log_prob) + squared, 0.0) for log_prob, squared in pairs]
        return [1e-6 + total for total in itertools.accumulate(squares)]

    def per_response(sample: int) -> list[float]:
        group, own, result = data.group(sample), to_go(data, sample, gamma), []
        shared = sorted(data.length(other) for other in group)[-2] if len(group) > 1 else 0
        for token, value in enumerate(own):
            at = min(token, shared - 1)
            present = [other for other in group if data.length(other) > at >= 0]
            found = [(weights(other)[at], to_go(data, other, gamma)[at]) for other in present]
            if not shared or all(each == value for _, each in found):
                result.append(0.0)
            else:
                result.append(value - sum(w * g for w, g in found) / sum(w for w, _ in found))
        return result

    return data.tokens(per_response)


def advantages_by_loops(name: str, data: Draw, config: AdvantageSettings, given: dict[str, Any]) -> list[float]:
    """The advantages of all response tokens in order."""
    greedy = given["greedy"].greedy_scores.tolist()
    teacher = [
        x - y for x, y in zip(*(data.tokens(lambda i, n=n: data.response(i, n)) for n in OF_TEACHER), strict=True)
    ]
    spread = mean_std(data.scores)[1] + 1e-6
    formulas: dict[str, Callable[[], list[float]]] = {
        "grpo": lambda: of_response(data, lambda scores, own, sample: normalized(scores, own)),
        "rloo": lambda: of_response(data, rloo),
        "remax": lambda: of_response(data, lambda scores, own, sample: own - greedy[sample]),
        "lite_ppo": lambda: [value / spread for value in of_response(data, centred)],
        "reinforce": lambda: data.tokens(lambda sample: to_go(data, sample, config.gamma)),
        "reinforce_plus_plus": lambda: whitened(data.tokens(lambda sample: to_go(data, sample, config.gamma))),
        "reinforce_plus_plus_baseline": lambda: whitened(of_response(data, centred)),
        "opo": lambda: opo(data),
        "gpg": lambda: gpg(data),
        "pass_at_k": lambda: of_response(data, best_of_k(config.pass_k)),
        "gae": lambda: gae(data, config.gamma, config.lambd),
        "gdpo": lambda: gdpo(data, given["reward_parts"].tolist(), config.reward_weights),
        "optimal_token_baseline": lambda: optimal_token_baseline(data, config.gamma),
        "opd": lambda: [-config.opd_kl_coef * value for value in teacher],
    }
    return formulas[name]()


OF_TEACHER = ("log_probs", "ref_log_probs")


@pytest.mark.parametrize("name", RESPONSE_ESTIMATORS)
def test_advantages_are_those_of_their_formulas(name):
    for seed in DRAWS:
        data = draw(seed)
        random = torch.Generator().manual_seed(100 + seed)
        count = len(data.scores)
        parts = torch.stack([torch.tensor(data.scores), torch.randint(0, 2, (count,), generator=random).float()], 1)
        given = {name: data.tables[name] for name in (*OF_TEACHER, "values", "sum_pi_squared")}
        given |= {"greedy": GreedyResponses(torch.randn(count, generator=random), torch.ones(count, dtype=torch.int64))}
        given |= {"reward_parts": parts}
        config = AdvantageSettings(
            adv_estimator=name, gamma=0.9, lambd=0.8, pass_k=1 + seed % 5, reward_weights=(1.0, 0.5)
        )
        result = compute_advantages(torch.tensor(data.scores), torch.tensor(data.groups), data.mask, config, **given)
        expected = advantages_by_loops(name, data, config, given)
        assert result.advantages[data.mask].tolist() == pytest.approx(expected, **CLOSE), seed
        assert (result.advantages[~data.mask] == 0).all()

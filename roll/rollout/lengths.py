"""Response lengths for a simulation: a log-normal with the mean and the longest response that were measured."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from functools import cache
from itertools import accumulate
from statistics import NormalDist

COUNT = 16_384
"""Lengths of one table: quantiles of the distribution in random order, so that their mean is exact."""


def response_lengths(mean: float, longest: float, of: int, limit: float, seed: int) -> list[float]:
    """COUNT lengths in tokens, at least 1 and at most `limit`.

    The spread is the one at which the longest of `of` responses is typically `longest`: with z the normal quantile of
    that rank, longest / mean = exp(sigma * z - sigma^2 / 2). Equal mean and longest give equal lengths.

    Args:
        mean: of a response, in tokens.
        longest: of the longest response of a batch.
        of: responses of that batch.
        limit: at which a response is cut.
        seed: of the order.

    Raises:
        ValueError: not 1 <= mean <= longest, or the mean is beyond the limit.
    """
    if not 1 <= mean <= longest or mean > limit:
        raise ValueError(
            f"mean {mean:g} and longest {longest:g} are not lengths with 1 <= mean <= longest, limit {limit:g}"
        )
    sigma = spread(longest / mean, of)
    if sigma == 0:
        return [float(mean)] * COUNT
    shape = [math.exp(sigma * quantile) for quantile in _normal_quantiles()]
    scale = _scale(shape, mean, limit)
    lengths = [min(limit, max(1.0, scale * value)) for value in shape]
    random.Random(seed).shuffle(lengths)
    return lengths


def spread(longest_by_mean: float, of: int) -> float:
    """Sigma of the log-normal whose largest of `of` draws is typically that many times its mean."""
    if longest_by_mean <= 1 or of < 2:
        return 0.0
    z = NormalDist().inv_cdf(1 - 1 / (of + 1))
    under = z * z - 2 * math.log(longest_by_mean)
    return z - math.sqrt(under) if under > 0 else z


@cache
def _normal_quantiles() -> list[float]:
    return [NormalDist().inv_cdf((i + 0.5) / COUNT) for i in range(COUNT)]


def _scale(shape: list[float], mean: float, limit: float) -> float:
    """The factor at which ascending lengths, cut at 1 and at the limit, have that mean; by bisection."""
    sums = [0.0, *accumulate(shape)]
    low, high = 0.0, limit / shape[0]
    for _ in range(60):
        middle = (low + high) / 2
        short, whole = bisect_left(shape, 1 / middle), bisect_left(shape, limit / middle)
        total = short + middle * (sums[whole] - sums[short]) + (COUNT - whole) * limit
        if total < mean * COUNT:
            low = middle
        else:
            high = middle
    return high

"""How far two right computations of the same log-probs may be apart; docs/algorithms/rounding.md measures it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

from roll.base.errors import Finding, warning

EPSILON = {"fp32": 2.0**-23, "fp16": 2.0**-10, "bf16": 2.0**-7}

DEPTH_EXPONENT = 0.75
"""Each layer rounds, and amplifies earlier differences: over 2 to 40 layers they grew with a power of 0.3 to 0.75."""

FP32_EPSILONS, HALF_EPSILONS = 1.5, 2.0
"""Factors of the formulas, such that bounds are at least 3 times what was measured."""

LEAST_ON_GPU, LEAST_HALF = 1e-4, 0.15
"""Least bounds of the mean: a GPU's libraries choose kernels by the shape; two layers with large logits reach 0.03 in
bf16."""


def mismatch_bounds(
    dtypes: Collection[str], layers: int, width: int, tokens: int, gpu: bool = False
) -> dict[str, float | None]:
    """Bounds in nats by key: on the mean, on 99 % of tokens, and on the largest, which has none in half precision.

    In fp32 the mean is 1.5 eps layers^0.75 sqrt(width) log2(tokens): logits grow with the square root of the width, and
    the rounding of attention with the length. In half precision it is 2 eps layers^0.75. Of
    the `dtypes` of engine and trainer the coarsest counts; `tokens` is the longest sequence.
    """
    scale = max(EPSILON[dtype] for dtype in dtypes) * layers**DEPTH_EXPONENT
    if {*dtypes} == {"fp32"}:
        scale *= FP32_EPSILONS * math.sqrt(width) * math.log2(max(tokens, 2))
        mean, p99, largest = max(scale, LEAST_ON_GPU if gpu else 0.0), 10, 100
    else:
        mean, p99, largest = max(HALF_EPSILONS * scale, LEAST_HALF), 5, None
    mean = float(f"{mean:.2g}")
    bounds = mean, p99 * mean, None if largest is None else largest * mean
    return dict(zip(("mean_logprob_mismatch", "p99_logprob_mismatch", "max_logprob_mismatch"), bounds, strict=True))


def check_mismatch(config: Any) -> Iterator[Finding]:
    """A bound that another one reaches first has no effect."""
    largest = config.max_logprob_mismatch
    for key in ("mean_logprob_mismatch", "p99_logprob_mismatch"):
        bound = getattr(config, key)
        if key in config.source.given and largest is not None and bound is not None and bound > largest:
            yield warning(
                key,
                f"{bound:g} is never reached: max_logprob_mismatch {largest:g} ends the run first; use at most that, "
                "or raise that too",
            )

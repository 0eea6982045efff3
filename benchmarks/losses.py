"""Advantages and policy losses of 1,024 samples of 2,048 tokens, against copying the tensors that they use.

    python -m benchmarks.losses --json FILE

A copy reads and writes a tensor once. For an `adv_estimator` the tensors are those of all tokens that it is given and
gives back; for a `pg_variant` they are log-probs, base, advantages, mask and the gradient of the log-probs, and the
time is that of the loss with its metrics and of the gradient. Responses have random lengths, a quarter of the longest
on average. Both sides use the same cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import Check, Measurement, at_most, main, median
from roll.algorithms.advantages import AdvantageSettings, GreedyResponses, compute_advantages
from roll.algorithms.aggregation import LossScale
from roll.algorithms.estimators import ADV_ESTIMATORS
from roll.algorithms.losses import policy
from roll.algorithms.options.policy_options import PolicySettings
from roll.algorithms.policy_loss import POLICY_LOSSES

SAMPLES, TOKENS, GROUP = 1024, 2048, 8
MICRO_BATCH = 16
"""Samples of one call of a loss; a run never gives it a whole batch."""

REPEATS = 5
TARGET = 3.0

READ = {
    "gae": ("values",),
    "opd": ("log_probs", "ref_log_probs"),
    "optimal_token_baseline": ("log_probs", "sum_pi_squared"),
}
"""Tensors of all tokens that an estimator reads beside the mask."""


def seconds(work: Callable[[], object]) -> float:
    """Median time of a call, after one that does not count."""
    work()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)


def copy_seconds(tensors: Sequence[Tensor]) -> float:
    """One read and one write of each tensor, into memory that exists."""
    targets = [tensor.clone() for tensor in tensors]

    def copy() -> None:
        for target, tensor in zip(targets, tensors, strict=True):
            target.copy_(tensor)

    return seconds(copy)


def batch() -> dict[str, Tensor]:
    """Random tensors of all tokens, and scores and groups of samples."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, TOKENS, (SAMPLES, 3), generator=generator).amin(-1)
    shape = (SAMPLES, TOKENS)
    noise = [torch.rand(shape, generator=generator) for _ in range(4)]
    return {
        "response_mask": torch.arange(TOKENS) < lengths[:, None],
        "log_probs": -noise[0],
        "old_log_probs": -noise[0] + 0.1 * (noise[1] - 0.5),
        "ref_log_probs": -noise[1],
        "values": noise[2],
        "sum_pi_squared": noise[3],
        "advantages": noise[2] - 0.5,
        "scores": torch.randint(0, 2, (SAMPLES,), generator=generator).float(),
        "groups": torch.arange(SAMPLES) // GROUP,
    }


def measure_estimator(name: str, data: dict[str, Tensor]) -> dict[str, float]:
    """Seconds of the advantages, and of copying what they read and give."""
    config = AdvantageSettings(adv_estimator=name, reward_weights=(1.0,))
    options: dict[str, Any] = {key: data[key] for key in READ.get(name, ())}
    if name == "remax":
        options["greedy"] = GreedyResponses(data["scores"], torch.ones(SAMPLES, dtype=torch.int64))
    if name == "gdpo":
        options["reward_parts"] = data["scores"][:, None]
    mask = data["response_mask"]
    work = seconds(lambda: compute_advantages(data["scores"], data["groups"], mask, config, **options))
    result = compute_advantages(data["scores"], data["groups"], mask, config, **options)
    read = [data[key] for key in READ.get(name, ())]
    return {"seconds": work, "copy_seconds": copy_seconds([mask, *read, result.advantages, result.returns])}


def measure_loss(name: str, data: dict[str, Tensor]) -> dict[str, float]:
    """Seconds of loss and gradient over all micro-batches, and of copying what they read and give."""
    config = PolicySettings(pg_variant=name)
    scale = LossScale.of(data["response_mask"], TOKENS)
    data = data | {"behavior_log_probs": data["old_log_probs"]}
    if name in ("clip_cov", "kl_cov"):
        data["high_covariance"] = data["values"] > 0.998
    parts = [slice(start, start + MICRO_BATCH) for start in range(0, SAMPLES, MICRO_BATCH)]
    micros = [{key: each[rows] for key, each in data.items()} for rows in parts]
    log_probs = [data["log_probs"][rows].clone().requires_grad_() for rows in parts]

    def work() -> None:
        for own, micro in zip(log_probs, micros, strict=True):
            loss, _ = policy(own, None, micro, scale, config)
            torch.autograd.grad(loss, own)

    read = [data[key] for key in ("log_probs", "old_log_probs", "advantages", "response_mask", "log_probs")]
    return {"seconds": seconds(work), "copy_seconds": copy_seconds(read)}


def measure() -> Measurement:
    """The ratio of every estimator for single turns, and of every loss."""
    data = batch()
    raw: dict[str, Any] = {"samples": SAMPLES, "tokens": TOKENS, "micro_batch": MICRO_BATCH}
    checks: list[Check] = []
    parts: list[tuple[str, Sequence[str], Callable[[str, dict[str, Tensor]], dict[str, float]]]] = [
        ("adv_estimator", [name for name, each in ADV_ESTIMATORS.items() if each.needs != "turns"], measure_estimator),
        ("pg_variant", [*POLICY_LOSSES], measure_loss),
    ]
    for part, names, measure_one in parts:
        for name in names:
            raw[f"{part}/{name}"] = found = measure_one(name, data)
            checks.append(at_most(f"{part} {name}: times a copy", found["seconds"] / found["copy_seconds"], TARGET))
    return raw, checks


if __name__ == "__main__":
    main(measure, __doc__ or "")

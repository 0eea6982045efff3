"""Bytes of a weight update by deltas over those of all weights, by learning rate, in bf16.

    python -m benchmarks.delta_updates --json FILE

A small model takes STEPS optimizer steps of Adam at each rate, each on other random tokens, and is encoded after each
step as for an engine of one rank.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import Measurement, at_most, main
from benchmarks.ranks import spawn_ranks
from benchmarks.train_step import SHAPE, Work, megatron_strategy
from roll.configs.devices.parallel_layout import ParallelLayout

RATES = (1e-6, 1e-5, 1e-4, 1e-3)
STEPS, SHOWN = 120, 20
"""Optimizer steps at each rate, and how many of the first and of the last are averaged."""

TARGET_LOW, TARGET_ANY = 0.1, 1.0
"""Most bytes, as a fraction of all weights, at the lowest rate and at any."""


def measure() -> Measurement:
    """Fractions at each rate."""
    from roll.models.tiny import write_tiny_model

    with tempfile.TemporaryDirectory() as root:
        folder = write_tiny_model(Path(root) / "model", "qwen2", **SHAPE)
        found = {rate: spawn_ranks(ParallelLayout(), _fractions, folder, rate) for rate in RATES}
    first, last = (
        {rate: sum(fractions[part]) / SHOWN for rate, fractions in found.items()}
        for part in (slice(SHOWN), slice(-SHOWN, None))
    )
    raw = {
        "shape": SHAPE,
        "steps": STEPS,
        "fractions": {f"{rate:g}": fractions for rate, fractions in found.items()},
        "first": {f"{rate:g}": value for rate, value in first.items()},
        "last": {f"{rate:g}": value for rate, value in last.items()},
    }
    return raw, [
        at_most(f"delta_updates: bytes at {RATES[0]:g} over all weights, last steps", last[RATES[0]], TARGET_LOW),
        at_most(
            "delta_updates: bytes over all weights, any step at any rate", max(map(max, found.values())), TARGET_ANY
        ),
    ]


def _fractions(layout: ParallelLayout, rank: int, folder: Path, rate: float) -> list[float]:
    """For each step, the bytes of a delta over those of all weights."""
    from roll.distributed.weights.delta_sender import EngineDeltas
    from roll.models.families.shape import known_model_shape

    strategy = megatron_strategy(layout, rank, folder, Work(length=128, learning_rate=rate), dtype="bf16")
    kept = {name: tensor.clone() for name, tensor in strategy.weights.full_tensors()}
    whole, fractions = sum(tensor.nbytes for tensor in kept.values()), []
    for step in range(STEPS):
        strategy.train_step(_batch(step))
        deltas = EngineDeltas(known_model_shape(folder), 1, kept)
        for name, tensor in strategy.weights.full_tensors():
            deltas.add(name, tensor)
        fractions.append(sum(len(delta.data) for delta in deltas.take()) / whole)
    return fractions


def _batch(seed: int) -> Any:
    """Four samples of 128 tokens for one optimizer step."""
    import torch

    from roll.datasets.batch import Batch

    ids = torch.randint(0, SHAPE["vocab_size"], (4, 128), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    response = mask.bool()
    response[:, 0] = False
    plan = {"micro_batches": [[0, 1, 2, 3]], "tokens": float(response.sum()), "sequences": 4.0}
    data = Batch({"input_ids": ids, "attention_mask": mask, "response_mask": response})
    data.meta_info = {"loss": "sft", "loss_config": None, "optimizer_steps": [plan]}
    return data


if __name__ == "__main__":
    main(measure, __doc__ or "")

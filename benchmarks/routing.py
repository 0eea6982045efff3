"""What router replay costs: seconds of a step, and bytes of the driver's memory.

    python -m benchmarks.routing --json FILE

A small mixture of experts is trained with the experts of the engine (R3) and with those of the trainer, in runs that
alternate. At a learning rate that changes no token both have the same samples. Memory is that of a batch with the
experts of a large mixture, beside one byte for each token, layer and expert of the token.
"""

from __future__ import annotations

import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Measurement, at_most, main, median
from benchmarks.routing_agreement import run_once, write_inputs
from roll.rollout.rollout_batch import batch_of_groups
from roll.rollout.types import GenerateResult, Group, Trajectory

STARTS = 3
"""Runs of each mode."""

LENGTH = 192
"""Tokens of a response at most: a step of 128 of them takes seconds, beside which those of a start are few."""

TARGET_STEP, TARGET_BYTES = 1.05, 1.1
"""Most seconds of a step over one without replay, and most bytes over tokens x layers x experts of a token."""

MODES = ("disable", "R3")

GROUPS, SAMPLES, PROMPT, RESPONSE, LAYERS, CHOSEN = 4, 8, 64, 960, 48, 8
"""A batch with the layers and the experts of Qwen3-30B-A3B."""


def step_seconds(folder: Path, mode: str, start: int) -> list[float]:
    """Seconds of each step of a run."""
    overrides = (f"actor_train.router_replay.mode={mode}", "actor_train.training_args.learning_rate=1e-10")
    lengths = (f"response_length={LENGTH}", "async_generation_ratio=0")
    return [line["time/step"] for line in run_once(folder, f"{mode}-{start}", *overrides, *lengths)]


def batch_bytes(routed: bool) -> int:
    """Bytes that a batch takes in the driver, from the results of its requests on."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    groups = [Group(number, "math", number, str(number)) for number in range(GROUPS)]
    for group in groups:
        group.trajectories = [_sample(routed) for _ in range(SAMPLES)]
    batch = batch_of_groups(groups)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert ("routing" in batch.non_tensor_batch) == routed
    return after - before


def _sample(routed: bool) -> Trajectory:
    routing = np.zeros((PROMPT + RESPONSE - 1, LAYERS, CHOSEN), np.uint8) if routed else None
    ids, zeros = [5] * RESPONSE, [0] * RESPONSE
    result = GenerateResult("", ids, [0.0] * RESPONSE, zeros, "length", routing=routing)
    return Trajectory.of_response([5] * PROMPT, result, "")


def measure() -> Measurement:
    """Steps of both modes, and the memory of both batches."""
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as name:
        write_inputs(Path(name))
        for start in range(STARTS):
            for mode in MODES:
                found[mode] += step_seconds(Path(name), mode, start)
    step = median(found["R3"]) / median(found["disable"])
    entries = GROUPS * SAMPLES * (PROMPT + RESPONSE) * LAYERS * CHOSEN
    taken = batch_bytes(routed=True) - batch_bytes(routed=False)
    raw: dict[str, Any] = {"seconds": found, "bytes": taken, "entries": entries}
    return raw, [
        at_most("routing: step with R3 over one without", step, TARGET_STEP),
        at_most("routing: bytes over tokens x layers x experts", taken / entries, TARGET_BYTES),
    ]


if __name__ == "__main__":
    main(measure, __doc__ or "")

"""Context parallelism: tokens per second, communication, balance and memory of two ranks against one.

    python -m benchmarks.long_context --json FILE

One optimizer step of samples of 4,096 and of 512 tokens, and of one sample of 16,384 tokens for its memory; each rank
has one core. Communication is the time in which a rank sends keys, values and their gradients, or waits for them.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import Measurement, at_least, at_most, main, median
from benchmarks.ranks import spawn_ranks
from benchmarks.train_step import SHAPE, Work, megatron_steps
from roll.configs.devices.parallel_layout import ParallelLayout

WORKS = {
    "4,096 tokens": Work(samples=4, micro_batch=1, length=4096, repeats=3),
    "512 tokens": Work(samples=16, micro_batch=8, length=512, repeats=5),
}
LONGEST = Work(samples=1, micro_batch=1, length=16384, repeats=0)

TARGET_SPEED = {"4,096 tokens": 1.6, "512 tokens": 1.2}
"""Required tokens per second of two ranks over those of one."""

TARGET_COMMUNICATION, TARGET_SLOWEST, TARGET_MEMORY = 0.1, 1.05, 0.6
"""Largest share of a step, processor time of the slowest rank over the mean, and peak memory over that of one rank."""


def measure() -> Measurement:
    """All figures at one and at two context ranks."""
    from roll.models.tiny import write_tiny_model

    layouts = {size: ParallelLayout(context=size) for size in (1, 2)}
    with tempfile.TemporaryDirectory() as root:
        folder = write_tiny_model(Path(root) / "model", "qwen2", **SHAPE | {"max_position_embeddings": LONGEST.length})
        found = {
            name: {size: spawn_ranks(layout, _steps, folder, work) for size, layout in layouts.items()}
            for name, work in (WORKS | {"16,384 tokens": LONGEST}).items()
        }
    checks = []
    for name in WORKS:
        one, two = (median(found[name][size]["seconds"]) for size in layouts)
        checks.append(at_least(f"long_context: two ranks / one, {name}", one / two, TARGET_SPEED[name]))
    long = found["4,096 tokens"][2]
    share = median(long["communication"]) / median(long["seconds"])
    peaks = {size: max(each["peak"]) for size, each in found["16,384 tokens"].items()}
    checks += [
        at_most("long_context: communication / step, 4,096 tokens", share, TARGET_COMMUNICATION),
        at_most("long_context: slowest rank / mean", _imbalance(long["processor"]), TARGET_SLOWEST),
        at_most("long_context: memory of a rank, two / one, 16,384 tokens", peaks[2] / peaks[1], TARGET_MEMORY),
    ]
    return {"works": {name: asdict(work) for name, work in WORKS.items()}, "found": found}, checks


def _imbalance(processor: list[float]) -> float:
    return max(processor) * len(processor) / sum(processor)


def _steps(layout: ParallelLayout, rank: int, folder: Path, work: Work) -> dict[str, Any]:
    """Seconds and communication of each step, processor time and peak memory of each rank."""
    import torch.distributed as dist

    from roll.platforms import get_platform

    _, step = megatron_steps(layout, rank, folder, work)
    waited = _timed_communication()
    step()
    seconds, communication, before = [], [], time.process_time()
    for _ in range(work.repeats):
        waited.clear()
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
        communication.append(sum(waited))
    own = {"processor": time.process_time() - before, "peak": get_platform("cpu").memory()["peak"]}
    ranks: list[Any] = [None] * layout.world_size
    dist.all_gather_object(ranks, own)
    return {
        "seconds": seconds,
        "communication": communication,
        **{name: [each[name] for each in ranks] for name in own},
    }


def _timed_communication() -> list[float]:
    """The seconds of each exchange from now on."""
    from megatron.core import tensor_parallel

    seconds: list[float] = []
    module: Any = tensor_parallel
    for name in ("gather_from_sequence_parallel_region", "reduce_scatter_to_sequence_parallel_region"):
        exchange = getattr(module, name)

        def timed(*arguments: Any, exchange: Any = exchange, **options: Any) -> Any:
            start = time.perf_counter()
            result = exchange(*arguments, **options)
            seconds.append(time.perf_counter() - start)
            return result

        setattr(module, name, timed)
    return seconds


if __name__ == "__main__":
    main(measure, __doc__ or "")

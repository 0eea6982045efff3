"""Tokens per second of SGLang on CPU: batched attention against SGLang's own loop over requests.

    python -m benchmarks.generate --json FILE

Both engines serve the same tiny model with the same requests and seeds, one engine after the other. The stock one is
this project's platform with `ROLL_CPU_ATTENTION=stock`.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import at_least, main, median
from roll.configs.pipeline import RLVRConfig
from roll.configs.worker import WorkerConfig
from roll.distributed.strategy.sglang_strategy import SGLangStrategy
from roll.platforms import get_platform
from roll.rollout.types import GenerateRequest, SamplingParams

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}
PROMPT_TOKENS = 16
NEW_TOKENS = 64
REPEATS = 3
TARGET_SPEEDUP = 3.0

LONG_TAIL_SHAPE = 1.2
"""Pareto exponent of the long-tailed lengths: most are near the shortest, a few are at the limit."""

SHORTEST, LONGEST = 24, 512


def workloads() -> dict[str, list[int]]:
    """New tokens of each request, by workload."""
    draw = random.Random(0)
    tail = [min(LONGEST, int(SHORTEST * draw.paretovariate(LONG_TAIL_SHAPE))) for _ in range(128)]
    return {
        "16 requests": [NEW_TOKENS] * 16,
        "128 requests": [NEW_TOKENS] * 128,
        "256 requests": [NEW_TOKENS] * 256,
        "128 requests, long tail": tail,
    }


async def tokens_per_second(attention: str, folder: Path) -> dict[str, list[float]]:
    """Repeated measurements of each workload on one engine, after one unmeasured pass of each."""
    worker, pipeline = WorkerConfig(), RLVRConfig(prompt_length=PROMPT_TOKENS, response_length=LONGEST)
    worker.model_args.model_name_or_path, worker.model_args.dtype = str(folder), "fp32"
    worker.max_running_requests = 256
    worker.system_envs = {"ROLL_CPU_ATTENTION": attention}
    engine = SGLangStrategy(worker, pipeline, get_platform("cpu").engine_arguments(), rank=0, seed=0)
    await engine.initialize()
    try:
        return {name: [await _rate(engine, lengths) for _ in range(REPEATS)] for name, lengths in workloads().items()}
    finally:
        engine.shutdown()


async def _rate(engine: SGLangStrategy, lengths: list[int]) -> float:
    draw = random.Random(1)
    requests = [
        GenerateRequest(
            f"{index}", [draw.randrange(3, 512) for _ in range(PROMPT_TOKENS)], SamplingParams(length), seed=index
        )
        for index, length in enumerate(lengths)
    ]
    await engine.flush_cache()
    start = time.perf_counter()
    results = await engine.generate(requests)
    seconds = time.perf_counter() - start
    assert [len(result.response_ids) for result in results] == lengths, "every response runs to its limit"
    return sum(lengths) / seconds


def measure() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Raw rates of both engines, and the speed-up of each workload."""
    from roll.models.tiny import write_tiny_model

    with tempfile.TemporaryDirectory() as scratch:
        folder = write_tiny_model(scratch, "qwen2", eos_token_id=None, **SHAPE)
        rates = {kind: asyncio.run(tokens_per_second(kind, folder)) for kind in ("stock", "batched")}
    medians = {kind: {name: median(values) for name, values in by_name.items()} for kind, by_name in rates.items()}
    speedups = {name: medians["batched"][name] / medians["stock"][name] for name in workloads()}
    checks = [at_least("128 requests: batched over stock", speedups["128 requests"], TARGET_SPEEDUP)]
    raw = {"tokens_per_second": rates, "median_tokens_per_second": medians, "speedup": speedups}
    return raw, checks


if __name__ == "__main__":
    main(measure, __doc__ or "")

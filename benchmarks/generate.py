"""Tokens per second of SGLang on CPU: batched attention against SGLang's own loop over requests.

    python -m benchmarks.generate --json FILE

Two engines, each with one thread, serve the same tiny model with the same requests and seeds and take turns, so that
what else the machine does falls on both. The stock one is this project's platform with `ROLL_CPU_ATTENTION=stock`.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.common import Measurement, at_least, main, median
from roll.configs.pipeline import RLVRConfig
from roll.configs.roles import ActorInferConfig
from roll.distributed.strategy.sglang_strategy import SGLangStrategy
from roll.platforms import get_platform
from roll.rollout.types import GenerateRequest, SamplingParams

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "eos_token_id": None,
}
PROMPT_TOKENS = 16
NEW_TOKENS = 64
REPEATS = 3
TARGET_SPEEDUP = 3.0
KINDS = ("stock", "batched")

LONG_TAIL_SHAPE = 1.2
"""Pareto exponent of the long-tailed lengths: most are near the shortest, a few are at the limit."""

SHORTEST, LONGEST = 24, 512

TIMEOUT_S = 600.0
"""Longest start or pass on a machine that does much else."""


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


def serve(orders: Connection, attention: str, folder: str) -> None:
    """Runs in a process of its own: one engine that measures each list of lengths it is sent, until None."""
    os.environ["OMP_NUM_THREADS"] = "1"  # an engine beside a trainer owns one core, and idle threads would spin
    asyncio.run(_serve(orders, attention, folder))


async def _serve(orders: Connection, attention: str, folder: str) -> None:
    worker, pipeline = ActorInferConfig(), RLVRConfig(prompt_length=PROMPT_TOKENS, response_length=LONGEST)
    worker.model_args.model_name_or_path, worker.model_args.dtype = folder, "fp32"
    worker.max_running_requests, worker.generation_timeout_s = 256, TIMEOUT_S
    worker.system_envs = {"ROLL_CPU_ATTENTION": attention}
    engine = SGLangStrategy(worker, pipeline, get_platform("cpu").engine_arguments(), rank=0, seed=0)
    await engine.initialize()
    try:
        await tokens_per_second(engine, [NEW_TOKENS] * 16)
        orders.send("ready")
        while lengths := orders.recv():
            orders.send(await tokens_per_second(engine, lengths))
    finally:
        engine.shutdown()


async def tokens_per_second(engine: SGLangStrategy, lengths: list[int]) -> float:
    """One pass over requests of these lengths, prefill included."""
    draw = random.Random(1)
    prompts = [[draw.randrange(3, SHAPE["vocab_size"]) for _ in range(PROMPT_TOKENS)] for _ in lengths]
    requests = [
        GenerateRequest(str(index), prompt, SamplingParams(length), seed=index)
        for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    await engine.flush_cache()
    start = time.perf_counter()
    results = await engine.generate(requests)
    seconds = time.perf_counter() - start
    assert [len(result.response_ids) for result in results] == lengths, "every response runs to its limit"
    return sum(lengths) / seconds


def measure() -> Measurement:
    """Rates of both engines turn by turn, and the median speed-up of each workload over its repeats."""
    from roll.models.tiny import write_tiny_model

    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_tiny_model(Path(scratch), "qwen2", **SHAPE)
        pipes = {kind: context.Pipe() for kind in KINDS}
        servers = [context.Process(target=serve, args=(pipes[kind][1], kind, str(folder))) for kind in KINDS]
        try:
            for server in servers:
                server.start()
            rates = take_turns({kind: pipe[0] for kind, pipe in pipes.items()})
        finally:
            for server in servers:
                server.join(TIMEOUT_S / 10)
                server.kill()
    speedups = {
        name: median([batched / stock for stock, batched in zip(*(rates[kind][name] for kind in KINDS), strict=True)])
        for name in workloads()
    }
    medians = {kind: {name: median(values) for name, values in rates[kind].items()} for kind in KINDS}
    raw = {"tokens_per_second": rates, "median_tokens_per_second": medians, "speedup": speedups}
    return raw, [at_least("128 requests: batched over stock", speedups["128 requests"], TARGET_SPEEDUP)]


def take_turns(engines: dict[str, Connection]) -> dict[str, dict[str, list[float]]]:
    """Tokens per second by kind and workload, one figure per repeat; ends the engines."""
    rates: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in workloads()} for kind in KINDS}
    for engine in engines.values():
        _answer(engine)
    for _ in range(REPEATS):
        for name, lengths in workloads().items():
            for kind, engine in engines.items():
                engine.send(lengths)
                rates[kind][name].append(_answer(engine))
    for engine in engines.values():
        engine.send(None)
    return rates


def _answer(engine: Connection) -> float:
    if not engine.poll(TIMEOUT_S):
        raise TimeoutError(f"an engine did not answer within {TIMEOUT_S:g} s")
    return engine.recv()


if __name__ == "__main__":
    main(measure, __doc__ or "")

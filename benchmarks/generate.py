"""Tokens per second of SGLang on CPU: the project's kernels and padded batches against SGLang's loop over requests.

    python -m benchmarks.generate --json FILE

Engines with one thread each run the same tiny model with the same requests and seeds. They alternate, so that other
load on the machine affects all. The baseline is SGLang as it is on a CPU: `ROLL_CPU_ATTENTION=stock`, and its defaults
for the prefix cache, the overlap of scheduling, and when prompts are computed and tokens sent.
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
from roll.distributed.infer.infer_worker import InferWorker
from roll.distributed.worker import WorkerRank
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
TARGET_SPEEDUP = 5.0
KINDS = ("stock", "batched", "kernel")

STOCK = {"disable_overlap_schedule": False, "disable_radix_cache": False, "prefill_decode_interval": 0}
"""Arguments that give an engine SGLang's defaults on a CPU."""

LONG_TAIL_SHAPE = 1.2
"""Pareto exponent of the long-tailed lengths: most are near the minimum, a few at the limit."""

SHORTEST, LONGEST = 24, 512

TIMEOUT_S = 600.0
"""Seconds for starting or measuring an engine on a loaded machine."""


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


def run_engine(commands: Connection, attention: str, folder: str) -> None:
    """Process of one engine: measures each list of lengths it receives, until None."""
    os.environ["OMP_NUM_THREADS"] = "1"  # as next to a trainer, where idle threads would spin on its core
    asyncio.run(_run_engine(commands, attention, folder))


async def _run_engine(commands: Connection, attention: str, folder: str) -> None:
    worker, pipeline = ActorInferConfig(), RLVRConfig(prompt_length=PROMPT_TOKENS, response_length=LONGEST)
    worker.model_args.model_name_or_path, worker.model_args.dtype = folder, "fp32"
    worker.max_running_requests, worker.generation_timeout_s = 256, TIMEOUT_S
    worker.system_envs = {"ROLL_CPU_ATTENTION": attention}
    if attention == "stock":
        worker.strategy_args.strategy_config = STOCK
        worker.system_envs |= {"SGLANG_FORCE_STREAM_INTERVAL": "50"}
    engine = InferWorker(WorkerRank("actor_infer"), worker, pipeline)
    await engine.initialize()
    try:
        await tokens_per_second(engine, [NEW_TOKENS] * 16)
        commands.send("ready")
        while lengths := commands.recv():
            commands.send(await tokens_per_second(engine, lengths))
    finally:
        engine.close()


async def tokens_per_second(engine: InferWorker, lengths: list[int]) -> float:
    """Generates responses of these lengths, prefill included."""
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
    assert [len(result.response_ids) for result in results] == lengths, "every response must reach its limit"
    return sum(lengths) / seconds


def measure() -> Measurement:
    """Rates of both engines, measured alternately, and the median speed-up per workload."""
    from roll.models.tiny import write_tiny_model

    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_tiny_model(Path(scratch), "qwen2", **SHAPE)
        pipes = {kind: context.Pipe() for kind in KINDS}
        processes = [context.Process(target=run_engine, args=(pipes[kind][1], kind, str(folder))) for kind in KINDS]
        try:
            for process in processes:
                process.start()
            rates = measure_alternately({kind: pipe[0] for kind, pipe in pipes.items()})
        finally:
            for process in processes:
                process.join(TIMEOUT_S / 10)
                process.kill()
    speedups = {
        kind: {
            name: median([ours / stock for ours, stock in zip(rates[kind][name], rates["stock"][name], strict=True)])
            for name in workloads()
        }
        for kind in KINDS[1:]
    }
    medians = {kind: {name: median(values) for name, values in rates[kind].items()} for kind in KINDS}
    raw = {"tokens_per_second": rates, "median_tokens_per_second": medians, "speedup": speedups}
    return raw, [
        at_least(f"generate: {name}, kernel over stock", speedups["kernel"][name], TARGET_SPEEDUP)
        for name in ("128 requests", "128 requests, long tail")
    ]


def measure_alternately(engines: dict[str, Connection]) -> dict[str, dict[str, list[float]]]:
    """Tokens per second by kind and workload, one figure per repeat; stops the engines."""
    rates: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in workloads()} for kind in KINDS}
    for engine in engines.values():
        _receive(engine)
    for _ in range(REPEATS):
        for name, lengths in workloads().items():
            for kind, engine in engines.items():
                engine.send(lengths)
                rates[kind][name].append(_receive(engine))
    for engine in engines.values():
        engine.send(None)
    return rates


def _receive(engine: Connection) -> Any:
    if not engine.poll(TIMEOUT_S):
        raise TimeoutError(f"an engine did not answer within {TIMEOUT_S:g} s")
    return engine.recv()


if __name__ == "__main__":
    main(measure, __doc__ or "")

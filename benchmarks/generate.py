"""Tokens per second of SGLang on CPU: the project's kernels and padded batches against SGLang's loop over requests.

    python -m benchmarks.generate --json FILE [--lora] [--model moe]

Engines with one thread each run the same tiny model with the same requests and seeds. They alternate, so that other
load on the machine affects all. The baseline is SGLang as it is on a CPU: `ROLL_CPU_ATTENTION=stock`, and its defaults
for the prefix cache, the overlap of scheduling, and when prompts are computed and tokens sent.

With `--lora`: an engine without adapters, one with merged weights, and one with adapters of LORA_RANK in one and in two
versions of a batch. With `--model moe`: a mixture of experts, the project's kernels against SGLang's loop.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from hashlib import sha256
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
MIXTURE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 192,
    "norm_topk_prob": True,
}
"""Experts of the mixture; those of a token have as many weights as the MLP of the dense model."""

PROMPT_TOKENS = 16
NEW_TOKENS = 64
REPEATS = 3
TARGET_SPEEDUP, TARGET_MIXTURE_SPEEDUP = 5.0, 2.0
KINDS, MIXTURE_KINDS = ("stock", "batched", "kernel"), ("stock", "kernel")

LORA_RANK, TARGET_MERGED = 16, 0.97
"""Rank of the adapters, and required speed of merged weights over those of no adapter."""
LORA_KINDS = {
    "plain": ("plain", 1),
    "merged": ("merged", 1),
    "adapter": ("adapter", 1),
    "adapters of two versions": ("adapter", 2),
}
"""What is measured with adapters: the engine, and the versions in a batch."""

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


def measure_lora() -> Measurement:
    """Rates without adapters, with merged weights, and with adapters of one and of two versions in a batch."""
    from roll.models.tiny import write_tiny_model

    context = multiprocessing.get_context("spawn")
    rates: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in workloads()} for kind in LORA_KINDS}
    with tempfile.TemporaryDirectory() as scratch:
        folders = {kind: write_tiny_model(Path(scratch) / kind, "qwen2", **SHAPE) for kind in ("plain", "merged")}
        pipes = {kind: context.Pipe() for kind in ("plain", "merged", "adapter")}
        arguments = {kind: (pipes[kind][1], "kernel", str(folders.get(kind, folders["plain"]))) for kind in pipes}
        processes = [context.Process(target=run_engine, args=(*arguments[kind], kind == "adapter")) for kind in pipes]
        try:
            for process in processes:
                process.start()
            engines = {kind: pipe[0] for kind, pipe in pipes.items()}
            for engine in engines.values():
                _receive(engine)
            for name, lengths in [*workloads().items()] * REPEATS:
                for kind, (served_by, versions) in LORA_KINDS.items():
                    engines[served_by].send((lengths, versions))
                    rates[kind][name].append(_receive(engines[served_by]))
            for engine in engines.values():
                engine.send(None)
        finally:
            for process in processes:
                process.join(TIMEOUT_S / 10)
                process.kill()
    medians = {kind: {name: median(values) for name, values in found.items()} for kind, found in rates.items()}
    share = median([median(rates["merged"][name]) / median(rates["plain"][name]) for name in workloads()])
    raw = {"rank": LORA_RANK, "tokens_per_second": rates, "median_tokens_per_second": medians}
    return raw, [at_least("generate: merged over no adapter", share, TARGET_MERGED)]


async def _load_adapter(engine: InferWorker, folder: str, version: int) -> None:
    """Loads random matrices for every linear layer, as a trainer sends them."""
    import torch
    from safetensors.torch import save

    from roll.configs.learning.lora import peft_config
    from roll.distributed.train.weight_sender import StageAdapters
    from roll.models.families.shape import known_model_shape
    from roll.models.families.weights import ALL_LINEAR, model_rules, target_rules

    shape, tensors = known_model_shape(folder), {}
    for rule, _ in target_rules(model_rules(shape), [ALL_LINEAR]):
        for name, (rows, columns) in zip(rule.hf, rule.hf_shapes(shape), strict=True):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{stem}.lora_A.weight"] = 0.01 * torch.randn(LORA_RANK, columns)
            tensors[f"{stem}.lora_B.weight"] = 0.01 * torch.randn(rows, LORA_RANK)
    trained = engine.pipeline_config.adapters("cpu")
    assert trained is not None
    config = peft_config(trained[""], {name.split(".")[-3] for name in tensors}, folder)
    data, names = save(tensors), frozenset(tensors)
    await engine.load_adapter(version, [StageAdapters(0, data, sha256(data).hexdigest(), names, names, config)])


def run_engine(commands: Connection, attention: str, folder: str, adapters: bool = False) -> None:
    """Process of one engine: measures each list of lengths it receives, until None."""
    os.environ["OMP_NUM_THREADS"] = "1"  # as next to a trainer, where idle threads would spin on its core
    asyncio.run(_run_engine(commands, attention, folder, adapters))


async def _run_engine(commands: Connection, attention: str, folder: str, adapters: bool) -> None:
    worker, pipeline = ActorInferConfig(), RLVRConfig(prompt_length=PROMPT_TOKENS, response_length=LONGEST)
    worker.model_args.model_name_or_path, worker.model_args.dtype = folder, "fp32"
    worker.max_running_requests, worker.generation_timeout_s = 256, TIMEOUT_S
    worker.system_envs = {"ROLL_CPU_ATTENTION": attention}
    if attention == "stock":
        worker.strategy_args.strategy_config = STOCK
        worker.system_envs |= {"SGLANG_FORCE_STREAM_INTERVAL": "50"}
    if adapters:
        pipeline.actor_train.lora_update, model = "adapter", pipeline.actor_train.model_args
        model.lora_target, model.lora_rank, model.model_name_or_path = ["all-linear"], LORA_RANK, folder
    engine, version = InferWorker(WorkerRank("actor_infer"), worker, pipeline), 0
    await engine.initialize()
    try:
        if adapters:
            await _load_adapter(engine, folder, version)
        await tokens_per_second(engine, [NEW_TOKENS] * 16)
        commands.send("ready")
        while work := commands.recv():
            lengths, versions = work if isinstance(work, tuple) else (work, 1)
            if versions > 1:
                version += 1
                update = partial(_load_adapter, engine, folder, version)
                commands.send(await tokens_per_second(engine, lengths, update))
            else:
                commands.send(await tokens_per_second(engine, lengths))
    finally:
        engine.close()


async def tokens_per_second(
    engine: InferWorker, lengths: list[int], update: Callable[[], Awaitable[None]] | None = None
) -> float:
    """Generates responses of these lengths, prefill included; every second one after an `update`."""
    draw = random.Random(1)
    prompts = [[draw.randrange(3, SHAPE["vocab_size"]) for _ in range(PROMPT_TOKENS)] for _ in lengths]
    requests = [
        GenerateRequest(str(index), prompt, SamplingParams(length), seed=index)
        for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    await engine.flush_cache()
    start = time.perf_counter()
    if update is None:
        results = await engine.generate(requests)
    else:
        first = asyncio.ensure_future(engine.generate(requests[::2]))
        await update()
        parts = await asyncio.gather(first, engine.generate(requests[1::2]))
        lengths, results = [*lengths[::2], *lengths[1::2]], [each for part in parts for each in part]
    seconds = time.perf_counter() - start
    assert [len(result.response_ids) for result in results] == lengths, "every response must reach its limit"
    return sum(lengths) / seconds


def measure() -> Measurement:
    """Rates of the kinds of engines, measured alternately, and the median speed-up per workload."""
    raw = _measure_kinds("qwen2", SHAPE, KINDS)
    return raw, [
        at_least(f"generate: {name}, kernel over stock", raw["speedup"]["kernel"][name], TARGET_SPEEDUP)
        for name in ("128 requests", "128 requests, long tail")
    ]


def measure_moe() -> Measurement:
    """As `measure`, of a mixture of experts."""
    raw = _measure_kinds("qwen3_moe", SHAPE | MIXTURE, MIXTURE_KINDS)
    return raw, [
        at_least(f"generate: mixture, {name}, kernel over stock", speedup, TARGET_MIXTURE_SPEEDUP)
        for name, speedup in raw["speedup"]["kernel"].items()
        if name in ("128 requests", "128 requests, long tail")
    ]


def _measure_kinds(family: str, shape: dict[str, Any], kinds: tuple[str, ...]) -> dict[str, Any]:
    """Rates of one engine of each kind with one model; the first kind is the baseline of the speed-ups."""
    from roll.models.tiny import write_tiny_model

    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_tiny_model(Path(scratch), family, **shape)
        pipes = {kind: context.Pipe() for kind in kinds}
        processes = [context.Process(target=run_engine, args=(pipes[kind][1], kind, str(folder))) for kind in kinds]
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
            name: median([ours / stock for ours, stock in zip(rates[kind][name], rates[kinds[0]][name], strict=True)])
            for name in workloads()
        }
        for kind in kinds[1:]
    }
    medians = {kind: {name: median(values) for name, values in found.items()} for kind, found in rates.items()}
    return {
        "shape": shape,
        "tokens_per_second": rates,
        "median_tokens_per_second": medians,
        "speedup": speedups,
    }


def measure_alternately(engines: dict[str, Connection]) -> dict[str, dict[str, list[float]]]:
    """Tokens per second by kind and workload, one figure per repeat; stops the engines."""
    rates: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in workloads()} for kind in engines}
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
    main(measure, __doc__ or "", measure_lora, measure_moe)

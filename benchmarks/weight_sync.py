"""Bytes per second of a weight update from TP2 training to one engine, against a plain gloo broadcast.

    python -m benchmarks.weight_sync --json FILE [--lora] [--model moe]

The plain broadcast sends the same number of bytes between two other processes, after the engine and the training ranks
have stopped. The time of a weight update covers all of it: pause, begin, gather over tensor parallel ranks, transfer,
loading, cache flush and resume. Both transports are measured. The checks are on shared memory, which a run on one CPU
machine uses; `ratio.broadcast` is the gloo transport.

With `--lora`: an update of adapters of LORA_RANK against one of all weights, of a model of 0.5B parameters.
With `--model moe`: a mixture of experts from two ranks that share the experts.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import Measurement, at_least, at_most, main, median

TARGET_RATIO = 0.5
"""Required bandwidth, as a fraction of that of the plain broadcast."""
TARGET_TINY_S = 0.3
"""Most seconds of a weight update of the tiny model."""
REPEATS = 7
RUNNING, RUNNING_TOKENS, RUNNING_UPDATES, RUNNING_GAP_S = 128, 320, 5, 1.5
"""Requests that run during in-place weight updates, their tokens, the number of updates, and seconds between them."""
TARGET_PAUSE_RATIO = 2.0
"""Most seconds of the engines' pause, as a multiple of those of the plain broadcast."""
BUCKET_MB = 128
"""Splits the large model into two buckets, so that writing and loading overlap; the default needs one."""
TARGET_MIXTURE_RATIO, TARGET_MIXTURE_PAUSE = 0.7, 1.3
"""Required bandwidth of a mixture as a fraction of the plain broadcast, and most seconds of the engine's pause as a
multiple of those of the transfer."""
DEVICES = {"actor_train": [0, 1], "actor_infer": [2]}

LORA_RANK, LORA_REPEATS, TARGET_ADAPTERS = 32, 3, 0.05
"""Rank of the adapters, updates of each kind, and most seconds of adapters as a fraction of those of all weights."""
HALF_BILLION: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}
"""As Qwen2.5-0.5B."""

LARGE: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}
"""226 MB in fp32."""
MIXTURE: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "moe_intermediate_size": 64,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
"""Experts in 1,536 tensors of 201 MB."""
TINY: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32, "tie_word_embeddings": True}


def measure() -> Measurement:
    """Figures of both models with both transports."""
    large, tiny = _measure_model(LARGE), _measure_model(TINY)
    num_bytes = large["shared"][0]["bytes"]
    plain_seconds = _plain_broadcast(num_bytes)
    speed = {transport: num_bytes / _median(reports, "seconds") for transport, reports in large.items()}
    plain = num_bytes / median(plain_seconds)
    tiny_seconds = _median(tiny["shared"], "seconds")
    pause = _median(large["running"], "pause_seconds") / median(plain_seconds)
    raw = {
        "bucket_mb": BUCKET_MB,
        "large": {"shape": LARGE, **large},
        "tiny": {"shape": TINY, **tiny},
        "plain_broadcast_seconds": plain_seconds,
        "bytes": num_bytes,
        "bytes_per_second": {"plain": plain, **speed},
        "ratio": {transport: value / plain for transport, value in speed.items()},
        "pause_seconds": {
            "large": {transport: _median(reports, "pause_seconds") for transport, reports in large.items()},
            "tiny": {transport: _median(reports, "pause_seconds") for transport, reports in tiny.items()},
        },
    }
    return raw, [
        at_least("weight_sync: bytes of the large model", num_bytes, 200e6),
        at_least("weight_sync: bytes per second over a plain gloo broadcast", speed["shared"] / plain, TARGET_RATIO),
        at_most("weight_sync: pause with 128 running requests over a broadcast", pause, TARGET_PAUSE_RATIO),
        at_most("weight_sync: seconds of a weight update, tiny model", tiny_seconds, TARGET_TINY_S),
    ]


def measure_moe() -> Measurement:
    """Figures of a mixture of experts with both transports."""
    reports = _measure_model(MIXTURE, "qwen3_moe", expert_model_parallel_size=2)
    num_bytes = reports["shared"][0]["bytes"]
    plain = median(_plain_broadcast(num_bytes))
    ratio = {transport: plain / _median(found, "seconds") for transport, found in reports.items()}
    pause = median([each["pause_seconds"] / each["transfer_seconds"] for each in reports["shared"][1:]])
    raw = {"shape": MIXTURE, **reports, "bytes": num_bytes, "plain_broadcast_seconds": plain, "ratio": ratio}
    return raw, [
        at_least("weight_sync: bytes of the mixture", num_bytes, 200e6),
        at_least("weight_sync: mixture, bytes per second over a broadcast", ratio["shared"], TARGET_MIXTURE_RATIO),
        at_most("weight_sync: mixture, pause over transfer", pause, TARGET_MIXTURE_PAUSE),
    ]


def measure_lora() -> Measurement:
    """Reports of updates of adapters, and of all weights with them added, each to an engine of its own."""
    from roll.distributed.weights.adapters import AdapterSynchronizer
    from roll.distributed.weights.synchronizer import WeightSynchronizer

    reports: dict[str, list[dict[str, Any]]] = {}
    for name, kind in (("adapters", AdapterSynchronizer), ("weights", WeightSynchronizer)):
        way: Any = "adapter" if name == "adapters" else "merged"
        with tempfile.TemporaryDirectory() as root, _clusters(Path(root), HALF_BILLION, way) as (config, train, infer):
            reports[name] = asyncio.run(_repeat(kind(train, infer, config)))
    seconds = {name: median([each["seconds"] for each in found[1:]]) for name, found in reports.items()}
    raw = {"shape": HALF_BILLION, "rank": LORA_RANK, "reports": reports, "seconds": seconds}
    share, pause = seconds["adapters"] / seconds["weights"], max(each["pause_seconds"] for each in reports["adapters"])
    return raw, [
        at_most("weight_sync: seconds of adapters over those of all weights", share, TARGET_ADAPTERS),
        at_most("weight_sync: pause of an update of adapters, seconds", pause, 0.0),
    ]


async def _repeat(synchronizer: Any) -> list[dict[str, Any]]:
    """One update, and LORA_REPEATS more that send everything again."""
    await synchronizer.setup()
    reports = []
    for version in range(1 + LORA_REPEATS):
        synchronizer._complete.clear()
        reports.append(asdict(await synchronizer.update_weights(version)))
    return reports


def _median(reports: list[dict[str, Any]], key: str) -> float:
    """Median over the weight updates after the first, which is the only verified one."""
    return median([report[key] for report in reports if not report["verified"]])


def _measure_model(shape: dict[str, Any], family: str = "qwen2", **layout: int) -> dict[str, Any]:
    """Reports of `1 + REPEATS` weight updates of a random model of this shape, with each transport."""
    with (
        tempfile.TemporaryDirectory() as root,
        _clusters(Path(root), shape, family=family, **layout) as (config, train, infer),
    ):
        return asyncio.run(_update_weights(shape, config, train, infer))


async def _update_weights(shape: dict[str, Any], config: Any, train: Any, infer: Any) -> dict[str, Any]:
    from roll.distributed.weights.broadcast import BroadcastTransport
    from roll.distributed.weights.shared_memory import SharedMemoryTransport
    from roll.distributed.weights.synchronizer import WeightSynchronizer

    reports = {}
    for name, transport in (("broadcast", BroadcastTransport), ("shared", SharedMemoryTransport)):
        synchronizer = WeightSynchronizer(train, infer, config, transport)
        await synchronizer.setup()
        reports[name] = [asdict(await synchronizer.update_weights(version)) for version in range(1 + REPEATS)]
    if shape is LARGE:
        reports["running"] = await _update_while_running(config, train, infer)
    return reports


async def _update_while_running(config: Any, train: Any, infer: Any) -> list[dict[str, Any]]:
    """Reports of weight updates while requests run in place; all requests must finish with all of their tokens."""
    from roll.distributed.calls.remote_call import ALL
    from roll.distributed.infer.infer_worker import InferWorker
    from roll.distributed.weights.shared_memory import SharedMemoryTransport
    from roll.distributed.weights.synchronizer import WeightSynchronizer
    from roll.rollout.types import GenerateRequest, SamplingParams

    config.in_flight_policy = "in_place"
    synchronizer = WeightSynchronizer(train, infer, config, SharedMemoryTransport)
    await synchronizer.setup()
    sampling = SamplingParams(max_new_tokens=RUNNING_TOKENS)
    requests = [GenerateRequest(str(i), [5 + i] * 8, sampling, seed=i) for i in range(RUNNING)]
    answers = asyncio.ensure_future(_await(infer.call(ALL, InferWorker.generate, requests)))
    reports = []
    for version in range(1 + RUNNING_UPDATES):
        await asyncio.sleep(RUNNING_GAP_S)
        if answers.done():
            raise RuntimeError("the requests ended before the last weight update; increase RUNNING_TOKENS")
        reports.append(asdict(await synchronizer.update_weights(version)))
    (results,) = await answers
    lost = sum(len(result.response_ids) != RUNNING_TOKENS for result in results)
    if lost:
        raise RuntimeError(f"{lost} of {RUNNING} requests lack tokens")
    return reports


async def _await(call: Any) -> Any:
    return await call


@contextmanager
def _clusters(
    root: Path, shape: dict[str, Any], lora_update: Any = "", family: str = "qwen2", **layout: int
) -> Iterator[tuple[Any, Any, Any]]:
    """A training cluster with TP2 or this layout, of adapters with a `lora_update`, and one engine, on Ray."""
    from roll.configs.arguments import ModelArguments, TrainModelArguments
    from roll.configs.devices.megatron import MegatronTrainConfig
    from roll.configs.pipeline import RLVRConfig
    from roll.configs.roles import (
        ActorInferConfig,
        ActorTrainConfig,
        MegatronTrainArguments,
        SGLangArguments,
    )
    from roll.distributed.cluster import Cluster
    from roll.distributed.infer.infer_worker import InferWorker
    from roll.distributed.ray_session import start_ray, stop_ray
    from roll.distributed.resources import ResourceManager
    from roll.distributed.train.train_worker import TrainWorker
    from roll.models.tiny import write_tiny_model

    config = RLVRConfig(
        output_dir=str(root),
        pretrain=str(write_tiny_model(root / "model", family, **shape)),
        prompt_length=32,
        response_length=RUNNING_TOKENS,
        model_update_buffer_size_mb=BUCKET_MB,
    )
    lora: dict[str, Any] = {"lora_target": ["all-linear"], "lora_rank": LORA_RANK} if lora_update else {}
    sizes: dict[str, Any] = layout or {"tensor_model_parallel_size": 2}
    loaded = {} if lora_update == "adapter" else {"load_format": "dummy"}
    roles: dict[str, Any] = {
        "actor_train": ActorTrainConfig(
            model_args=TrainModelArguments(dtype="fp32", **lora),
            strategy_args=MegatronTrainArguments(strategy_config=MegatronTrainConfig(**sizes)),
            device_mapping=DEVICES["actor_train"],
        ),
        "actor_infer": ActorInferConfig(
            model_args=ModelArguments(dtype="fp32"),
            strategy_args=SGLangArguments(strategy_config=loaded),
            device_mapping=DEVICES["actor_infer"],
        ),
    }
    config.actor_train, config.actor_infer = roles["actor_train"], roles["actor_infer"]
    if lora_update:
        config.actor_train.lora_update = lora_update
    start_ray(config, "cpu", 3)
    resources = ResourceManager("cpu", 3, DEVICES)
    clusters = {
        role: Cluster(
            role, TrainWorker if role == "actor_train" else InferWorker, worker, config, resources, worker.layout
        )
        for role, worker in roles.items()
    }
    try:
        for call in [cluster.initialize() for cluster in clusters.values()]:
            call.get()
        yield config, clusters["actor_train"], clusters["actor_infer"]
    finally:
        for cluster in clusters.values():
            cluster.shutdown()
        stop_ray()


def _plain_broadcast(num_bytes: int) -> list[float]:
    """Seconds of each of `REPEATS` broadcasts of one tensor between two processes."""
    import torch.multiprocessing

    context = torch.multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = context.SimpleQueue()
    processes = [context.Process(target=_broadcast, args=(rank, port, num_bytes, results)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
        if process.exitcode != 0:
            raise RuntimeError(f"the plain broadcast failed with exit code {process.exitcode}")
    seconds: list[float] = results.get()
    return seconds


def _broadcast(rank: int, port: int, num_bytes: int, results: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    tensor = torch.zeros(num_bytes, dtype=torch.uint8)
    seconds = []
    for _ in range(1 + REPEATS):
        dist.barrier()
        start = time.perf_counter()
        dist.broadcast(tensor, src=0)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    if rank == 1:
        results.put(seconds[1:])
    dist.destroy_process_group()


if __name__ == "__main__":
    main(measure, __doc__ or "", measure_lora, measure_moe)

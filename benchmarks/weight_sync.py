"""Bytes per second of a publish, TP2 training to one engine, against a bare gloo broadcast of the same bytes.

The bare broadcast runs between two processes of its own after the engine and the training ranks have ended. A publish
counts whole: pause, session, gather over tensor parallel, transfer, loading, flush, resume. Both ways are measured; the
checks are on shared memory, which a run on one CPU machine takes, and `ratio.broadcast` is the gloo way.
Usage: python -m benchmarks.weight_sync --json FILE
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
"""Of the bandwidth of the bare broadcast."""
TARGET_TINY_S = 0.3
"""Seconds of a publish of the tiny model."""
REPEATS = 7
RUNNING, RUNNING_TOKENS, RUNNING_PUBLISHES, RUNNING_GAP_S = 128, 96, 5, 1.5
"""Requests that run during publishes in place, their tokens, and the publishes."""
TARGET_PAUSE_RATIO = 2.0
"""Seconds engines stand still, of the bare broadcast's."""
BUCKET_MB = 128
"""Two buckets of the large model, so that writing and loading overlap; the default holds it in one."""
DEVICES = {"actor_train": [0, 1], "actor_infer": [2]}

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
TINY: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32, "tie_word_embeddings": True}


def measure() -> Measurement:
    """The figures of both models by both ways, and the checks on the way that a run on this machine takes."""
    large, tiny = _published(LARGE), _published(TINY)
    num_bytes = large["shared"][0]["bytes"]
    bare_seconds = _bare_broadcast(num_bytes)
    speed = {way: num_bytes / _median(reports, "seconds") for way, reports in large.items()}
    bare = num_bytes / median(bare_seconds)
    pause = _median(large["running"], "pause_seconds") / median(bare_seconds)
    raw = {
        "bucket_mb": BUCKET_MB,
        "large": {"shape": LARGE, **large},
        "tiny": {"shape": TINY, **tiny},
        "bare_broadcast_seconds": bare_seconds,
        "bytes": num_bytes,
        "bytes_per_second": {"bare": bare, **speed},
        "ratio": {way: value / bare for way, value in speed.items()},
        "pause_seconds": {
            "large": {way: _median(reports, "pause_seconds") for way, reports in large.items()},
            "tiny": {way: _median(reports, "pause_seconds") for way, reports in tiny.items()},
        },
    }
    return raw, [
        at_least("weight_sync: bytes of the large model", num_bytes, 200e6),
        at_least("weight_sync: publish / bare gloo broadcast, bytes per second", speed["shared"] / bare, TARGET_RATIO),
        at_most("weight_sync: pause under 128 running requests / bare broadcast", pause, TARGET_PAUSE_RATIO),
        at_most("weight_sync: seconds to publish the tiny model", _median(tiny["shared"], "seconds"), TARGET_TINY_S),
    ]


def _median(reports: list[dict[str, Any]], key: str) -> float:
    """Of the publishes after the first, which alone is verified."""
    return median([report[key] for report in reports if not report["verified"]])


def _published(shape: dict[str, Any]) -> dict[str, Any]:
    """Reports of `1 + REPEATS` publishes of a random model of this shape by each way."""
    with tempfile.TemporaryDirectory() as root, _clusters(Path(root), shape) as (config, train, infer):
        return asyncio.run(_publish(shape, config, train, infer))


async def _publish(shape: dict[str, Any], config: Any, train: Any, infer: Any) -> dict[str, Any]:
    from roll.distributed.weight_sync.publisher import BroadcastTransport, SharedTransport, WeightPublisher

    reports = {}
    for name, way in (("broadcast", BroadcastTransport), ("shared", SharedTransport)):
        publisher = WeightPublisher(train, infer, config, way)
        await publisher.setup()
        reports[name] = [asdict(await publisher.publish(version)) for version in range(1 + REPEATS)]
    if shape is LARGE:
        reports["running"] = await _publish_while_running(config, train, infer)
    return reports


async def _publish_while_running(config: Any, train: Any, infer: Any) -> list[dict[str, Any]]:
    """Reports of publishes under requests that go on in place; all of them must come back whole."""
    from roll.distributed.weight_sync.publisher import SharedTransport, WeightPublisher
    from roll.rollout.types import GenerateRequest, SamplingParams

    config.in_flight_policy = "in_place"
    publisher = WeightPublisher(train, infer, config, SharedTransport)
    await publisher.setup()
    sampling = SamplingParams(max_new_tokens=RUNNING_TOKENS)
    requests = [GenerateRequest(str(i), [5 + i] * 8, sampling, seed=i) for i in range(RUNNING)]
    answers = asyncio.ensure_future(_waited(infer.generate([requests])))
    reports = []
    for version in range(1 + RUNNING_PUBLISHES):
        await asyncio.sleep(RUNNING_GAP_S)
        if answers.done():
            raise RuntimeError("the requests ended before the last publish; let them draw more tokens")
        reports.append(asdict(await publisher.publish(version)))
    (results,) = await answers
    lost = sum(len(result.response_ids) != RUNNING_TOKENS for result in results)
    if lost:
        raise RuntimeError(f"{lost} of {RUNNING} requests did not come back whole")
    return reports


async def _waited(pending: Any) -> Any:
    return await pending


@contextmanager
def _clusters(root: Path, shape: dict[str, Any]) -> Iterator[tuple[Any, Any, Any]]:
    """TP2 training ranks and one engine on Ray."""
    from roll.configs.pipeline import RLVRConfig
    from roll.configs.roles import (
        ActorInferConfig,
        ActorTrainConfig,
        MegatronTrainArguments,
        MegatronTrainConfig,
        ModelArguments,
        RoleConfig,
        SGLangArguments,
        TrainModelArguments,
    )
    from roll.distributed.cluster import Cluster
    from roll.distributed.infer_worker import InferWorker
    from roll.distributed.resources import ResourceManager, start_ray, stop_ray
    from roll.distributed.train_worker import TrainWorker
    from roll.models.tiny import write_tiny_model

    config = RLVRConfig(
        output_dir=str(root),
        pretrain=str(write_tiny_model(root / "model", "qwen2", **shape)),
        prompt_length=32,
        response_length=RUNNING_TOKENS,
        model_update_buffer_size_mb=BUCKET_MB,
    )
    roles: dict[str, RoleConfig] = {
        "actor_train": ActorTrainConfig(
            model_args=TrainModelArguments(dtype="fp32"),
            strategy_args=MegatronTrainArguments(strategy_config=MegatronTrainConfig(tensor_model_parallel_size=2)),
            device_mapping=DEVICES["actor_train"],
        ),
        "actor_infer": ActorInferConfig(
            model_args=ModelArguments(dtype="fp32"),
            strategy_args=SGLangArguments(strategy_config={"load_format": "dummy"}),
            device_mapping=DEVICES["actor_infer"],
        ),
    }
    start_ray(config, "cpu", 3)
    resources = ResourceManager("cpu", 3, DEVICES)
    clusters = {
        role: Cluster(
            role, TrainWorker if role == "actor_train" else InferWorker, worker, config, resources, worker.layout
        )
        for role, worker in roles.items()
    }
    try:
        for pending in [cluster.initialize() for cluster in clusters.values()]:
            pending.get()
        yield config, clusters["actor_train"], clusters["actor_infer"]
    finally:
        for cluster in clusters.values():
            cluster.shutdown()
        stop_ray()


def _bare_broadcast(num_bytes: int) -> list[float]:
    """Seconds of each of `REPEATS` broadcasts of one tensor between two processes."""
    import torch.multiprocessing

    context = torch.multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answers = context.SimpleQueue()
    processes = [context.Process(target=_broadcast, args=(rank, port, num_bytes, answers)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
        if process.exitcode != 0:
            raise RuntimeError(f"the bare broadcast ended with code {process.exitcode}")
    return answers.get()


def _broadcast(rank: int, port: int, num_bytes: int, answers: Any) -> None:
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
        answers.put(seconds[1:])
    dist.destroy_process_group()


if __name__ == "__main__":
    main(measure, __doc__ or "")

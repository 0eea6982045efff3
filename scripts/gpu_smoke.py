"""Smoke test of this machine: trains, updates weights and generates with a small model on one device.

    scripts/gpu_check.sh gpu_smoke                      (one GPU, bf16)
    scripts/gpu_check.sh gpu_smoke --platform cpu       (the same on a CPU, fp32)

Megatron and SGLang take turns on device 0. The reference is the same model in plain torch on the CPU in fp32.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from roll.configs.arguments import ModelArguments, TrainingArguments, TrainModelArguments
from roll.configs.defaults import fill_in_defaults
from roll.configs.devices.megatron import MegatronTrainConfig
from roll.configs.pipeline import RLVRConfig
from roll.configs.roles import ActorInferConfig, ActorTrainConfig, MegatronTrainArguments, SGLangArguments
from roll.datasets.batch import Batch
from roll.datasets.collate import collate_samples
from roll.distributed.calls.remote_call import ALL
from roll.distributed.cluster import Cluster
from roll.distributed.infer.infer_worker import InferWorker
from roll.distributed.train.train_worker import TrainWorker
from roll.distributed.weights.synchronizer import WeightSynchronizer
from roll.pipeline.learning.shards import cluster_log_probs, training_plans, training_shards
from roll.pipeline.session import Session
from roll.rollout.types import GenerateRequest, SamplingParams
from scripts.gpu_table import LOSS_BOUNDS, Dtype, GpuTable, Platform, add_dtype, make_parser
from scripts.reference_model import LEARNING_RATE, Reference, largest_relative_difference, write_random_model

SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
"""Sizes that all attention kernels support, small enough for a CPU reference."""

SHAPES = {"cuda": SHAPE, "cpu": SHAPE | {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}}
"""By platform; on a CPU all computation takes as long as that of the reference."""

SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS, STEPS = 16, 32, 64, 6
TEMPERATURE = 0.7


def configuration(
    platform: Platform, dtype: Dtype, folder: Path, trained: list[int], engine: list[int], **options: Any
) -> RLVRConfig:
    """One tensor-parallel trainer and one such engine on these devices; two micro-batches per step.

    Weights are verified at every update. `options` are keys of the configuration.
    """
    sglang = {"load_format": "dummy"} | ({"mem_fraction_static": 0.4} if platform == "cuda" else {})
    config = RLVRConfig(
        platform=platform,
        num_devices_per_node=len({*trained, *engine}),
        verify_weights="always",
        is_offload_states=trained == engine,
        rollout_batch_size=SAMPLES,
        prompt_length=PROMPT_TOKENS,
        response_length=RESPONSE_TOKENS,
        max_steps=STEPS,
        actor_train=ActorTrainConfig(
            model_args=TrainModelArguments(dtype=dtype),
            training_args=TrainingArguments(
                learning_rate=LEARNING_RATE, per_device_train_batch_size=SAMPLES // 2, gradient_accumulation_steps=2
            ),
            strategy_args=MegatronTrainArguments(
                strategy_config=MegatronTrainConfig(tensor_model_parallel_size=len(trained))
            ),
            device_mapping=trained,
        ),
        actor_infer=ActorInferConfig(
            model_args=ModelArguments(dtype=dtype),
            strategy_args=SGLangArguments(strategy_config=sglang),
            device_mapping=engine,
            num_gpus_per_worker=len(engine),
            max_running_requests=SAMPLES,
        ),
        **{"pretrain": str(folder / "model"), "output_dir": str(folder / "run")} | options,
    )
    problems = fill_in_defaults(config)
    if problems:
        raise ValueError("; ".join(map(str, problems)))
    return config


async def generate(engine: Cluster[InferWorker], round_number: int) -> tuple[Batch, float]:
    """Generates for fixed prompts; returns the samples and response tokens per second."""
    generator = torch.Generator().manual_seed(round_number)
    prompts = torch.randint(3, SHAPE["vocab_size"], (SAMPLES, PROMPT_TOKENS), generator=generator).tolist()
    sampling = SamplingParams(RESPONSE_TOKENS, TEMPERATURE)
    requests = [
        GenerateRequest(f"{round_number}-{index}", prompt, sampling, seed=index) for index, prompt in enumerate(prompts)
    ]
    start = time.perf_counter()
    [results] = await engine.call(ALL, InferWorker.generate, requests)
    seconds = time.perf_counter() - start
    failed = [result.error for result in results if result.error]
    if failed:
        raise RuntimeError(f"{len(failed)} of {SAMPLES} requests failed: {failed[0]}")
    samples = [(p, r.response_ids, r.log_probs, r.versions) for p, r in zip(prompts, results, strict=True)]
    data = Batch(collate_samples(samples))
    return data, sum(len(r.response_ids) for r in results) / seconds


async def compare(
    table: GpuTable, when: str, actor: Cluster[TrainWorker], data: Batch, config: RLVRConfig, reference: Reference
) -> torch.Tensor:
    """Compares log-probs of generated samples in the trainer, the reference and the engine; returns the trainer's."""
    mask = data.batch["response_mask"]
    megatron = (await cluster_log_probs(actor, data, config.actor_train, TEMPERATURE)).batch["log_probs"]
    with torch.no_grad():
        expected = reference.log_probs(data, TEMPERATURE)
    table.add_log_probs(f"{when}: Megatron against CPU fp32", megatron, expected, mask, config)
    behavior = data.batch["behavior_log_probs"]
    table.add_log_probs(f"{when}: SGLang against Megatron", behavior, megatron, mask, config)
    return megatron


async def train(
    table: GpuTable, actor: Cluster[TrainWorker], config: RLVRConfig, data: Batch, reference: Reference
) -> None:
    """Trains both models for STEPS steps; the speed is that of the steps after the first."""
    losses, seconds = [], []
    for _ in range(STEPS):
        start = time.perf_counter()
        losses.append(await train_step(actor, config, data))
        seconds.append(time.perf_counter() - start)
    difference = largest_relative_difference(losses, [reference.train_step(data) for _ in range(STEPS)])
    bound = LOSS_BOUNDS[config.actor_train.model_args.dtype]
    table.add(f"loss of {STEPS} steps against CPU fp32, relative", difference, "", bound)
    tokens = int(data.batch["attention_mask"].sum()) * (STEPS - 1)
    table.add("training", tokens / sum(seconds[1:]), "tokens/s")


async def train_step(actor: Cluster[TrainWorker], config: RLVRConfig, data: Batch) -> float:
    """One optimizer step on the responses of `data`; returns the loss before it."""
    (plan,) = training_plans(data, config.actor_train, actor.platform)
    shards = training_shards(data, plan, {"temperature": 1.0, "loss": "sft", "loss_config": None})
    return (await actor.call_shards(TrainWorker.train_step, shards))[0]["loss"]


async def smoke(table: GpuTable, platform: Platform, dtype: Dtype, folder: Path) -> None:
    """All checks: update weights, generate, compare, train, update weights again, generate and compare again."""
    model = write_random_model(folder / "model", SHAPES[platform], dtype)
    config, reference = configuration(platform, dtype, folder, [0], [0]), Reference(model)
    async with Session(config) as session:
        await session.ready()
        actor, engine = session.train_clusters["actor_train"], session.infer_clusters["actor_infer"]
        devices = session.shared_devices
        assert devices is not None
        synchronizer = WeightSynchronizer(actor, engine, config, devices=devices)
        await synchronizer.setup()
        for version in (0, 1):
            when = f"version {version}"
            report = await synchronizer.update_weights(version)
            table.add(f"{when}: weight update of {report.bytes / 1e6:.0f} MB, verified", report.seconds, "s")
            data, rate = await generate(engine, version)
            table.add(f"{when}: generation", rate, "tokens/s")
            start = time.perf_counter()
            await devices.to_trainer()
            table.add(f"{when}: device handed to the trainer", time.perf_counter() - start, "s")
            await compare(table, when, actor, data, config, reference)
            if version == 0:
                await train(table, actor, config, data, reference)
        memory = (await actor.call(ALL, TrainWorker.memory))[0]
        table.add("peak memory of the training process", memory["peak"] / 1e6, "MB")


def main() -> int:
    parser = make_parser(__doc__)
    add_dtype(parser)
    arguments = parser.parse_args()
    dtype: Dtype = arguments.dtype or ("bf16" if arguments.platform == "cuda" else "fp32")
    table = GpuTable()
    with tempfile.TemporaryDirectory(prefix="roll_smoke_") as folder, table.check("smoke test"):
        asyncio.run(smoke(table, arguments.platform, dtype, Path(folder)))
    return table.show(arguments.platform)


if __name__ == "__main__":
    sys.exit(main())

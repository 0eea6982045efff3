"""Smoke test of this machine: trains, updates weights and generates with a small model on one device.

    scripts/gpu_smoke.sh                      (one GPU, bf16)
    scripts/gpu_smoke.sh --platform cpu       (the same on a CPU, fp32)

Megatron and SGLang take turns on device 0. The reference is the same model in transformers on the CPU in fp32.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from roll.configs.pipeline import RLVRConfig
from roll.configs.roles import (
    ActorInferConfig,
    ActorTrainConfig,
    ModelArguments,
    SGLangArguments,
    TrainingArguments,
    TrainModelArguments,
)
from roll.datasets.collate import collate_samples
from roll.distributed.cluster import Cluster
from roll.distributed.infer_worker import InferWorker
from roll.distributed.protocol import DataProto
from roll.distributed.train_worker import TrainWorker
from roll.distributed.weight_sync.synchronizer import WeightSynchronizer
from roll.models.tiny import write_tiny_model
from roll.pipeline.learner import cluster_log_probs, training_plans, training_shards
from roll.pipeline.session import Session
from roll.platforms import detect
from roll.rollout.types import GenerateRequest, SamplingParams

SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.02,
}
"""Sizes that all attention kernels support, small enough for a CPU reference."""

Platform = Literal["cpu", "cuda"]
Dtype = Literal["fp32", "bf16"]

SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS, STEPS = 16, 32, 64, 6
LEARNING_RATE = 1e-4
TEMPERATURE = 0.7

BOUNDS: dict[Dtype, dict[str, float]] = {
    "fp32": {"log_prob_mean": 1e-5, "log_prob_max": 1e-4, "loss": 1e-4},
    "bf16": {"log_prob_mean": 2e-2, "log_prob_max": 0.5, "loss": 2e-2},
}
"""Largest allowed differences: in nats for log-probs, relative for the loss of a training step."""


@dataclass
class Row:
    """One row of the table; `bound` is None for a figure without a check."""

    name: str
    value: float
    unit: str
    bound: float | None = None

    @property
    def ok(self) -> bool:
        return self.bound is None or self.value <= self.bound


def configuration(platform: Platform, dtype: Dtype, folder: Path) -> RLVRConfig:
    """Both roles on device 0, two micro-batches per step, weights verified at every update."""
    engine = {"load_format": "dummy"} | ({"mem_fraction_static": 0.4} if platform == "cuda" else {})
    return RLVRConfig(
        exp_name="gpu_smoke",
        platform=platform,
        num_devices_per_node=1,
        output_dir=str(folder / "run"),
        pretrain=str(folder / "model"),
        verify_weights="always",
        is_offload_states=True,
        rollout_batch_size=SAMPLES,
        prompt_length=PROMPT_TOKENS,
        response_length=RESPONSE_TOKENS,
        max_steps=STEPS,
        actor_train=ActorTrainConfig(
            model_args=TrainModelArguments(dtype=dtype),
            training_args=TrainingArguments(
                learning_rate=LEARNING_RATE, per_device_train_batch_size=SAMPLES // 2, gradient_accumulation_steps=2
            ),
            device_mapping=[0],
        ),
        actor_infer=ActorInferConfig(
            model_args=ModelArguments(dtype=dtype),
            strategy_args=SGLangArguments(strategy_config=engine),
            device_mapping=[0],
            max_running_requests=SAMPLES,
        ),
    )


class Reference:
    """The same model in transformers on the CPU in fp32, trained with torch's AdamW."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)

    def log_probs(self, data: DataProto, temperature: float) -> torch.Tensor:
        """Log-probs [B, T]; index t is the log-prob of token t, 0 at t = 0."""
        logits = self._model(data.batch["input_ids"], attention_mask=data.batch["attention_mask"]).logits[:, :-1]
        chosen = torch.log_softmax(logits / temperature, -1).gather(-1, data.batch["input_ids"][:, 1:, None])
        return torch.nn.functional.pad(chosen[..., 0], (1, 0))

    def train_step(self, data: DataProto) -> float:
        """One optimizer step on the responses of `data`; returns the loss before it."""
        mask = data.batch["response_mask"]
        loss = -(self.log_probs(data, 1.0) * mask).sum() / mask.sum()
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        return float(loss.item())


async def generate(engine: Cluster[InferWorker], round_number: int) -> tuple[DataProto, float]:
    """Generates for fixed prompts; returns the samples and response tokens per second."""
    generator = torch.Generator().manual_seed(round_number)
    prompts = torch.randint(3, SHAPE["vocab_size"], (SAMPLES, PROMPT_TOKENS), generator=generator).tolist()
    sampling = SamplingParams(RESPONSE_TOKENS, TEMPERATURE)
    requests = [
        GenerateRequest(f"{round_number}-{index}", prompt, sampling, seed=index) for index, prompt in enumerate(prompts)
    ]
    start = time.perf_counter()
    [results] = await engine.call_each(InferWorker.generate, [requests])
    seconds = time.perf_counter() - start
    failed = [result.error for result in results if result.error]
    if failed:
        raise RuntimeError(f"{len(failed)} of {SAMPLES} requests failed: {failed[0]}")
    samples = [(p, r.response_ids, r.log_probs, r.versions) for p, r in zip(prompts, results, strict=True)]
    return DataProto.from_dict(collate_samples(samples)), sum(len(r.response_ids) for r in results) / seconds


async def train(
    actor: Cluster[TrainWorker], config: RLVRConfig, data: DataProto, reference: Reference
) -> tuple[float, float]:
    """Trains both models for STEPS steps.

    Returns:
        Largest relative difference of the losses, and tokens per second of the steps after the first.
    """
    data.meta_info |= {"temperature": 1.0, "loss": "sft", "loss_config": None}
    (plan,) = training_plans(data, config, actor.layout)
    losses, seconds = [], []
    for _ in range(STEPS):
        start = time.perf_counter()
        shards = training_shards(data, plan)
        losses.append((await actor.call_shards(TrainWorker.train_step, shards))[0]["loss"])
        seconds.append(time.perf_counter() - start)
    expected = [reference.train_step(data) for _ in range(STEPS)]
    worst = max(abs(loss - right) / abs(right) for loss, right in zip(losses, expected, strict=True))
    return worst, int(data.batch["attention_mask"].sum()) * (STEPS - 1) / sum(seconds[1:])


def compare_log_probs(
    name: str, first: torch.Tensor, second: torch.Tensor, mask: torch.Tensor, bounds: dict[str, float]
) -> list[Row]:
    """Mean and largest difference of log-probs over the response tokens."""
    gap = (first - second).abs()[mask]
    return [
        Row(f"{name}, mean", gap.mean().item(), "nats", bounds["log_prob_mean"]),
        Row(f"{name}, largest", gap.max().item(), "nats", bounds["log_prob_max"]),
    ]


async def smoke(platform: Platform, dtype: Dtype, folder: Path) -> list[Row]:
    """All checks: update weights, generate, compare, train, update weights again, generate and compare again."""
    write_tiny_model(folder / "model", "qwen2", dtype={"fp32": "float32", "bf16": "bfloat16"}[dtype], **SHAPE)
    config, bounds, rows = configuration(platform, dtype, folder), BOUNDS[dtype], []
    reference = Reference(folder / "model")
    async with Session(config) as session:
        await session.ready()
        actor, engine = session.train_clusters["actor_train"], session.infer_clusters["actor_infer"]
        devices = session.shared_devices
        assert devices is not None
        synchronizer = WeightSynchronizer(actor, engine, config, devices=devices)
        await synchronizer.setup()
        for version in (0, 1):
            report = await synchronizer.update_weights(version)
            data, rate = await generate(engine, version)
            data.meta_info["temperature"] = TEMPERATURE
            mask = data.batch["response_mask"]
            start = time.perf_counter()
            await devices.to_trainer()
            handed_over = time.perf_counter() - start
            megatron = (await cluster_log_probs(actor, data, config.actor_train)).batch["log_probs"]
            with torch.no_grad():
                expected = reference.log_probs(data, TEMPERATURE)
            when = f"version {version}"
            rows += compare_log_probs(f"{when}: Megatron against CPU fp32", megatron, expected, mask, bounds)
            rows += compare_log_probs(
                f"{when}: SGLang against Megatron", data.batch["behavior_log_probs"], megatron, mask, bounds
            )
            rows.append(Row(f"{when}: weight update of {report.bytes / 1e6:.0f} MB, verified", report.seconds, "s"))
            rows.append(Row(f"{when}: generation", rate, "tokens/s"))
            rows.append(Row(f"{when}: device handed to the trainer", handed_over, "s"))
            if version == 0:
                worst, rate = await train(actor, config, data, reference)
                rows.append(Row(f"loss of {STEPS} steps against CPU fp32, relative", worst, "", bounds["loss"]))
                rows.append(Row("training", rate, "tokens/s"))
        memory = (await actor.call_all(TrainWorker.memory))[0]
        rows.append(Row("peak memory of the training process", memory["peak"] / 1e6, "MB"))
    return rows


def main() -> int:
    """Returns exit code 0 if all figures are within their bounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=tuple(BOUNDS), help="default: bf16 on cuda, fp32 on cpu")
    arguments = parser.parse_args()
    if arguments.platform == "cuda" and detect() != "cuda":
        parser.error("torch finds no GPU; check `nvidia-smi`, or use --platform cpu")
    dtype: Dtype = arguments.dtype or ("bf16" if arguments.platform == "cuda" else "fp32")
    device = torch.cuda.get_device_name() if arguments.platform == "cuda" else "CPU"
    with tempfile.TemporaryDirectory(prefix="roll_smoke_") as folder:
        rows = asyncio.run(smoke(arguments.platform, dtype, Path(folder)))
    table = Table(title=f"{device}, {dtype}, torch {torch.__version__}", title_justify="left")
    for header in ("check", "value", "bound", ""):
        table.add_column(header, justify="right" if header in ("value", "bound") else "left")
    for row in rows:
        bound, result = ("", "") if row.bound is None else (f"{row.bound:g}", "ok" if row.ok else "MISSED")
        table.add_row(row.name, f"{row.value:.4g} {row.unit}".strip(), bound, result)
    Console().print(table)
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

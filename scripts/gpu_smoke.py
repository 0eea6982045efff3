"""Does the whole chain hold on this machine? Trains, publishes and generates with a small model on one device.

    scripts/gpu_smoke.sh                      (one GPU, bf16)
    scripts/gpu_smoke.sh --platform cpu       (the same on a CPU, fp32)

Megatron and SGLang share device 0. A model of transformers on the CPU in fp32 says what is right.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

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
from roll.distributed.protocol import DataProto
from roll.distributed.weight_sync.publisher import WeightPublisher
from roll.models.tiny import write_tiny_model
from roll.pipeline.session import Session
from roll.pipeline.sharding import cluster_log_probs, training_plans, training_shards
from roll.platforms import detect
from roll.rollout.types import GenerateRequest, SamplingParams

SHAPE = {
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
"""Sizes that every attention kernel takes, small enough for a CPU reference."""

SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS, STEPS = 16, 32, 64, 6
LEARNING_RATE = 1e-4
TEMPERATURE = 0.7

BOUNDS = {
    "fp32": {"log_prob_mean": 1e-5, "log_prob_max": 1e-4, "loss": 1e-4},
    "bf16": {"log_prob_mean": 2e-2, "log_prob_max": 0.5, "loss": 2e-2},
}
"""Largest difference tolerated: in nats for log-probs, relative for the loss of a training step."""


@dataclass
class Row:
    """One line of the table; `bound` is None for a figure that is only reported."""

    name: str
    value: float
    unit: str
    bound: float | None = None

    @property
    def ok(self) -> bool:
        """Whether the figure is within its bound."""
        return self.bound is None or self.value <= self.bound


def configuration(platform: str, dtype: str, folder: Path) -> RLVRConfig:
    """Both roles on device 0, two micro-batches a step, weights verified at every publish."""
    engine = {"load_format": "dummy"} | ({"mem_fraction_static": 0.4} if platform == "cuda" else {})
    return RLVRConfig(
        exp_name="gpu_smoke",
        platform=platform,
        num_devices_per_node=1,
        output_dir=str(folder / "run"),
        pretrain=str(folder / "model"),
        verify_weights="always",
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
    """The same model in transformers on the CPU in fp32, trained by torch's AdamW."""

    def __init__(self, folder: Path) -> None:
        """Loads the weights both sides start from."""
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)

    def log_probs(self, data: DataProto, temperature: float) -> torch.Tensor:
        """[B, T], index t holding token t, 0 at t = 0."""
        logits = self._model(data.batch["input_ids"], attention_mask=data.batch["attention_mask"]).logits[:, :-1]
        chosen = torch.log_softmax(logits / temperature, -1).gather(-1, data.batch["input_ids"][:, 1:, None])
        return torch.nn.functional.pad(chosen[..., 0], (1, 0))

    def train_step(self, data: DataProto) -> float:
        """Loss of one step on the responses of `data`."""
        mask = data.batch["response_mask"]
        loss = -(self.log_probs(data, 1.0) * mask).sum() / mask.sum()
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        return loss.item()


async def generate(engine: Cluster, round_number: int) -> tuple[DataProto, float]:
    """Samples for fixed prompts, and response tokens per second."""
    generator = torch.Generator().manual_seed(round_number)
    prompts = torch.randint(3, SHAPE["vocab_size"], (SAMPLES, PROMPT_TOKENS), generator=generator).tolist()
    sampling = SamplingParams(RESPONSE_TOKENS, TEMPERATURE)
    requests = [
        GenerateRequest(f"{round_number}-{index}", prompt, sampling, seed=index) for index, prompt in enumerate(prompts)
    ]
    start = time.perf_counter()
    [results] = await engine.generate([requests])
    seconds = time.perf_counter() - start
    failed = [result.error for result in results if result.error]
    if failed:
        raise RuntimeError(f"{len(failed)} of {SAMPLES} requests failed: {failed[0]}")
    samples = [(p, r.response_ids, r.log_probs, r.versions) for p, r in zip(prompts, results, strict=True)]
    return DataProto.from_dict(collate_samples(samples)), sum(len(r.response_ids) for r in results) / seconds


async def train(actor: Cluster, config: RLVRConfig, data: DataProto, reference: Reference) -> tuple[float, float]:
    """Largest relative difference of a step's loss, and tokens per second of the steps after the first."""
    data.meta_info |= {"temperature": 1.0, "loss": "sft", "loss_config": None}
    (plan,) = training_plans(data, config.actor_train, actor.layout)
    losses, seconds = [], []
    for _ in range(STEPS):
        start = time.perf_counter()
        losses.append((await actor.train_step(training_shards(data, plan)))[0]["loss"])
        seconds.append(time.perf_counter() - start)
    wanted = [reference.train_step(data) for _ in range(STEPS)]
    worst = max(abs(loss - want) / abs(want) for loss, want in zip(losses, wanted, strict=True))
    return worst, int(data.batch["attention_mask"].sum()) * (STEPS - 1) / sum(seconds[1:])


def difference(name: str, ours: torch.Tensor, theirs: torch.Tensor, mask: torch.Tensor, bounds: dict) -> list[Row]:
    """Mean and largest difference of log-probs over the response tokens."""
    gap = (ours - theirs).abs()[mask]
    return [
        Row(f"{name}, mean", gap.mean().item(), "nats", bounds["log_prob_mean"]),
        Row(f"{name}, largest", gap.max().item(), "nats", bounds["log_prob_max"]),
    ]


async def smoke(platform: str, dtype: str, folder: Path) -> list[Row]:
    """Every check, in the order of a run: publish, generate, compare, train, publish again, compare again."""
    write_tiny_model(folder / "model", "qwen2", dtype={"fp32": "float32", "bf16": "bfloat16"}[dtype], **SHAPE)
    config, bounds, rows = configuration(platform, dtype, folder), BOUNDS[dtype], []
    reference = Reference(folder / "model")
    async with Session(config) as session:
        await session.ready()
        actor, engine = session.clusters["actor_train"], session.clusters["actor_infer"]
        publisher = WeightPublisher(actor, engine, config)
        await publisher.setup()
        for version in (0, 1):
            report = await publisher.publish(version)
            data, rate = await generate(engine, version)
            data.meta_info["temperature"] = TEMPERATURE
            mask = data.batch["response_mask"]
            ours = (await cluster_log_probs(actor, data, config.actor_train)).batch["log_probs"]
            with torch.no_grad():
                right = reference.log_probs(data, TEMPERATURE)
            when = f"version {version}"
            rows += difference(f"{when}: Megatron against CPU fp32", ours, right, mask, bounds)
            rows += difference(f"{when}: SGLang against Megatron", data.batch["behavior_log_probs"], ours, mask, bounds)
            rows.append(Row(f"{when}: publishing {report.bytes / 1e6:.0f} MB, verified", report.seconds, "s"))
            rows.append(Row(f"{when}: generation", rate, "tokens/s"))
            if version == 0:
                worst, rate = await train(actor, config, data, reference)
                rows.append(Row(f"loss of {STEPS} steps against CPU fp32, relative", worst, "", bounds["loss"]))
                rows.append(Row("training", rate, "tokens/s"))
        memory = (await actor.memory())[0]
        rows.append(Row("memory of the training process, peak", memory["peak"] / 1e6, "MB"))
    return rows


def main() -> int:
    """Exit code 0 when every figure is within its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=tuple(BOUNDS), help="default: bf16 on cuda, fp32 on cpu")
    arguments = parser.parse_args()
    if arguments.platform == "cuda" and detect() != "cuda":
        parser.error("torch sees no GPU here; run `nvidia-smi`, or try the chain with --platform cpu")
    dtype = arguments.dtype or {"cuda": "bf16", "cpu": "fp32"}[arguments.platform]
    device = torch.cuda.get_device_name() if arguments.platform == "cuda" else "CPU"
    with tempfile.TemporaryDirectory(prefix="roll_smoke_") as folder:
        rows = asyncio.run(smoke(arguments.platform, dtype, Path(folder)))
    table = Table(title=f"{device}, {dtype}, torch {torch.__version__}", title_justify="left")
    for header in ("check", "value", "bound", ""):
        table.add_column(header, justify="right" if header in ("value", "bound") else "left")
    for row in rows:
        bound, verdict = ("", "") if row.bound is None else (f"{row.bound:g}", "ok" if row.ok else "MISSED")
        table.add_row(row.name, f"{row.value:.4g} {row.unit}".strip(), bound, verdict)
    Console().print(table)
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

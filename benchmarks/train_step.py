"""Tokens per second of one optimizer step: Megatron on one rank against transformers with torch's AdamW.

    python -m benchmarks.train_step --json FILE

Both run the same model, batch and micro-batches with the same threads, alternately in one process; then Megatron runs
on two ranks.
"""

from __future__ import annotations

import os
import pickle
import socket
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import Measurement, at_least, main, median
from roll.configs.parallel_layout import ParallelLayout

TARGET_RATIO = 0.9
"""Required tokens per second, as a fraction of those of transformers."""

SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.02,
}


@dataclass(frozen=True)
class Work:
    """One optimizer step, repeated: `samples` of `length` tokens in micro-batches of `micro_batch`."""

    samples: int = 16
    micro_batch: int = 4
    length: int = 256
    repeats: int = 7
    learning_rate: float = 1e-4

    @property
    def tokens(self) -> int:
        return self.samples * self.length


LAYOUTS = {"tp2": ParallelLayout(tensor=2), "pp2": ParallelLayout(pipeline=2), "dp2": ParallelLayout(data=2)}


def measure(work: Work | None = None) -> Measurement:
    """Tokens per second of both, and of Megatron on two ranks."""
    work = work or Work()
    from roll.models.tiny import write_tiny_model

    with tempfile.TemporaryDirectory() as root:
        folder = write_tiny_model(Path(root) / "model", "qwen2", **SHAPE)
        one = _spawn(ParallelLayout(), _compare, folder, work)
        two = {name: _spawn(layout, _megatron_alone, folder, work) for name, layout in LAYOUTS.items()}
    speed = {name: work.tokens / median(seconds) for name, seconds in one.items()}
    ratio = speed["megatron"] / speed["transformers"]
    raw = {
        "shape": SHAPE,
        "work": asdict(work),
        "threads_per_rank": 1,
        "seconds": {**one, **two},
        "tokens_per_second": {**speed, **{name: work.tokens / median(seconds) for name, seconds in two.items()}},
        "ratio": ratio,
    }
    return raw, [at_least("train_step: megatron / transformers, one rank", ratio, TARGET_RATIO)]


def _compare(layout: ParallelLayout, rank: int, folder: Path, work: Work) -> dict[str, list[float]]:
    steps = {"transformers": _transformers_step(folder, work), "megatron": _megatron_step(layout, rank, folder, work)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses = {name: step() for name, step in steps.items()}
    if abs(losses["transformers"] - losses["megatron"]) > 1e-3:
        raise AssertionError(f"both must compute the same loss: {losses}")
    for _ in range(work.repeats):
        for name, step in steps.items():
            seconds[name].append(_time(step))
    return seconds


def _megatron_alone(layout: ParallelLayout, rank: int, folder: Path, work: Work) -> list[float]:
    step = _megatron_step(layout, rank, folder, work)
    step()
    return [_time(step) for _ in range(work.repeats)]


def _time(step: Callable[[], float]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _tokens(work: Work) -> Any:
    import torch

    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, SHAPE["vocab_size"], (work.samples, work.length), generator=generator)


def _transformers_step(folder: Path, work: Work) -> Callable[[], float]:
    """A plain training loop: forward, backward, gradient clipping and AdamW."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=work.learning_rate, weight_decay=0.0)
    micro_batches = _tokens(work).split(work.micro_batch)
    count = work.samples * (work.length - 1)

    def step() -> float:
        total = 0.0
        for ids in micro_batches:
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
            flat = logits.reshape(-1, logits.shape[-1])
            loss = torch.nn.functional.cross_entropy(flat, ids[:, 1:].reshape(-1), reduction="sum") / count
            torch.autograd.backward(loss)
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def _megatron_step(layout: ParallelLayout, rank: int, folder: Path, work: Work) -> Callable[[], float]:
    """The same step through the Megatron strategy."""
    import torch

    from roll.configs.megatron import MegatronTrainConfig
    from roll.configs.pipeline import SFTConfig
    from roll.configs.roles import (
        ActorTrainConfig,
        MegatronTrainArguments,
        TrainingArguments,
        TrainModelArguments,
    )
    from roll.distributed.protocol import DataProto
    from roll.platforms import get_platform

    get_platform("cpu").prepare_megatron()
    from roll.distributed.strategy.megatron_strategy import MegatronTrainStrategy

    sizes = MegatronTrainConfig(tensor_model_parallel_size=layout.tensor, pipeline_model_parallel_size=layout.pipeline)
    worker = ActorTrainConfig(
        model_args=TrainModelArguments(model_name_or_path=str(folder), dtype="fp32"),
        training_args=TrainingArguments(learning_rate=work.learning_rate),
        strategy_args=MegatronTrainArguments(strategy_config=sizes),
        device_mapping=list(range(layout.world_size)),
    )
    config = SFTConfig(response_length=work.length, actor_train=worker)
    strategy = MegatronTrainStrategy(worker, config, layout, rank, get_platform("cpu"))
    strategy.initialize()
    ids = _tokens(work)[strategy.coordinates.data :: layout.data]
    mask = torch.ones_like(ids)
    response = mask.bool()
    response[:, 0] = False
    starts = range(0, len(ids), work.micro_batch)
    plan = {
        "micro_batches": [list(range(start, min(start + work.micro_batch, len(ids)))) for start in starts],
        "tokens": float(work.samples * (work.length - 1)),
        "sequences": float(work.samples),
    }
    data = DataProto.from_dict({"input_ids": ids, "attention_mask": mask, "response_mask": response})
    data.meta_info = {"loss": "sft", "loss_config": None, "optimizer_steps": [plan]}
    return lambda: strategy.train_step(data)["loss"]


def _spawn(layout: ParallelLayout, job: Callable[..., Any], folder: Path, work: Work) -> Any:
    """Runs `job` on all ranks, each in its own process on its own core; returns the result of rank 0."""
    from torch.multiprocessing.spawn import spawn

    from roll.distributed.process_groups import open_port

    result = folder / "result.pickle"
    with open_port() as listener:
        arguments = (layout, job, folder, work, listener, result)
        spawn(_rank_main, arguments, nprocs=layout.world_size)
    return pickle.loads(result.read_bytes())


def _rank_main(
    rank: int,
    layout: ParallelLayout,
    job: Callable[..., Any],
    folder: Path,
    work: Work,
    listener: socket.socket,
    result: Path,
) -> None:
    from roll.distributed.process_groups import hold_port
    from roll.platforms import get_platform

    warnings.filterwarnings("ignore")
    cores = sorted(os.sched_getaffinity(0))
    get_platform("cpu").setup_process([cores[rank % len(cores)]], threads=1)
    port = listener.getsockname()[1]
    if rank == 0:
        hold_port(listener)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    outcome = job(layout, rank, folder, work)
    if rank == 0:
        result.write_bytes(pickle.dumps(outcome))


if __name__ == "__main__":
    main(measure, __doc__ or "")

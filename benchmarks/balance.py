"""Share of a training step in which data-parallel ranks wait for each other, before and after balancing by cost.

    python -m benchmarks.balance --json FILE

Two Megatron ranks, one thread each, train a small model on packed responses with long-tailed lengths. Before: samples
in the order they came, the same number for each rank. After: the plan of a run, with micro-batches formed by tokens and
with micro-batches formed by count. A rank is busy until it begins to reduce gradients with the other; nothing before
waits for another rank, because reductions do not overlap with the backward pass here. Busy time is processor time, so
that other programs on the machine do not count.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import Measurement, at_most, main, median
from benchmarks.ranks import spawn_ranks
from roll.configs.devices.parallel_layout import ParallelLayout
from roll.datasets.micro_batches import OptimizerStepPlan

TARGET_IDLE = 0.10
"""Largest allowed idle share after balancing."""

TARGET_REMAINING = 0.5
"""Largest allowed idle share after balancing, as a fraction of that before."""

SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
}

BEFORE, BY_TOKENS, BY_COUNT = "in order", "by tokens", "by count"
"""The plans that are compared."""


@dataclass(frozen=True)
class Work:
    """Optimizer steps on `samples` each, of `prompt` tokens and a response of at most `longest` tokens.

    Lengths of responses follow a Pareto distribution: most are short, a few are the longest.
    """

    steps: int = 8
    repeats: int = 3
    samples: int = 64
    micro_batch: int = 4
    max_tokens: int = 2048
    prompt: int = 32
    shortest: int = 48
    longest: int = 1504
    tail_exponent: float = 1.2

    def lengths(self, step: int) -> list[int]:
        """Tokens of each sample of a step."""
        draw = random.Random(step)
        responses = (int(self.shortest * draw.paretovariate(self.tail_exponent)) for _ in range(self.samples))
        return [self.prompt + min(self.longest, response) for response in responses]


def measure(work: Work | None = None) -> Measurement:
    """Idle shares of the plans."""
    work = work or Work()
    from roll.models.tiny import write_tiny_model

    layout = ParallelLayout(data=2)
    with tempfile.TemporaryDirectory() as root:
        folder = write_tiny_model(Path(root) / "model", "qwen2", **SHAPE)
        busy, seconds = spawn_ranks(layout, _measure_rank, folder, work)
    idle = {name: idle_share(each) for name, each in busy.items()}
    raw = {
        "shape": SHAPE,
        "work": asdict(work),
        "threads_per_rank": 1,
        "busy_seconds": busy,
        "step_seconds": {name: sum(each) for name, each in seconds.items()},
        "idle_share": idle,
    }
    checks = []
    for name in (BY_TOKENS, BY_COUNT):
        checks += [
            at_most(f"balance: idle share, micro-batches {name}", idle[name], TARGET_IDLE),
            at_most(f"balance: idle share {name} / in order", idle[name] / idle[BEFORE], TARGET_REMAINING),
        ]
    return raw, checks


def idle_share(busy: Sequence[Sequence[float]]) -> float:
    """Share of their time that ranks wait for the slowest one.

    Args:
        busy: busy seconds of each rank in each step, [steps][ranks].

    Returns:
        1 - (mean over ranks of busy seconds) / (busy seconds of the slowest rank), each summed over steps.
    """
    return 1 - sum(sum(step) / len(step) for step in busy) / sum(max(step) for step in busy)


def in_order(lengths: Sequence[int], ranks: int, max_tokens: int) -> OptimizerStepPlan:
    """Each rank has the same number of consecutive samples, in micro-batches of consecutive ones up to `max_tokens`."""
    share = len(lengths) // ranks
    shards = [list(range(rank * share, (rank + 1) * share)) for rank in range(ranks)]
    micro_batches = []
    for shard in shards:
        rank: list[list[int]] = []
        tokens = 0
        for position, index in enumerate(shard):
            if not rank or tokens + lengths[index] > max_tokens:
                rank.append([])
                tokens = 0
            rank[-1].append(position)
            tokens += lengths[index]
        micro_batches.append(rank)
    return OptimizerStepPlan(shards, micro_batches)


def _measure_rank(
    layout: ParallelLayout, rank: int, folder: Path, work: Work
) -> tuple[dict[str, list[list[float]]], dict[str, list[float]]]:
    """Busy seconds [steps][ranks] and seconds of each step [steps] with each plan; medians of the repeats."""
    import torch.distributed as dist

    from roll.configs.arguments import TrainingArguments, TrainModelArguments
    from roll.configs.devices.megatron import MegatronTrainConfig
    from roll.configs.pipeline import SFTConfig
    from roll.configs.roles import ActorTrainConfig, MegatronTrainArguments
    from roll.pipeline.learning.shards import sample_lengths, training_plans, training_shards
    from roll.platforms import get_platform

    get_platform("cpu").prepare_megatron()
    from roll.distributed.train.megatron_strategy import MegatronTrainStrategy

    def role(by_tokens: bool) -> ActorTrainConfig:
        return ActorTrainConfig(
            model_args=TrainModelArguments(model_name_or_path=str(folder), dtype="fp32"),
            training_args=TrainingArguments(
                learning_rate=1e-4,
                per_device_train_batch_size=work.micro_batch,
                gradient_accumulation_steps=work.samples // layout.data // work.micro_batch,
            ),
            strategy_args=MegatronTrainArguments(strategy_config=MegatronTrainConfig(overlap_grad_reduce=False)),
            use_dynamic_batching_in_train=by_tokens,
            max_tokens_per_microbatch_in_train=work.max_tokens if by_tokens else 0,
            device_mapping=list(range(layout.world_size)),
        )

    trained = role(True)
    config = SFTConfig(response_length=work.prompt + work.longest, actor_train=trained)
    strategy = MegatronTrainStrategy(trained, config, layout, rank, get_platform("cpu"))
    strategy.initialize()
    marks: list[float] = []
    megatron = strategy.stages[0].config
    reduce_gradients = megatron.finalize_model_grads_func

    def mark_and_reduce(*arguments: Any, **options: Any) -> None:
        marks.append(time.process_time())
        reduce_gradients(*arguments, **options)

    megatron.finalize_model_grads_func = mark_and_reduce

    def run(plan: OptimizerStepPlan, data: Any) -> tuple[list[float], float]:
        shard = training_shards(data, plan, {"loss": "sft", "loss_config": None})[strategy.coordinates.data]
        dist.barrier()
        wall, start = time.perf_counter(), time.process_time()
        strategy.train_step(shard)
        gathered: list[Any] = [None] * layout.data
        dist.all_gather_object(gathered, marks.pop() - start)
        return gathered, time.perf_counter() - wall

    busy: dict[str, list[list[float]]] = {BEFORE: [], BY_TOKENS: [], BY_COUNT: []}
    seconds: dict[str, list[float]] = {name: [] for name in busy}
    for step in range(work.steps):
        data = _batch(work, step)
        plans = {
            BEFORE: in_order(sample_lengths(data), layout.data, work.max_tokens),
            BY_TOKENS: training_plans(data, role(True), "cpu")[0],
            BY_COUNT: training_plans(data, role(False), "cpu")[0],
        }
        if step == 0:
            run(plans[BEFORE], data)
        runs: dict[str, list[tuple[list[float], float]]] = {name: [] for name in plans}
        for _ in range(work.repeats):
            for name, plan in plans.items():
                runs[name].append(run(plan, data))
        for name, each in runs.items():
            busy[name].append([median(times) for times in zip(*(ranks for ranks, _ in each), strict=True)])
            seconds[name].append(median([wall for _, wall in each]))
    return busy, seconds


def _batch(work: Work, step: int) -> Any:
    """Random tokens of a step's lengths; those of responses have a loss."""
    import torch

    from roll.datasets.batch import Batch

    lengths = torch.tensor(work.lengths(step))
    columns = torch.arange(int(lengths.max()))
    mask = columns < lengths[:, None]
    generator = torch.Generator().manual_seed(step)
    return Batch(
        {
            "input_ids": torch.randint(0, SHAPE["vocab_size"], tuple(mask.shape), generator=generator),
            "attention_mask": mask.long(),
            "response_mask": mask & (columns >= work.prompt),
        }
    )


if __name__ == "__main__":
    main(measure, __doc__ or "")

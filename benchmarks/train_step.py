"""Tokens per second of one optimizer step: Megatron on one rank against transformers with torch's AdamW.

    python -m benchmarks.train_step --json FILE [--lora] [--model moe]

Both run the same model, batch and micro-batches with the same threads, alternately in one process; then Megatron runs
on two ranks. The same again with long-tailed lengths: Megatron with packed and with padded samples, and transformers
with padding. With `--lora`: adapters of LORA_RANK on all linear layers against all weights, both on Megatron.
With `--model moe`: a mixture of experts on one rank, whose experts are computed one after another.
"""

from __future__ import annotations

import random
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import Measurement, at_least, at_most, main, median
from benchmarks.ranks import spawn_ranks
from roll.configs.devices.parallel_layout import ParallelLayout

IGNORED = -100
"""Target of a token that has no loss."""

TARGET_RATIO = 0.9
"""Required tokens per second, as a fraction of those of transformers."""

TARGET_PACKED, TARGET_PACKED_OVER_TRANSFORMERS = 2.0, 1.3
"""Required speed of a packed step of long-tailed lengths over the padded one, and over transformers with padding."""

TARGET_MIXTURE, TARGET_MIXTURE_PACKED = 0.8, 1.2
"""Required speed of a mixture over transformers, and of its packed step of long-tailed lengths."""

LORA_RANK, LORA_STARTS, TARGET_LORA = 16, 3, 1.25
"""Rank of the adapters, starts of each kind, and required speed of adapters over all weights."""

TAIL_EXPONENT, SHORTEST = 1.2, 24
"""Pareto exponent of the long-tailed lengths, and the shortest one: most samples are short, a few fill the limit."""

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

MIXTURE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 352,
    "norm_topk_prob": True,
}
"""Experts of the mixture; those of a token have as many weights as the MLP of the dense model."""


@dataclass(frozen=True)
class Work:
    """One optimizer step, repeated: `samples` of `length` tokens in micro-batches of `micro_batch`."""

    samples: int = 16
    micro_batch: int = 4
    length: int = 256
    repeats: int = 7
    learning_rate: float = 1e-4
    long_tail: bool = False

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample, at most `length`."""
        if not self.long_tail:
            return [self.length] * self.samples
        draw = random.Random(0)
        return [min(self.length, int(SHORTEST * draw.paretovariate(TAIL_EXPONENT))) for _ in range(self.samples)]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


LONG_TAIL = Work(samples=64, micro_batch=16, length=512, repeats=5, long_tail=True)


LAYOUTS = {"tp2": ParallelLayout(tensor=2), "pp2": ParallelLayout(pipeline=2), "dp2": ParallelLayout(data=2)}


def measure(work: Work | None = None) -> Measurement:
    """Tokens per second of both, and of Megatron on two ranks."""
    work = work or Work()
    from roll.models.tiny import write_tiny_model

    with tempfile.TemporaryDirectory() as root:
        folder = write_tiny_model(Path(root) / "model", "qwen2", **SHAPE)
        one = spawn_ranks(ParallelLayout(), _compare, folder, work)
        two = {name: spawn_ranks(layout, _megatron_alone, folder, work) for name, layout in LAYOUTS.items()}
        tail = spawn_ranks(ParallelLayout(), _compare, folder, LONG_TAIL)
    speed = {name: work.tokens / median(seconds) for name, seconds in one.items()}
    ratio = speed["megatron"] / speed["transformers"]
    raw = {
        "shape": SHAPE,
        "work": asdict(work),
        "threads_per_rank": 1,
        "seconds": {**one, **two},
        "tokens_per_second": {**speed, **{name: work.tokens / median(seconds) for name, seconds in two.items()}},
        "ratio": ratio,
        "long_tail": {"work": asdict(LONG_TAIL), "tokens": LONG_TAIL.tokens, "seconds": tail},
    }
    packed = {name: median(tail[name]) / median(tail["packed"]) for name in ("megatron", "transformers")}
    return raw, [
        at_least("train_step: megatron / transformers, one rank", ratio, TARGET_RATIO),
        at_least("train_step: long tail, packed / padded", packed["megatron"], TARGET_PACKED),
        at_least(
            "train_step: long tail, packed / transformers", packed["transformers"], TARGET_PACKED_OVER_TRANSFORMERS
        ),
    ]


def measure_moe() -> Measurement:
    """Tokens per second of a mixture of experts and of transformers' own, on one rank."""
    from roll.models.tiny import write_tiny_model

    work = Work()
    with tempfile.TemporaryDirectory() as root:
        folder = write_tiny_model(Path(root) / "model", "qwen3_moe", **SHAPE, **MIXTURE)
        seconds = spawn_ranks(ParallelLayout(), _compare, folder, work)
        tail = spawn_ranks(ParallelLayout(), _compare, folder, LONG_TAIL)
    ratio = median(seconds["transformers"]) / median(seconds["megatron"])
    packed = median(tail["transformers"]) / median(tail["packed"])
    raw = {
        "shape": SHAPE | MIXTURE,
        "work": asdict(work),
        "seconds": seconds,
        "ratio": ratio,
        "long_tail": {"work": asdict(LONG_TAIL), "tokens": LONG_TAIL.tokens, "seconds": tail},
    }
    return raw, [
        at_least("train_step: mixture, megatron / transformers", ratio, TARGET_MIXTURE),
        at_least("train_step: mixture, long tail, packed / transformers", packed, TARGET_MIXTURE_PACKED),
    ]


def _compare(layout: ParallelLayout, rank: int, folder: Path, work: Work) -> dict[str, list[float]]:
    padded, packed = megatron_steps(layout, rank, folder, work)
    steps = {"transformers": _transformers_step(folder, work), "megatron": padded}
    if work.long_tail:
        steps["packed"] = packed
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses = {name: step() for name, step in steps.items()}
    if abs(losses["transformers"] - losses["megatron"]) > 1e-3:
        raise AssertionError(f"both must compute the same loss: {losses}")
    for _ in range(work.repeats):
        for name, step in steps.items():
            seconds[name].append(_time(step))
    return seconds


def measure_lora() -> Measurement:
    """Speed and memory of a step that trains adapters, against one that trains all weights."""
    from roll.models.tiny import write_tiny_model

    work = Work()
    with tempfile.TemporaryDirectory() as root:
        folder = write_tiny_model(Path(root) / "model", "qwen2", **SHAPE)
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in LORA_KINDS}
        for _ in range(LORA_STARTS):
            for name in found:
                found[name].append(spawn_ranks(ParallelLayout(), LORA_KINDS[name], folder, work))
    seconds = {name: [each for run in runs for each in run["seconds"]] for name, runs in found.items()}
    peak = {name: median([run["peak"] for run in runs]) for name, runs in found.items()}
    states = {name: sum(runs[0]["states"].values()) for name, runs in found.items()}
    raw = {"shape": SHAPE, "work": asdict(work), "rank": LORA_RANK, "runs": found, "peak": peak, "states": states}
    speedup = median(seconds["weights"]) / median(seconds["adapters"])
    return raw, [
        at_least("train_step: tokens/s of adapters over all weights", speedup, TARGET_LORA),
        at_most("train_step: peak memory of adapters over all weights", peak["adapters"] / peak["weights"], 0.45),
    ]


def _weights_alone(layout: ParallelLayout, rank: int, folder: Path, work: Work) -> dict[str, Any]:
    return _memory_and_seconds(layout, rank, folder, work)


def _adapters_alone(layout: ParallelLayout, rank: int, folder: Path, work: Work) -> dict[str, Any]:
    return _memory_and_seconds(layout, rank, folder, work, lora_target=["all-linear"], lora_rank=LORA_RANK)


LORA_KINDS = {"weights": _weights_alone, "adapters": _adapters_alone}


def _memory_and_seconds(layout: ParallelLayout, rank: int, folder: Path, work: Work, **lora: Any) -> dict[str, Any]:
    """Seconds of each step, the states' bytes, and by how much the process grew at most since Megatron was imported."""
    from roll.platforms import get_platform

    get_platform("cpu").prepare_megatron()
    import roll.distributed.train.megatron_strategy  # noqa: F401  (so that it is not counted)

    before = psutil.Process().memory_info().rss
    strategy = megatron_strategy(layout, rank, folder, work, **lora)
    step, _ = strategy_steps(strategy, layout, work)
    step()
    seconds = [_time(step) for _ in range(work.repeats)]
    states = {name: strategy.memory()[name] for name in ("parameters", "gradients", "optimizer")}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "states": states, "peak": peak - before}


def _megatron_alone(layout: ParallelLayout, rank: int, folder: Path, work: Work) -> list[float]:
    step, _ = megatron_steps(layout, rank, folder, work)
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


def _mask(work: Work) -> Any:
    """[samples, length], 1 for the tokens of each sample; padding is on the right."""
    import torch

    return (torch.arange(work.length) < torch.tensor(work.lengths)[:, None]).long()


def _transformers_step(folder: Path, work: Work) -> Callable[[], float]:
    """A plain training loop: forward, backward, gradient clipping and AdamW."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=work.learning_rate, weight_decay=0.0)
    micro_batches = list(zip(_tokens(work).split(work.micro_batch), _mask(work).split(work.micro_batch), strict=True))
    count = work.tokens - work.samples

    def step() -> float:
        total = 0.0
        for whole, mask in micro_batches:
            longest = int(mask.sum(-1).max())
            ids, mask = whole[:, :longest], mask[:, :longest]
            logits = model(input_ids=ids, attention_mask=mask if work.long_tail else None, use_cache=False).logits[
                :, :-1
            ]
            flat, targets = logits.reshape(-1, logits.shape[-1]), ids[:, 1:].masked_fill(mask[:, 1:] == 0, IGNORED)
            loss = torch.nn.functional.cross_entropy(flat, targets.reshape(-1), ignore_index=IGNORED, reduction="sum")
            loss = loss / count
            torch.autograd.backward(loss)
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def megatron_steps(
    layout: ParallelLayout, rank: int, folder: Path, work: Work
) -> tuple[Callable[[], float], Callable[[], float]]:
    """The same step through the Megatron strategy, with padded and with packed samples."""
    return strategy_steps(megatron_strategy(layout, rank, folder, work), layout, work)


def megatron_strategy(layout: ParallelLayout, rank: int, folder: Path, work: Work, **model: Any) -> Any:
    """One rank's model and optimizer; `model` has keys of `model_args`."""
    from roll.configs.arguments import TrainingArguments, TrainModelArguments
    from roll.configs.devices.megatron import MegatronTrainConfig
    from roll.configs.pipeline import SFTConfig
    from roll.configs.roles import ActorTrainConfig, MegatronTrainArguments
    from roll.platforms import get_platform

    get_platform("cpu").prepare_megatron()
    from roll.distributed.train.megatron_strategy import MegatronTrainStrategy

    sizes = MegatronTrainConfig(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
    )
    worker = ActorTrainConfig(
        model_args=TrainModelArguments(**{"model_name_or_path": str(folder), "dtype": "fp32"} | model),
        training_args=TrainingArguments(learning_rate=work.learning_rate),
        strategy_args=MegatronTrainArguments(strategy_config=sizes),
        device_mapping=list(range(layout.world_size)),
    )
    config = SFTConfig(response_length=work.length, actor_train=worker)
    strategy = MegatronTrainStrategy(worker, config, layout, rank, get_platform("cpu"))
    strategy.initialize()
    return strategy


def strategy_steps(
    strategy: Any, layout: ParallelLayout, work: Work
) -> tuple[Callable[[], float], Callable[[], float]]:
    """A step with padded and with packed samples."""
    from roll.datasets.batch import Batch

    mine = slice(strategy.coordinates.data, None, layout.data)
    ids, mask = _tokens(work)[mine], _mask(work)[mine]
    response = mask.bool()
    response[:, 0] = False
    starts = range(0, len(ids), work.micro_batch)
    plan = {
        "micro_batches": [list(range(start, min(start + work.micro_batch, len(ids)))) for start in starts],
        "tokens": float(work.tokens - work.samples),
        "sequences": float(work.samples),
    }
    data = Batch({"input_ids": ids, "attention_mask": mask, "response_mask": response})
    data.meta_info = {"loss": "sft", "loss_config": None, "optimizer_steps": [plan]}

    def step(packed: bool) -> float:
        strategy.forward.packed = packed
        return strategy.train_step(data)["loss"]

    return partial(step, False), partial(step, True)


if __name__ == "__main__":
    main(measure, __doc__ or "", measure_lora, measure_moe)

"""What every rank of a layout does for test_mixtures.py, in one spawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from roll.datasets.batch import Batch
from tests.integration.megatron_scenario import PROMPT, SAMPLES, TEMPERATURE, WIDTH, token_batch, training_batch
from tests.integration.rank_pool import RankContext

GRADIENT = {"learning_rate": 1e3, "adam_epsilon": 1e3, "weight_decay": 0.0}
"""Adam's first step is then the gradient, to one part in a thousand of the largest element."""

ADAM = {"learning_rate": 1e-3, "weight_decay": 0.0}


def run(context: RankContext) -> None:
    """Scores and trains each of `models`; ranks have different numbers of samples and of micro-batches."""
    for name, model in context.arguments["models"].items():
        _score(context, name, Path(model))
        for variant, options in context.arguments["variants"].items():
            _train(context, f"{name}/{variant}", Path(model), dict(options))


def _score(context: RankContext, name: str, model: Path) -> None:
    megatron = {"sequence_parallel": context.layout.tensor > 1}
    strategy = context.strategy(model, megatron=megatron, infer=True)
    rank, ranks = strategy.coordinates.data, context.layout.data
    rows = list(range(rank, SAMPLES - (ranks > 1), ranks))
    size = 1 if rank == 0 else 2
    for packed in (False, True):
        strategy.forward.packed = packed
        data = Batch(token_batch()).select_idxs(rows)
        groups = [list(range(start, min(start + size, len(rows)))) for start in range(0, len(rows), size)]
        data.meta_info = {"temperature": TEMPERATURE, "micro_batches": groups}
        scored = strategy.compute_log_probs(data)
        context.results[f"rows/{name}"] = rows
        context.results[f"log_probs/{name}/{packed}"] = scored.batch["log_probs"].clone() if len(scored) else None
    strategy.shutdown()


def _train(context: RankContext, name: str, model: Path, options: dict[str, Any]) -> None:
    """A step that subtracts the gradient, and three of Adam; the weights go to folders."""
    size = options.pop("micro_batch_size")
    if context.layout.tensor > 1:
        options["megatron"] = {"sequence_parallel": True, **options.get("megatron", {})}
    for kind, training, steps in (("gradient", GRADIENT, 1), ("adam", ADAM, 3)):
        clip = 0.0 if kind == "gradient" else 1.0
        strategy = context.strategy(model, training=training, max_grad_norm=clip, **options)
        data = training_batch(strategy.coordinates.data, context.layout.data, size)
        context.results[f"steps/{name}/{kind}"] = [strategy.train_step(data) for _ in range(steps)]
        strategy.weights.export_hf(context.folder / name / kind)
        if kind == "adam":
            specs = [(spec.name, spec.shape) for spec in strategy.weights.specs()]
            tensors = [(key, tuple(tensor.shape)) for key, tensor in strategy.weights.full_tensors()]
            context.results[f"same names/{name}"] = specs == tensors
        strategy.shutdown()


def expected_training(model: torch.nn.Module, kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Gradient norms, and the weights by name, after the same steps of transformers and torch."""
    training, steps = (GRADIENT, 1) if kind == "gradient" else (ADAM, 3)
    tensors = token_batch()
    mask = tensors["attention_mask"].bool() & (torch.arange(WIDTH) >= PROMPT)
    epsilon = training.get("adam_epsilon", 1e-8)
    adam = torch.optim.AdamW(model.parameters(), training["learning_rate"], (0.9, 0.999), epsilon, weight_decay=0.0)
    norms = []
    for _ in range(steps):
        adam.zero_grad()
        logits = model(**tensors).logits[:, :-1].float()
        picked = torch.log_softmax(logits, -1).gather(2, tensors["input_ids"][:, 1:, None]).squeeze(2)
        (-(picked * mask[:, 1:]).sum() / mask.sum()).backward()
        clip = 1.0 if kind == "adam" else float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        adam.step()
    return norms, model.state_dict()

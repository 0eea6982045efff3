"""What every rank of a layout does for test_mixtures.py, in one spawn."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from roll.datasets.batch import Batch
from roll.distributed.train.micro_batch import make_micro_batch
from tests.integration.megatron_scenario import PROMPT, SAMPLES, TEMPERATURE, WIDTH, token_batch, training_batch
from tests.integration.rank_pool import RankContext

GRADIENT = {"learning_rate": 1e3, "adam_epsilon": 1e3, "weight_decay": 0.0}
"""Adam's first step is then the gradient, to one part in a thousand of the largest element."""

BALANCE = {"moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.05}

ADAM = {"learning_rate": 1e-3, "adam_epsilon": 1e-5, "weight_decay": 0.0}
"""With the usual epsilon a gradient that is zero but for rounding moves its weight by a whole step, up or down."""


def run(context: RankContext) -> None:
    """Scores and trains each of `models`; ranks have different numbers of samples and of micro-batches."""
    for name, model in context.arguments["models"].items():
        _score(context, name, Path(model))
        for variant, options in context.arguments["variants"].items():
            _train(context, f"{name}/{variant}", Path(model), dict(options))
    balanced = Path(context.arguments["models"]["qwen3_moe"])
    for variant, sizes in context.arguments["balanced"].items():
        size = sizes[context.layout.coordinates(context.rank).data]
        _train(context, f"balanced/{variant}", balanced, {"micro_batch_size": size, "megatron": BALANCE}, ["gradient"])


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


def _train(
    context: RankContext, name: str, model: Path, options: dict[str, Any], kinds: Sequence[str] = ("gradient", "adam")
) -> None:
    """A step that subtracts the gradient, and three of Adam; the weights go to folders."""
    size = options.pop("micro_batch_size")
    if context.layout.tensor > 1:
        options["megatron"] = {"sequence_parallel": True, **options.get("megatron", {})}
    for kind in kinds:
        training, steps = (GRADIENT, 1) if kind == "gradient" else (ADAM, 3)
        clip = 0.0 if kind == "gradient" else 1.0
        strategy = context.strategy(model, training=training, max_grad_norm=clip, **options)
        data = training_batch(strategy.coordinates.data, context.layout.data, size)
        results = context.results[f"steps/{name}/{kind}"] = [strategy.train_step(data)]
        if kind == "adam":
            context.results[f"buffers/{name}"] = _buffers_there_and_back(strategy)
        results += [strategy.train_step(data) for _ in range(steps - 1)]
        strategy.weights.export_hf(context.folder / name / kind)
        if kind == "adam":
            specs = [(spec.name, spec.shape) for spec in strategy.weights.specs()]
            tensors = [(key, tuple(tensor.shape)) for key, tensor in strategy.weights.full_tensors()]
            context.results[f"same names/{name}"] = specs == tensors
        strategy.shutdown()


def _buffers_there_and_back(strategy: Any) -> tuple[int, int, int]:
    """Moves all states to host memory and back.

    Returns:
        Bytes of the gradients of dense weights and of experts before, and of both meanwhile.
    """
    from roll.distributed.train.host_copies import ALL_STATES

    def sizes() -> tuple[int, int]:
        both = zip(*((each.buffers, each.expert_parallel_buffers) for each in strategy.wrapped), strict=True)
        dense, experts = (
            sum(buffer.grad_data.untyped_storage().nbytes() for buffers in kind for buffer in buffers) for kind in both
        )
        return dense, experts

    before = sizes()
    strategy.offload(ALL_STATES)
    meanwhile = sum(sizes())
    strategy.states.load(ALL_STATES)
    return *before, meanwhile


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


def expected_balance(model: torch.nn.Module, sizes: Sequence[int], multiple: int) -> float:
    """Subtracts the gradient with the losses of routers, and returns their mean auxiliary loss.

    Micro-batches have `sizes[rank]` samples; ranks with fewer of them compute their first sample again, without a loss
    of its tokens.
    """
    tensors = token_batch()
    mask = tensors["attention_mask"].bool() & (torch.arange(WIDTH) >= PROMPT)
    shards = [range(rank, SAMPLES, len(sizes)) for rank in range(len(sizes))]
    cut = [[rows[at : at + size] for at in range(0, len(rows), size)] for rows, size in zip(shards, sizes, strict=True)]
    again = [rows[0][:1] for rows in cut for _ in range(max(map(len, cut)) - len(rows))]
    micro = [*itertools.chain(*cut), *again]
    inputs = [make_micro_batch(Batch(tensors).batch, rows, multiple).input_ids for rows in micro]
    total = sum(ids.numel() for ids in inputs)
    loss, aux_losses = torch.zeros(()), []
    for number, (ids, rows) in enumerate(zip(inputs, micro, strict=True)):
        output = model(input_ids=ids, output_router_logits=True)
        if number < len(micro) - len(again):
            picked = torch.log_softmax(output.logits[:, :-1].float(), -1).gather(2, ids[:, 1:, None]).squeeze(2)
            loss = loss - (picked * mask[list(rows), 1 : ids.shape[1]]).sum() / mask.sum()
        for logits in output.router_logits:
            experts, chosen = logits.shape[1], logits.topk(2, -1).indices
            tokens = torch.nn.functional.one_hot(chosen, experts).sum((0, 1)).float()
            aux = experts * (tokens / tokens.sum() * logits.softmax(-1).mean(0)).sum()
            z = torch.logsumexp(logits, -1).square().mean()
            loss = loss + ids.numel() / total * (BALANCE["moe_aux_loss_coeff"] * aux + BALANCE["moe_z_loss_coeff"] * z)
            aux_losses.append(aux.item())
    loss.backward()
    options = GRADIENT["learning_rate"], (0.9, 0.999), GRADIENT["adam_epsilon"]
    torch.optim.AdamW(model.parameters(), *options, weight_decay=0.0).step()
    return sum(aux_losses) / len(aux_losses)

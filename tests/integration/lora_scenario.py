"""What every rank of a layout does with adapters for test_lora.py, in one spawn."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist

from roll.datasets.batch import Batch
from tests.integration.megatron_scenario import TEMPERATURE, token_batch, training_batch
from tests.integration.rank_pool import RankContext

RATE = {"learning_rate": 1e-2, "weight_decay": 0.1}


def run(context: RankContext) -> None:
    """`arguments`: cases, name to model, adapter and options; resumed, name to checkpoint, model and options."""
    for name, case in context.arguments["cases"].items():
        _case(context, name, **case)
    for name, case in context.arguments["resumed"].items():
        _resume(context, name, **case)


def _case(context: RankContext, name: str, model: str, lora: dict[str, Any], **options: Any) -> None:
    """Log-probs, gradients and three steps; what is frozen before and after, exports and a checkpoint."""
    size = options.pop("micro_batch_size", 3)
    strategy = context.strategy(Path(model), lora=lora, training=RATE, **options)
    results = context.results.setdefault(name, {})
    scored = Batch(token_batch())
    scored.meta_info = {"temperature": TEMPERATURE, "micro_batches": [[0, 3, 5], [1, 2, 7, 4], [6]]}
    for key in ("adapted", "base"):
        scored.meta_info["base"] = key == "base"
        answer = strategy.compute_log_probs(scored)
        results[key] = answer.batch["log_probs"].clone() if len(answer) else None
    with patch.object(dist, "all_gather_object", Mock(side_effect=dist.all_gather_object)) as gathering:
        strategy.weights.export_adapter(context.folder / name / "first", strategy.worker_config.model_args)
    results["sent"] = sum(len(pickle.dumps(call.args[1])) for call in gathering.call_args_list)
    data = training_batch(strategy.coordinates.data, context.layout.data, size)
    before = _frozen(strategy)
    results["gradients"] = _gradients(strategy, data)
    for _ in range(3):
        strategy.train_step(data)
    results["frozen"] = before == _frozen(strategy)
    results["memory"] = strategy.memory()
    results["trained"] = sum(each.numel() for each in strategy._parameters() if each.requires_grad)
    results["states"] = len(list(strategy._optimizer_state()))
    strategy.weights.export_adapter(context.folder / name / "trained", strategy.worker_config.model_args)
    strategy.weights.export_hf(context.folder / name / "merged")
    results["frozen names"] = strategy.weights.frozen()
    strategy.begin_checkpoint(context.folder / name / "checkpoint")
    strategy.train_step(data)
    strategy.saving._writing.result()
    strategy.weights.export_adapter(context.folder / name / "continued", strategy.worker_config.model_args)
    strategy.shutdown()


def _gradients(strategy: Any, data: Batch) -> dict[str, torch.Tensor]:
    """Gradients of the adapters by their names in a PEFT folder, from a step that changes nothing."""
    from roll.distributed.train import megatron_strategy
    from roll.distributed.train.megatron_weights import StageWeight

    with patch.object(megatron_strategy, "update", lambda *_: 0.0):
        strategy.train_step(data)
    strategy.optimizer_steps -= 1
    adapted = [each for each in strategy.weights._weights if each.adapter is not None]
    weights = [
        StageWeight(parameter.main_grad, (rule,), each.ranks, each.group)
        for each in adapted
        for rule, parameter in each.adapter.weights
    ]
    targets = {name for each in adapted for name in each.adapter.targets}
    found = strategy.weights._gather(weights, range(strategy.layout.world_size))
    return {name: tensor.clone() for name, tensor in found if name in targets}


def _frozen(strategy: Any) -> str:
    digest = hashlib.sha256()
    for parameter in strategy._parameters():
        if not parameter.requires_grad:
            digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def _resume(context: RankContext, name: str, model: str, lora: dict[str, Any], checkpoint: str, **options: Any) -> None:
    """Continues from a checkpoint of any layout by one step; or the error."""
    size = options.pop("micro_batch_size", 3)
    strategy = context.strategy(Path(model), lora=lora, training=RATE, **options)
    results = context.results.setdefault(name, {})
    try:
        strategy.load_checkpoint(Path(checkpoint))
    except ValueError as error:
        results["error"] = str(error)
    else:
        strategy.weights.export_adapter(context.folder / name / "trained", strategy.worker_config.model_args)
        strategy.train_step(training_batch(strategy.coordinates.data, context.layout.data, size))
        strategy.weights.export_adapter(context.folder / name / "continued", strategy.worker_config.model_args)
    strategy.shutdown()

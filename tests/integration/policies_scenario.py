"""What every rank of a layout does with two policies for test_policies.py."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from roll.configs.learning.lora import PolicyArguments
from roll.datasets.batch import POLICY
from tests.integration.megatron_scenario import training_batch
from tests.integration.rank_pool import RankContext

POLICIES = {
    "math": PolicyArguments(tags=["math"], lora_rank=4, lora_alpha=8),
    "code": PolicyArguments(tags=["code"], lora_rank=2, learning_rate=2e-2),
}
SOME = ["q_proj", "v_proj", "up_proj", "down_proj"]


def run(context: RankContext) -> None:
    """`arguments`: model; orders, name to the policies that are trained one after the other; resumed, a checkpoint."""
    for name, order in context.arguments.get("orders", {}).items():
        strategy = _strategy(context)
        results = context.results[name] = {"states": [_states(strategy)], "metrics": [], "frozen": [_frozen(strategy)]}
        for policy in order:
            results["metrics"].append(_step(context, strategy, policy))
            results["states"].append(_states(strategy))
        results["frozen"].append(_frozen(strategy))
        _write(context, strategy, name, order[-1])
        strategy.shutdown()
    if checkpoint := context.arguments.get("resumed"):
        strategy = _strategy(context)
        strategy.load_checkpoint(Path(checkpoint))
        _write(context, strategy, "resumed", context.arguments["continues"], saves=False)
        strategy.shutdown()


def _strategy(context: RankContext) -> Any:
    megatron = {"sequence_parallel": context.layout.tensor > 1}
    lora = {"lora_target": SOME, "lora_rank": 3}
    training = {"learning_rate": 1e-2, "weight_decay": 0.1, "lr_scheduler_type": "linear"}
    return context.strategy(
        context.arguments["model"], megatron, training, lora=lora, policies=POLICIES, max_steps=8, response_length=64
    )


def _step(context: RankContext, strategy: Any, policy: str) -> dict[str, float]:
    data = training_batch(strategy.coordinates.data, context.layout.data, 3)
    data.meta_info[POLICY] = policy
    found: dict[str, float] = strategy.train_step(data)
    return found


def _write(context: RankContext, strategy: Any, name: str, then: str, saves: bool = True) -> None:
    """Exports both policies, saves a checkpoint, and exports them once more after one more step of `then`."""
    for folder in ("trained", "continued"):
        for policy, own in strategy.policies.items():
            own.weights.export_adapter(context.folder / name / folder / policy, own.model)
        if folder == "trained":
            if saves:
                strategy.begin_checkpoint(context.folder / name / "checkpoint")
                strategy.saving._writing.result()
            context.results.setdefault("rates", {})[name] = _step(context, strategy, then)["lr"]


def _states(strategy: Any) -> dict[str, str]:
    """A digest of the adapters and of the optimizer state of each policy."""
    found = {}
    for name, policy in strategy.policies.items():
        tensors = [each.detach() for own in policy.adapters for each in own.parameters()]
        tensors += [value for _, state in policy.optimizer.state.items() for value in state.values()]
        found[name] = _digest(tensors)
    return found


def _frozen(strategy: Any) -> str:
    return _digest([each.detach() for each in strategy._parameters() if not each.requires_grad])


def _digest(tensors: list[Any]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()

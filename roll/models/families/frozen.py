"""Weights that are not trained, by the beginnings of their names."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from roll.models.families.shape import ModelShape
from roll.models.families.weights import WeightRule, model_rules, stage_rules


def frozen_names(model: ModelShape, prefixes: Sequence[str]) -> frozenset[str]:
    """Names in a Hugging Face folder of the weights whose name, there or in Megatron, begins with a prefix.

    Raises:
        ValueError: a prefix begins no name, or a part of what is one matrix in Megatron.
    """
    if not prefixes:
        return frozenset()
    rules = model_rules(model)
    frozen: set[str] = set()
    for prefix in prefixes:
        found = {name for rule in rules for name in _with_prefix(rule, prefix)}
        if not found:
            raise ValueError(
                f"{prefix} begins no weight of a {model.architecture}; its names are like {rules[0].hf[0]} and "
                f"{rules[1].hf[0]}"
            )
        frozen |= found
    for rule in rules:
        held = [name for name in rule.hf if name in frozen]
        if held and len(held) < len(rule.hf):
            others = ", ".join(name for name in rule.hf if name not in frozen)
            raise ValueError(f"{', '.join(held)} is one matrix with {others}; freeze all of it, or nothing")
    return frozenset(frozen)


def _with_prefix(rule: WeightRule, prefix: str) -> Sequence[str]:
    return rule.hf if rule.megatron.startswith(prefix) else [name for name in rule.hf if name.startswith(prefix)]


def untrained_part(model: ModelShape, frozen: Collection[str], parts: Sequence[Sequence[int]]) -> str:
    """Why Megatron could not train: a part of a pipeline stage has nothing to train. Empty if all have.

    Args:
        model: the model.
        frozen: as from `frozen_names`.
        parts: layers of the parts of each stage, as from `part_layers`.
    """
    order = [(stage, layers[number]) for number in range(len(parts[0])) for stage, layers in enumerate(parts)]
    first_layer = 0
    for number, (stage, layers) in enumerate(order):
        rules = stage_rules(model, first_layer, layers, number == 0, number == len(order) - 1)
        first_layer += layers
        if all(rule.hf[0] in frozen for rule in rules):
            if len(order) == 1:
                return "leaves nothing to train; freeze less"
            return f"leaves a part of pipeline stage {stage} with nothing to train; freeze less, or use fewer stages"
    return ""


def frozen_parameters(
    model: ModelShape, frozen: Collection[str], stage: int, stage_layers: Sequence[int], tensor: int
) -> int:
    """Parameters of one rank of a stage that are not trained, with the arguments of `ModelShape.stage_parameters`."""
    first, last = stage == 0, stage == len(stage_layers) - 1
    rules = stage_rules(model, sum(stage_layers[:stage]), stage_layers[stage], first, last)
    dense = (rule for rule in rules if not rule.is_expert)
    return sum(model.rank_parameters(rule, tensor) for rule in dense if rule.hf[0] in frozen)

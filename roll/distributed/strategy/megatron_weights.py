"""A stage's weights under their HF names, for publishing and for export."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from roll.distributed.strategy.base import WeightSpec
from roll.models.factory import HiddenStateModel
from roll.models.families import TIED_HEAD, Rule
from roll.models.hf_config import DecoderConfig
from roll.models.hf_import import rules_of


def published_rules(stage: HiddenStateModel, model: DecoderConfig) -> list[Rule]:
    """The stage's rules in publishing order; tied embeddings go out once, from the first stage."""
    return [rule for rule in rules_of(stage, model) if rule != TIED_HEAD]


def weight_specs(stage: HiddenStateModel, model: DecoderConfig) -> list[WeightSpec]:
    """Names, full shapes and dtypes of what `hf_weights` yields, in order, without communication."""
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    parameters = dict(stage.named_parameters())
    specs = []
    for rule in published_rules(stage, model):
        parameter = parameters[rule.megatron]
        shapes = rule.layout.hf_shapes(parameter.shape, ranks, model)
        dtype = str(parameter.dtype).removeprefix("torch.")
        specs += [WeightSpec(name, shape, dtype) for name, shape in zip(rule.hf, shapes, strict=True)]
    return specs


@torch.no_grad()
def hf_weights(stage: HiddenStateModel, model: DecoderConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """HF-named full tensors of this stage; collective over its tensor-parallel ranks.

    Tensors may share memory with the model: use them before the next training step.
    """
    parameters = dict(stage.named_parameters())
    for rule in published_rules(stage, model):
        shards = _gather(parameters[rule.megatron].detach(), rule)
        yield from zip(rule.hf, rule.layout.merge(shards, model), strict=True)


def _gather(shard: torch.Tensor, rule: Rule) -> list[torch.Tensor]:
    """The shards of all tensor-parallel ranks, in order."""
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1 or not rule.layout.is_split:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return shards

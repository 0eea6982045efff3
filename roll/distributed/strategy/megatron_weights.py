"""A stage's weights under their HF names, for publishing and for export."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from roll.distributed.strategy.base import WeightSpec
from roll.models.factory import HiddenStateModel
from roll.models.hf_config import DecoderConfig
from roll.models.hf_import import rules_of
from roll.models.weight_mapping import TIED_HEAD, Rule


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


@torch.no_grad()
def source_weights(stage: HiddenStateModel, model: DecoderConfig) -> Iterator[tuple[str, torch.Tensor | None]]:
    """As `hf_weights` on tensor rank 0; the other ranks only send their shards to it, and get None.

    That halves the traffic. The next parameter is under way while one is used.
    """
    parameters = dict(stage.named_parameters())
    rules = published_rules(stage, model)
    under_way = [_start_gather(parameters[rule.megatron].detach(), rule) for rule in rules[:1]]
    for index, rule in enumerate(rules):
        if index + 1 < len(rules):
            following = rules[index + 1]
            under_way.append(_start_gather(parameters[following.megatron].detach(), following))
        work, shards = under_way.pop(0)
        if work is not None:
            work.wait()
        tensors = [None] * len(rule.hf) if shards is None else rule.layout.merge(shards, model)
        yield from zip(rule.hf, tensors, strict=True)


def weight_slices(
    stage: HiddenStateModel, model: DecoderConfig
) -> Iterator[tuple[str, Callable[[torch.Tensor], None]]]:
    """For every HF name in publishing order, what copies this rank's slice into the whole tensor; no communication."""
    parameters = dict(stage.named_parameters())
    rank = parallel_state.get_tensor_model_parallel_rank()
    for rule in published_rules(stage, model):
        shard = parameters[rule.megatron].detach()
        for part, name in enumerate(rule.hf):
            yield name, partial(rule.layout.write, shard, part=part, config=model, rank=rank)


def _gather(shard: torch.Tensor, rule: Rule) -> list[torch.Tensor]:
    """The shards of all tensor-parallel ranks, in order."""
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1 or not rule.layout.is_split:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return shards


def _start_gather(shard: torch.Tensor, rule: Rule) -> tuple[dist.Work | None, list[torch.Tensor] | None]:
    """A gather to tensor rank 0 under way, and where the shards will be there; None elsewhere."""
    group = parallel_state.get_tensor_model_parallel_group()
    is_source = group.rank() == 0
    if group.size() == 1 or not rule.layout.is_split:
        return None, [shard] if is_source else None
    shards = [torch.empty_like(shard) for _ in range(group.size())] if is_source else None
    work = dist.gather(shard.contiguous(), shards, group=group, group_dst=0, async_op=True)
    return work, shards

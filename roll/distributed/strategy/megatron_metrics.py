"""Metrics of micro-batches made one set of numbers, known to every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state


def is_maximum(name: str) -> bool:
    """A name ending in `_max` is reduced by max; every other by sum, its terms being shares of the global batch."""
    return name.endswith("_max")


def reduce_micro_batches(rows: Sequence[Mapping[str, torch.Tensor]], device: torch.device) -> dict[str, float]:
    """Reduces over this rank's micro-batches, over data ranks, and hands the result to every pipeline stage.

    Args:
        rows: one mapping per micro-batch on the last stage, nothing on the others.
        device: where the collectives run.
    """
    reduced: dict[str, float] = {}
    if parallel_state.is_pipeline_last_stage():
        names = sorted(rows[0])
        for kind in (False, True):
            chosen = [name for name in names if is_maximum(name) == kind]
            if chosen:
                reduced |= _reduce(rows, chosen, kind, device)
    return _from_last_stage(reduced)


def over_optimizer_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean over optimizer steps; the largest for names ending in `_max`."""
    values = {name: [step[name] for step in steps] for name in steps[0]}
    return {name: max(each) if is_maximum(name) else sum(each) / len(each) for name, each in values.items()}


def _reduce(
    rows: Sequence[Mapping[str, torch.Tensor]], names: Sequence[str], maximum: bool, device: torch.device
) -> dict[str, float]:
    table = torch.stack([torch.stack([row[name].double().to(device) for name in names]) for row in rows])
    values = table.amax(dim=0) if maximum else table.sum(dim=0)
    group = parallel_state.get_data_parallel_group()
    dist.all_reduce(values, op=dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group=group)
    return dict(zip(names, values.tolist(), strict=True))


def _from_last_stage(reduced: dict[str, float]) -> dict[str, float]:
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return reduced
    box = [reduced]
    source = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast_object_list(box, src=source, group=parallel_state.get_pipeline_model_parallel_group())
    return box[0]

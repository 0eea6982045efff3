"""The plan of a weight update, tensors in buckets, and its checks: pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from roll.configs.arguments import TORCH_DTYPES
from roll.configs.devices.parallel_layout import ParallelLayout


class PlanError(ValueError):
    """The pipeline stages together do not send every tensor exactly once."""


@dataclass(frozen=True)
class WeightSpec:
    """One tensor under its HF name.

    Attributes:
        dtype: torch's name without the prefix, such as bfloat16.
        unit: names tensors that are sent in one bucket, which follow each other: those of an expert; empty for others.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    unit: str = ""


@dataclass(frozen=True)
class Bucket:
    """Tensors that are sent together: of one dtype, consecutive in the sending order, never empty."""

    specs: tuple[WeightSpec, ...]

    @property
    def bytes(self) -> int:
        return sum(spec_bytes(spec) for spec in self.specs)

    @property
    def dtype(self) -> str:
        return self.specs[0].dtype


def spec_bytes(spec: WeightSpec) -> int:
    """Size of one tensor.

    Raises:
        PlanError: weights of this dtype cannot be sent.
    """
    if spec.dtype not in TORCH_DTYPES.values():
        raise PlanError(f"{spec.name}: cannot send dtype {spec.dtype}; supported are {sorted(TORCH_DTYPES.values())}")
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return math.prod(spec.shape) * dtype.itemsize


def make_buckets(specs: Sequence[WeightSpec], bucket_bytes: int) -> list[Bucket]:
    """Consecutive tensors in buckets of at most `bucket_bytes`; a larger tensor, or unit, gets its own bucket.

    Units and tensors of no unit are in different buckets.

    Raises:
        PlanError: `bucket_bytes` is not positive, or a dtype is not supported.
    """
    if bucket_bytes < 1:
        raise PlanError(f"bucket size must be at least 1 byte, got {bucket_bytes}")
    buckets: list[Bucket] = []
    open_specs: list[WeightSpec] = []
    filled = 0
    for _, group in groupby(specs, lambda spec: spec.unit or spec.name):
        unit = list(group)
        size, kind = sum(map(spec_bytes, unit)), (unit[0].dtype, bool(unit[0].unit))
        if open_specs and (filled + size > bucket_bytes or kind != (open_specs[0].dtype, bool(open_specs[0].unit))):
            buckets.append(Bucket(tuple(open_specs)))
            open_specs, filled = [], 0
        open_specs += unit
        filled += size
    return [*buckets, Bucket(tuple(open_specs))] if open_specs else buckets


def check_stages(stages: Sequence[Sequence[WeightSpec]], names: frozenset[str] | None = None) -> None:
    """Checks that every tensor is sent by exactly one stage, and that these are the tensors `names` of the model.

    Raises:
        PlanError: naming the first tensor that two stages send, the stage without tensors, the first tensor of the
            model that is not sent, or the first that is none.
    """
    owner: dict[str, int] = {}
    for stage, specs in enumerate(stages):
        if not specs:
            raise PlanError(f"pipeline stage {stage} has no weights to send")
        for spec in specs:
            if spec.name in owner:
                raise PlanError(f"{spec.name} is sent by stage {owner[spec.name]} and again by stage {stage}")
            owner[spec.name] = stage
    if names is None:
        return
    for wrong, what in ((names - owner.keys(), "is sent by no stage"), (owner.keys() - names, "is not of the model")):
        if wrong:
            raise PlanError(f"{min(wrong)} {what} ({len(wrong)} such tensors)")


def handle_sources(
    layout: ParallelLayout, train_devices: Sequence[int], infer_devices: Sequence[int], platform: str
) -> list[list[int]]:
    """For every pipeline stage and engine rank: the training rank that exports handles of the stage's weights.

    On GPUs it is the stage's rank on the engine rank's own device, if there is one, so that engines do not all read
    from one GPU; else the stage's source rank. CPU memory is equally near to all.

    Args:
        layout: of the training ranks.
        train_devices: of the training ranks, in their order.
        infer_devices: of the engine ranks, in the order of engines.
        platform: cpu or cuda.
    """
    sources = []
    for stage in range(layout.pipeline):
        on_device = {
            device: rank
            for rank, device in enumerate(train_devices)
            if platform != "cpu" and layout.coordinates(rank).pipeline == stage
        }
        sources.append([on_device.get(device, layout.rank(0, 0, stage)) for device in infer_devices])
    return sources


def checksum_differences(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """How an engine's checksums differ from those of the sent tensors, one sentence a tensor; empty when equal.

    Args:
        expected: checksums of the sent tensors, by the engine's parameter name.
        found: checksums of the engine's parameters, by name.
    """
    not_sent = [f"{name} was not sent" for name in sorted(found.keys() - expected.keys())]
    unknown = [f"{name} is not a parameter of the engine" for name in sorted(expected.keys() - found.keys())]
    changed = [
        f"{name} differs: sent {expected[name]}, engine holds {found[name]}"
        for name in sorted(expected.keys() & found.keys())
        if expected[name] != found[name]
    ]
    return not_sent + unknown + changed

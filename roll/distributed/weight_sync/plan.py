"""What is published in which order, and what must be true of it: pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element of the dtypes that weights are published in."""


class SendError(RuntimeError):
    """What the model yields is not what the plan says."""


class PlanError(ValueError):
    """The stages together do not publish every tensor exactly once."""


@dataclass(frozen=True)
class WeightSpec:
    """One published tensor under its HF name; `dtype` is torch's name without the prefix, such as bfloat16."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel together: one dtype, consecutive in the publishing order, never none."""

    specs: tuple[WeightSpec, ...]

    @property
    def bytes(self) -> int:
        """Size of the whole."""
        return sum(spec_bytes(spec) for spec in self.specs)

    @property
    def dtype(self) -> str:
        """The dtype all tensors share."""
        return self.specs[0].dtype


def spec_bytes(spec: WeightSpec) -> int:
    """Bytes of one tensor.

    Raises:
        PlanError: its dtype is none that weights are published in.
    """
    if spec.dtype not in DTYPE_BYTES:
        raise PlanError(f"{spec.name}: cannot publish dtype {spec.dtype}; known are {sorted(DTYPE_BYTES)}")
    return math.prod(spec.shape) * DTYPE_BYTES[spec.dtype]


def make_buckets(specs: Sequence[WeightSpec], bucket_bytes: int) -> list[Bucket]:
    """Consecutive tensors in buckets of at most `bucket_bytes`; a larger tensor has one of its own.

    Raises:
        PlanError: `bucket_bytes` is not positive, or a dtype is unknown.
    """
    if bucket_bytes < 1:
        raise PlanError(f"a bucket of {bucket_bytes} bytes holds nothing")
    buckets: list[Bucket] = []
    open_specs: list[WeightSpec] = []
    filled = 0
    for spec in specs:
        size = spec_bytes(spec)
        if open_specs and (filled + size > bucket_bytes or spec.dtype != open_specs[0].dtype):
            buckets.append(Bucket(tuple(open_specs)))
            open_specs, filled = [], 0
        open_specs.append(spec)
        filled += size
    return [*buckets, Bucket(tuple(open_specs))] if open_specs else buckets


def check_stages(stages: Sequence[Sequence[WeightSpec]]) -> None:
    """Every name is published once, over all stages.

    Raises:
        PlanError: naming the first tensor published twice and by which stages, or the stage that publishes nothing.
    """
    owner: dict[str, int] = {}
    for stage, specs in enumerate(stages):
        if not specs:
            raise PlanError(f"pipeline stage {stage} publishes nothing")
        for spec in specs:
            if spec.name in owner:
                raise PlanError(f"{spec.name} is published by stage {owner[spec.name]} and again by stage {stage}")
            owner[spec.name] = stage


def differences(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """How an engine's checksums differ from what was sent, one sentence a tensor; empty when they agree.

    Args:
        expected: checksum by the engine's name, of what the training side published.
        found: the same of what the engine holds.
    """
    never_sent = [f"{name} was not published" for name in sorted(found.keys() - expected.keys())]
    unknown = [f"{name} is not known to the engine" for name in sorted(expected.keys() - found.keys())]
    changed = [
        f"{name} arrived different: sent {expected[name]}, holds {found[name]}"
        for name in sorted(expected.keys() & found.keys())
        if expected[name] != found[name]
    ]
    return never_sent + unknown + changed

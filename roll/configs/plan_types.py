"""What `roll plan` says, as values: everything is text, numbers and lists, so that it is JSON as it stands."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class RolePlan:
    """One role: its engine, its devices and how they are split; `workers` are ranks, or engines for sglang."""

    role: str
    strategy: str
    model: str | None
    dtype: str
    devices: list[int]
    nodes: list[int]
    workers: int
    tensor: int
    pipeline: int
    data: int
    shares_devices_with: list[str]


@dataclass(frozen=True)
class DevicePlan:
    """One device: where it is and what every role on it does there."""

    device: int
    node: int
    local_index: int
    uses: list[str]


@dataclass(frozen=True)
class Line:
    """One number of the batch arithmetic and how it comes about."""

    name: str
    value: int | float | str
    formula: str


@dataclass(frozen=True)
class MemoryLine:
    """One kind of memory of one device, in bytes, and its formula with the numbers put in."""

    name: str
    bytes: int
    formula: str


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of one role on its fullest device."""

    role: str
    where: str
    lines: list[MemoryLine]

    @property
    def total(self) -> int:
        """Bytes of all lines."""
        return sum(line.bytes for line in self.lines)


@dataclass(frozen=True)
class Plan:
    """Everything that follows from a configuration before anything starts."""

    exp_name: str
    pipeline: str
    source: str
    platform: str
    nodes: int
    devices_per_node: int
    roles: list[RolePlan]
    devices: list[DevicePlan]
    batch: list[Line]
    memory: list[MemoryPlan]
    warnings: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON takes it, totals included."""
        plan = asdict(self)
        for shown, memory in zip(plan["memory"], self.memory, strict=True):
            shown["total"] = memory.total
        return plan

"""Smallest device layouts that keep a recipe's parallel sizes above 1, and which roles share devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from roll.configs.parallel_layout import ParallelLayout
from roll.configs.roles import EngineRoleConfig, RoleConfig

MAX_SLOTS = 8
"""Device slots of a rehearsal in total; each is a process with its own copy of the libraries."""

MAX_ENGINES = 2
"""Two engines show everything that several do: balancing, broadcast, one that is behind."""

LOST = {"tensor": 4, "pipeline": 4, "data": 2}
"""Cost of a parallel size that is 1 in the rehearsal and larger in the recipe."""

LOST_ENGINES = 1
"""Cost of a single engine where the recipe has several."""


@dataclass(frozen=True)
class Placement:
    """Layout and devices of every role."""

    layouts: dict[str, ParallelLayout]
    devices: dict[str, list[int]]

    @property
    def slots(self) -> int:
        return len({device for devices in self.devices.values() for device in devices})


def shrink_layouts(roles: Mapping[str, RoleConfig]) -> Placement:
    """The placement of a rehearsal: at most `MAX_SLOTS` devices and `MAX_ENGINES` engines.

    Roles that share a device get equal devices, the others stay apart. A size above 1 becomes 2. Where 8 slots cannot
    hold all of them, the number of engines is reduced to 1 first, then data parallelism, then the others. Of placements
    that keep the same, the one with the fewest slots is taken.
    """
    ordered = _sharing(roles)
    best: tuple[tuple[int, int, int], Placement] | None = None
    for sizes in itertools.product((1, 2, 4, 8), repeat=len(ordered)):
        if sum(sizes) > MAX_SLOTS:
            continue
        candidate = _place(roles, ordered, sizes)
        if candidate is not None and (best is None or candidate[0] < best[0]):
            best = candidate
    assert best is not None, "one device for each set of roles always fits"
    return best[1]


def _sharing(roles: Mapping[str, RoleConfig]) -> list[list[str]]:
    groups: list[tuple[set[int], list[str]]] = []
    for name, role in roles.items():
        devices, names = {*role.device_mapping}, [name]
        for group in [group for group in groups if group[0] & devices]:
            groups.remove(group)
            devices, names = devices | group[0], [*group[1], *names]
        groups.append((devices, names))
    return [names for _, names in sorted(groups, key=lambda group: min(group[0]))]


def _place(
    roles: Mapping[str, RoleConfig], groups: list[list[str]], sizes: tuple[int, ...]
) -> tuple[tuple[int, int, int], Placement] | None:
    """Cost (lost sizes, gained sizes, slots) and placement for these numbers of devices; None if a role cannot fit."""
    layouts: dict[str, ParallelLayout] = {}
    devices: dict[str, list[int]] = {}
    lost = gained = start = 0
    for names, size in zip(groups, sizes, strict=True):
        for name in names:
            options = [(_cost(roles[name], layout), index, layout) for index, layout in _layouts(roles[name], size)]
            if not options:
                return None
            cost, _, layout = min(options, key=lambda option: option[:2])
            lost, gained = lost + cost[0], gained + cost[1]
            layouts[name], devices[name] = layout, list(range(start, start + size))
        start += size
    order = [name for name in roles if name in layouts]
    placed = Placement({name: layouts[name] for name in order}, {name: devices[name] for name in order})
    return (lost, gained, sum(sizes)), placed


def _layouts(role: RoleConfig, size: int) -> Iterator[tuple[int, ParallelLayout]]:
    if isinstance(role, EngineRoleConfig):
        sizes = [tensor for tensor in (1, 2, 4, 8) if size % tensor == 0 and size // tensor <= MAX_ENGINES]
        yield from enumerate(ParallelLayout(tensor=tensor, data=size // tensor) for tensor in sizes)
        return
    sizes_of_both = [(t, p) for t, p in itertools.product((1, 2), repeat=2) if size % (t * p) == 0]
    yield from enumerate(ParallelLayout(tensor=t, pipeline=p, data=size // (t * p)) for t, p in sizes_of_both)


def _cost(role: RoleConfig, layout: ParallelLayout) -> tuple[int, int]:
    """What a layout loses of the role's own, and what it has in addition."""
    own, lost, gained = role.layout, 0, 0
    for name, cost in LOST.items():
        before, after = getattr(own, name), getattr(layout, name)
        if name == "data" and isinstance(role, EngineRoleConfig):
            cost = LOST_ENGINES
        if before > 1 and after == 1:
            lost += cost
        gained += max(0, after - min(before, 2))
    return lost, gained

"""Which node, device and cores a worker gets: pure arithmetic on `device_mapping`, printable before anything starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roll.configs.parallel_layout import spans


@dataclass(frozen=True)
class Seat:
    """Where one worker runs: `devices` are global ranks, `slots` the same counted from its node's first."""

    node: int
    devices: tuple[int, ...]
    slots: tuple[int, ...]


def seats_of(role: str, devices: Sequence[int], workers: int, devices_per_node: int) -> list[Seat]:
    """One seat for each of `workers`, devices dealt in the order of the mapping.

    Raises:
        ValueError: the devices do not divide among the workers, or a worker would stand on two nodes.
    """
    if workers < 1 or not devices or len(devices) % workers:
        raise ValueError(f"{role}.device_mapping: {len(devices)} devices cannot be dealt to {workers} workers")
    each = len(devices) // workers
    seats = []
    for worker in range(workers):
        own = tuple(devices[worker * each : (worker + 1) * each])
        nodes = sorted({device // devices_per_node for device in own})
        if len(nodes) > 1:
            raise ValueError(
                f"{role}.device_mapping: worker {worker} would own devices {list(own)} on nodes {nodes}; "
                f"a worker stays on one node of {devices_per_node} devices"
            )
        seats.append(Seat(nodes[0], own, tuple(device % devices_per_node for device in own)))
    return seats


def nodes_needed(roles: Mapping[str, Sequence[int]], devices_per_node: int) -> int:
    """Nodes up to the one that holds the highest device."""
    return max((max(devices) // devices_per_node + 1 for devices in roles.values() if devices), default=0)


def cores_of(slots: Sequence[int], num_slots: int, cores: Sequence[int]) -> tuple[int, ...]:
    """Cores that the owner of `slots` runs on, of a node with `num_slots` slots and these cores.

    With a core or more for every slot each slot has its own consecutive cores, so that disjoint slots never compete;
    otherwise all share all.
    """
    if num_slots > len(cores):
        return tuple(cores)
    own: list[int] = []
    for slot in sorted(slots):
        own.extend(cores[slot * len(cores) // num_slots : (slot + 1) * len(cores) // num_slots])
    return tuple(own)


def threads_of(slots: Sequence[int], num_slots: int, num_cores: int) -> int:
    """Threads of the owner of `slots`: the cores it has to itself, or its fair share of shared ones; at least 1.

    More threads than that make every parallel loop wait for the thread that is not running.
    """
    if num_slots > num_cores:
        return max(1, num_cores * len(slots) // num_slots)
    return len(cores_of(slots, num_slots, range(num_cores)))


def resource_table(
    roles: Mapping[str, Sequence[int]], devices_per_node: int, nodes: Sequence[tuple[str, float]], device_word: str
) -> str:
    """What the roles ask for beside what the nodes have, as text.

    Args:
        roles: device ranks of each role.
        devices_per_node: devices that one node is counted as.
        nodes: address and devices of each node there is.
        device_word: what a device is called here, in the plural.
    """
    needed = max(nodes_needed(roles, devices_per_node), len(nodes))
    lines = [f"{'node':<6}{'devices':<12}{'needs':<8}{'has':<8}address"]
    for node in range(needed):
        address, count = nodes[node] if node < len(nodes) else ("no such node", 0)
        first = node * devices_per_node
        asked = {d for devices in roles.values() for d in devices if first <= d < first + devices_per_node}
        lines.append(f"{node:<6}{first}-{first + devices_per_node - 1:<10}{len(asked):<8}{count:<8g}{address}")
    lines.append(f"{'role':<18}{device_word}")
    lines.extend(f"{role:<18}{spans(sorted(devices))}" for role, devices in roles.items())
    return "\n".join(lines)

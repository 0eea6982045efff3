"""The devices of a run: reserves those of all roles on the nodes of Ray, or reports what does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from roll.configs.devices.parallel_layout import by_node, spans
from roll.distributed.core_pinning import Topology, cores_of, read_topology, threads_of
from roll.distributed.ray_session import CPU_SLOT, dead_ray_process
from roll.platforms.platform import LOOPBACK

RESERVE_TIMEOUT_S = 10.0
"""Reserving free devices takes under a second; longer means that another run holds them."""
NODE_TIMEOUT_S = 60.0
"""For the first process on a node, which imports this package."""


class ResourceError(RuntimeError):
    """The roles do not fit on the nodes; the message contains the resource table."""


@dataclass(frozen=True)
class Node:
    """One node of the run: Ray's id, its address, its cores, and the GPUs this run may use on it.

    `gpus` are names for CUDA_VISIBLE_DEVICES, one for each device of the node; empty on platform cpu.
    """

    node_id: str
    address: str
    topology: Topology
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeviceSlot:
    """What a worker owns of one node: `devices` are global ranks, `local_devices` the same counted within the node."""

    node: int
    devices: tuple[int, ...]
    local_devices: tuple[int, ...]


def device_slots(
    role: str, devices: Sequence[int], workers: int, devices_per_node: int
) -> list[tuple[DeviceSlot, ...]]:
    """The slots of each worker, one on each of its nodes, with devices in the order of the mapping.

    Raises:
        ValueError: the devices do not divide among the workers, or those of a worker among its nodes.
    """
    if workers < 1 or not devices or len(devices) % workers:
        raise ValueError(f"{role}.device_mapping: {len(devices)} devices cannot be divided among {workers} workers")
    each = len(devices) // workers
    slots = []
    for worker in range(workers):
        own = tuple(devices[worker * each : (worker + 1) * each])
        try:
            parts = by_node(own, devices_per_node)
        except ValueError as error:
            raise ValueError(f"{role}.device_mapping: worker {worker}: {error}") from None
        slots.append(tuple(_slot(part, devices_per_node) for part in parts))
    return slots


def _slot(devices: tuple[int, ...], devices_per_node: int) -> DeviceSlot:
    local = tuple(device % devices_per_node for device in devices)
    return DeviceSlot(devices[0] // devices_per_node, devices, local)


def visible_devices(local_devices: Sequence[int], gpus: Sequence[str]) -> str:
    """CUDA_VISIBLE_DEVICES of a worker on `local_devices` of a node with these GPUs: its own first, then the others."""
    others = [device for device in range(len(gpus)) if device not in local_devices]
    return ",".join(gpus[device] for device in [*local_devices, *others])


def nodes_needed(roles: Mapping[str, Sequence[int]], devices_per_node: int) -> int:
    return max((max(devices) // devices_per_node + 1 for devices in roles.values() if devices), default=0)


def resource_table(
    roles: Mapping[str, Sequence[int]], devices_per_node: int, nodes: Sequence[tuple[str, float]], device_word: str
) -> str:
    """Table of the devices that each node needs and has (`nodes`, by address), and of the devices of each role."""
    needed = max(nodes_needed(roles, devices_per_node), len(nodes))
    lines = [f"{'node':<6}{'devices':<12}{'needs':<8}{'has':<8}address"]
    for node in range(needed):
        address, count = nodes[node] if node < len(nodes) else ("no such node", 0)
        first = node * devices_per_node
        requested = {d for devices in roles.values() for d in devices if first <= d < first + devices_per_node}
        lines.append(f"{node:<6}{first}-{first + devices_per_node - 1:<10}{len(requested):<8}{count:<8g}{address}")
    lines.append(f"{'role':<18}{device_word}")
    lines.extend(f"{role:<18}{spans(sorted(devices))}" for role, devices in roles.items())
    return "\n".join(lines)


class ResourceManager:
    """Reserves the devices of all roles and assigns them to workers.

    Device r is on node r // num_devices_per_node, and node 0 is that of this process, if it has devices. Every node in
    use is reserved whole by one placement group bundle, so that device numbers mean the same to every role and two
    runs never share a device.
    """

    def __init__(self, platform_name: str, num_devices_per_node: int, roles: Mapping[str, Sequence[int]]) -> None:
        """Reserves the global device ranks of `roles`, which may share devices; Ray must have been started.

        Raises:
            ResourceError: the devices do not exist, or another run holds them.
        """
        self.platform_name = platform_name
        self.devices_per_node = num_devices_per_node
        self.roles = {role: list(devices) for role, devices in roles.items() if devices}
        self._resource = "GPU" if platform_name == "cuda" else CPU_SLOT
        self._group = self._reserve()
        self.this_node = ray.get_runtime_context().get_node_id()
        self._bundles: list[int] = []
        """The bundle of the reservation that is on each node."""
        self.nodes = self._locate()

    def device_slots(self, role: str, workers: int) -> list[tuple[DeviceSlot, ...]]:
        return device_slots(role, self.roles[role], workers, self.devices_per_node)

    def cores(self, slot: DeviceSlot) -> tuple[int, ...]:
        return cores_of(slot.local_devices, self.devices_per_node, self.nodes[slot.node].topology)

    def threads(self, slot: DeviceSlot) -> int:
        return threads_of(slot.local_devices, self.devices_per_node, self.nodes[slot.node].topology)

    def scheduling(self, slot: DeviceSlot) -> PlacementGroupSchedulingStrategy:
        """Ray's strategy that places an actor on the slot's node, inside the reservation."""
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._bundles[slot.node])

    def visible_devices(self, slot: DeviceSlot) -> str:
        """CUDA_VISIBLE_DEVICES of the worker on `slot`: its own devices first, then the node's others.

        A process numbers its own devices from 0 and can still open memory that a process on another device shares.
        """
        return visible_devices(slot.local_devices, self.nodes[slot.node].gpus)

    def lost_nodes(self) -> list[int]:
        """Indices of the nodes that Ray has lost: all of them once its own processes have died."""
        if dead_ray_process() is not None:
            return [*range(len(self.nodes))]
        alive = {node["NodeID"] for node in _alive_nodes()}
        return [index for index, node in enumerate(self.nodes) if node.node_id not in alive]

    def release(self) -> None:
        remove_placement_group(self._group)

    def table(self) -> str:
        """Table of the devices that the roles need and that Ray's nodes have."""
        nodes = [(node["NodeManagerAddress"], node["Resources"].get(self._resource, 0)) for node in _alive_nodes()]
        word = "GPUs" if self.platform_name == "cuda" else "CPU slots"
        return resource_table(self.roles, self.devices_per_node, nodes, word)

    def _reserve(self) -> PlacementGroup:
        needed = nodes_needed(self.roles, self.devices_per_node)
        fitting = [n for n in _alive_nodes() if n["Resources"].get(self._resource, 0) >= self.devices_per_node]
        if needed > len(fitting):
            raise ResourceError(
                f"device_mapping needs {needed} node(s) of {self.devices_per_node} device(s); "
                f"{len(fitting)} fit(s)\n{self.table()}"
            )
        bundles = [{self._resource: self.devices_per_node}] * max(1, needed)
        group: PlacementGroup = placement_group(bundles, strategy="STRICT_SPREAD" if needed > 1 else "STRICT_PACK")
        if not group.wait(RESERVE_TIMEOUT_S):
            remove_placement_group(group)
            raise ResourceError(f"the devices exist but another run holds them\n{self.table()}")
        return group

    def _locate(self) -> list[Node]:
        """The nodes, that of this process first and the others by address; a single one gets the loopback address."""
        bundle_nodes = placement_group_table(self._group)["bundles_to_node_id"]
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in _alive_nodes()}
        nodes = []
        self._bundles = sorted(
            range(len(bundle_nodes)),
            key=lambda index: (bundle_nodes[index] != self.this_node, addresses[bundle_nodes[index]]),
        )
        for index in self._bundles:
            node_id = bundle_nodes[index]
            address = LOOPBACK if len(bundle_nodes) == 1 else addresses[node_id]
            gpus = self._gpus(index) if self.platform_name == "cuda" else ()
            topology = read_topology(gpus) if node_id == self.this_node else _topology_elsewhere(node_id, gpus)
            nodes.append(Node(node_id, address, topology, gpus))
        return nodes

    def _gpus(self, bundle: int) -> tuple[str, ...]:
        """The GPUs that Ray reserved on a node, as CUDA_VISIBLE_DEVICES names them: ids, or UUIDs."""
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        options = {"num_cpus": 0, "num_gpus": self.devices_per_node, "scheduling_strategy": strategy}
        found: tuple[str, ...] = _answer(ray.remote(_reserved_gpus).options(**options).remote())
        return found


def _alive_nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return sorted((node for node in nodes if node["Alive"]), key=lambda node: node["NodeManagerAddress"])


def _reserved_gpus() -> tuple[str, ...]:
    return tuple(sorted(map(str, ray.get_gpu_ids()), key=lambda gpu: (len(gpu), gpu)))  # Ray's order is random


def _topology_elsewhere(node_id: str, gpus: tuple[str, ...]) -> Topology:
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task: Any = ray.remote(read_topology)
    found: Topology = _answer(task.options(num_cpus=0, scheduling_strategy=strategy).remote(gpus))
    return found


def _answer(reference: Any) -> Any:
    try:
        return ray.get(reference, timeout=NODE_TIMEOUT_S)
    except ray.exceptions.GetTimeoutError:
        raise ResourceError(
            f"a node did not start a process within {NODE_TIMEOUT_S:g} s; look at `ray status`, and at the node's load"
        ) from None

"""Ray and the devices of a run: starting it, reserving every role's devices at once, or saying why they do not fit."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from roll.distributed.placement import Seat, cores_of, nodes_needed, resource_table, seats_of, threads_of

if TYPE_CHECKING:
    from roll.configs.pipeline import BaseConfig

CPU_SLOT = "cpu_slot"
"""Ray resource that is one device on platform cpu; a node joined by hand declares it with `ray start --resources`."""
OBJECT_STORE_BYTES = 1 << 29
"""Enough for the batches of a step; the store spills to disk beyond it."""
RESERVE_TIMEOUT_S = 10.0
"""Reserving what is free takes under a second; longer means that something else holds the devices."""
CONNECT_TIMEOUT_S = 5.0
"""A Ray that exists accepts a connection at once."""


class RayStartError(RuntimeError):
    """Ray is not there; the message says why and what to do."""


class ResourceError(RuntimeError):
    """The roles do not fit on the nodes; the message holds the resource table."""


@dataclass(frozen=True)
class Node:
    """One node of the run: Ray's id, the address others reach it by, and the cores this run may use on it."""

    node_id: str
    address: str
    cores: tuple[int, ...]


def start_ray(config: BaseConfig, platform_name: str, num_devices: int) -> None:
    """Starts Ray on this machine, or joins the one that RAY_ADDRESS names.

    Args:
        config: the run.
        platform_name: cpu or cuda.
        num_devices: CPU slots or GPUs this machine offers.

    Raises:
        RayStartError: with the reason, at once.
    """
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 lets anything else on the machine go first
    if address:
        _probe(address)
        options = {"address": address, "log_to_driver": False, "logging_level": "ERROR"}
    else:
        options["address"] = "local"  # otherwise Ray joins, or fails to join, what a file in /tmp/ray names
        options.update(num_cpus=len(os.sched_getaffinity(0)), object_store_memory=OBJECT_STORE_BYTES)
        options.update({"num_gpus": num_devices} if platform_name == "cuda" else {"resources": {CPU_SLOT: num_devices}})
    at_end = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(**options)
    except (OSError, RuntimeError, ValueError, TimeoutError, ray.exceptions.RayError) as error:
        ray.shutdown()
        where = f"join the Ray at RAY_ADDRESS={address}" if address else "start Ray on this machine"
        raise RayStartError(f"cannot {where} for run {config.exp_name!r}: {type(error).__name__}: {error}") from error
    _handle_sigterm(at_end)


def _handle_sigterm(handler: Any) -> None:
    """Puts a handler back in the place of Ray's, which aborts the process and leaves everything running."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def stop_ray() -> None:
    """Ends every process that `start_ray` started; nothing happens where it started none."""
    ray.shutdown()


def _probe(address: str) -> None:
    """Whether something listens at `host:port`; Ray itself would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        if address in ("auto", "local"):
            return
        raise RayStartError(f"RAY_ADDRESS={address!r} is not HOST:PORT; unset it to start Ray on this machine")
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise RayStartError(
            f"no Ray answers at RAY_ADDRESS={address} ({error}); start one there with `ray start --head`, or unset "
            "RAY_ADDRESS to start Ray on this machine"
        ) from error


class ResourceManager:
    """Reserves the devices of all roles and tells each worker where it runs.

    Device r stands on node r // num_devices_per_node. Every node in use is reserved whole by one placement group
    bundle, so that device numbers mean the same to every role and two runs never share a device.
    """

    def __init__(self, platform_name: str, num_devices_per_node: int, roles: Mapping[str, Sequence[int]]) -> None:
        """Reserves; Ray must have been started.

        Args:
            platform_name: cpu (a device is a CPU slot) or cuda.
            num_devices_per_node: devices of one node.
            roles: global device ranks of each role; equal lists are colocated.

        Raises:
            ResourceError: they do not fit or are held by another run.
        """
        self.platform_name = platform_name
        self.devices_per_node = num_devices_per_node
        self.roles = {role: list(devices) for role, devices in roles.items() if devices}
        self._resource = "GPU" if platform_name == "cuda" else CPU_SLOT
        self._group = self._reserve()
        self.nodes = self._locate()

    def seats(self, role: str, workers: int) -> list[Seat]:
        """Where each of the role's workers runs."""
        return seats_of(role, self.roles[role], workers, self.devices_per_node)

    def cores(self, seat: Seat) -> tuple[int, ...]:
        """Core ids the worker on `seat` is pinned to."""
        return cores_of(seat.slots, self.devices_per_node, self.nodes[seat.node].cores)

    def threads(self, seat: Seat) -> int:
        """Compute threads of the worker on `seat`."""
        return threads_of(seat.slots, self.devices_per_node, len(self.nodes[seat.node].cores))

    def scheduling(self, seat: Seat) -> PlacementGroupSchedulingStrategy:
        """Ray's strategy that puts an actor on the seat's node, inside the reservation."""
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=seat.node)

    def visible_devices(self, seat: Seat) -> str:
        """CUDA_VISIBLE_DEVICES of the worker on `seat`: its own first, then the node's others.

        A process counts its own devices from 0 and can still open memory that a neighbour on another device shares.
        """
        others = [slot for slot in range(self.devices_per_node) if slot not in seat.slots]
        return ",".join(str(slot) for slot in [*seat.slots, *others])

    def release(self) -> None:
        """Gives the devices back."""
        remove_placement_group(self._group)

    def table(self) -> str:
        """Needs of the roles beside what Ray's nodes have."""
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
        group = placement_group(bundles, strategy="STRICT_SPREAD" if needed > 1 else "STRICT_PACK")
        if not group.wait(RESERVE_TIMEOUT_S):
            remove_placement_group(group)
            raise ResourceError(f"the devices exist but another run holds them\n{self.table()}")
        return group

    def _locate(self) -> list[Node]:
        """Nodes in the order of the bundles; a single one is reached by the loopback address."""
        places = placement_group_table(self._group)["bundles_to_node_id"]
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in _alive_nodes()}
        here = ray.get_runtime_context().get_node_id()
        nodes = []
        for index in range(len(places)):
            node_id = places[index]
            cores = _cores() if node_id == here else _cores_elsewhere(node_id)
            nodes.append(Node(node_id, "127.0.0.1" if len(places) == 1 else addresses[node_id], cores))
        return nodes


def _alive_nodes() -> list[dict[str, Any]]:
    return sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeManagerAddress"])


def _cores() -> tuple[int, ...]:
    return tuple(sorted(os.sched_getaffinity(0)))


def _cores_elsewhere(node_id: str) -> tuple[int, ...]:
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(_cores).options(num_cpus=0, scheduling_strategy=strategy)
    return ray.get(task.remote(), timeout=RESERVE_TIMEOUT_S)

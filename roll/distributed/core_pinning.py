"""Which cores each worker of a node is pinned to: near its GPU, and no physical core split between two workers.

Workers read pinned host memory and launch kernels from their cores, so cores on another socket than the GPU are slow.
Two workers on the hyperthreads of one physical core slow each other down.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from roll.configs.devices.parallel_layout import parse_device_mapping


@dataclass(frozen=True)
class Topology:
    """Cores of one node, and where they and its GPUs are. What is not known is left out.

    Attributes:
        cores: logical cores this run may use, ascending.
        physical_cores: logical core -> physical core, named by its first hyperthread.
        numa_nodes: logical core -> NUMA node.
        gpu_numa_nodes: NUMA node of each device; empty on platform cpu.
    """

    cores: tuple[int, ...]
    physical_cores: Mapping[int, int] = field(default_factory=dict)
    numa_nodes: Mapping[int, int] = field(default_factory=dict)
    gpu_numa_nodes: tuple[int | None, ...] = ()

    def physical_core(self, core: int) -> int:
        return self.physical_cores.get(core, core)

    def ordered(self, cores: Sequence[int]) -> list[int]:
        """Cores by NUMA node, with the hyperthreads of a physical core beside each other."""
        return sorted(cores, key=lambda core: (self.numa_nodes.get(core, 0), self.physical_core(core), core))


def cores_of(local_devices: Sequence[int], num_devices: int, topology: Topology) -> tuple[int, ...]:
    """Cores of the worker that owns `local_devices`, on a node with `num_devices` devices.

    Where there is at least one core per device, each device has its own cores, so that workers on disjoint devices
    never compete; otherwise all workers share all cores.
    """
    if num_devices > len(topology.cores):
        return topology.cores
    own = _cores_by_device(num_devices, topology)
    return tuple(core for device in sorted(local_devices) for core in own[device])


def threads_of(local_devices: Sequence[int], num_devices: int, topology: Topology) -> int:
    """Threads of the worker that owns `local_devices`: its own cores, or its fair share of shared ones; at least 1.

    With more threads every parallel loop would wait for a thread that is not scheduled.
    """
    if num_devices > len(topology.cores):
        return max(1, len(topology.cores) * len(local_devices) // num_devices)
    return len(cores_of(local_devices, num_devices, topology))


def _cores_by_device(num_devices: int, topology: Topology) -> dict[int, list[int]]:
    """Devices of a NUMA node divide its cores; where one lacks cores, or is not known, all devices divide all cores."""
    nodes = topology.gpu_numa_nodes
    near = {node: [core for core in topology.cores if topology.numa_nodes.get(core) == node] for node in set(nodes)}
    known = len(nodes) == num_devices and None not in nodes
    if known and all(len(cores) >= nodes.count(node) for node, cores in near.items()):
        groups = [([device for device in range(num_devices) if nodes[device] == node], near[node]) for node in near]
    else:
        groups = [(list(range(num_devices)), list(topology.cores))]
    return {
        device: share
        for devices, cores in groups
        for device, share in zip(devices, _divide(cores, len(devices), topology), strict=True)
    }


def _divide(cores: Sequence[int], shares: int, topology: Topology) -> list[list[int]]:
    """Neighbouring physical cores for each share; single hyperthreads where there are fewer physical cores."""
    ordered = topology.ordered(cores)
    units = [list(threads) for _, threads in groupby(ordered, topology.physical_core)]
    if len(units) < shares:
        units = [[core] for core in ordered]
    bounds = [share * len(units) // shares for share in range(shares + 1)]
    return [[core for unit in units[bounds[i] : bounds[i + 1]] for core in unit] for i in range(shares)]


def read_topology(gpus: Sequence[str] = (), root: Path = Path("/")) -> Topology:
    """The topology of this machine, from the files of the kernel and of NVIDIA's driver; missing files are no error.

    Args:
        gpus: index or UUID of each device, as in CUDA_VISIBLE_DEVICES.
        root: folder that holds `sys` and `proc`.
    """
    cores = tuple(sorted(os.sched_getaffinity(0)))
    system = root / "sys/devices/system"
    siblings = {core: _cores_in(system / f"cpu/cpu{core}/topology/thread_siblings_list") for core in cores}
    return Topology(
        cores,
        {core: min(threads) for core, threads in siblings.items() if threads},
        {
            core: int(folder.name.removeprefix("node"))
            for folder in system.glob("node/node[0-9]*")
            for core in _cores_in(folder / "cpulist")
        },
        tuple(_gpu_numa_node(gpu, root) for gpu in gpus),
    )


def _gpu_numa_node(gpu: str, root: Path) -> int | None:
    """An index counts the GPUs by their PCI address, as nvidia-smi does; a part of a GPU (MIG) is not found."""
    folders = sorted((root / "proc/driver/nvidia/gpus").glob("*:*"))
    if gpu.isdigit():
        found = folders[int(gpu) : int(gpu) + 1]
    else:
        found = [folder for folder in folders if gpu in _text(folder / "information")]
    text = _text(root / "sys/bus/pci/devices" / found[0].name.lower() / "numa_node") if found else ""
    return int(text) if text.isdigit() else None  # the kernel writes -1 where it does not know


def _cores_in(path: Path) -> list[int]:
    return parse_device_mapping(_text(path) or None)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""

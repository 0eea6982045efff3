"""Cores of workers on made-up machines, and how a machine is read from its files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.distributed.core_pinning import Topology, cores_of, read_topology, threads_of

TWO_SOCKETS = Topology(
    cores=tuple(range(64)),
    physical_cores={core: core % 32 for core in range(64)},
    numa_nodes={core: core % 32 // 16 for core in range(64)},
    gpu_numa_nodes=(0, 0, 0, 0, 1, 1, 1, 1),
)
"""Cores 0-15 and 16-31 are on sockets 0 and 1, and 32-63 are their second hyperthreads; four GPUs on each socket."""


def owned(topology: Topology, devices: int) -> list[tuple[int, ...]]:
    return [cores_of([device], devices, topology) for device in range(devices)]


def test_workers_on_gpus_have_cores_of_the_same_socket_with_both_hyperthreads() -> None:
    assert cores_of([0], 8, TWO_SOCKETS) == (0, 32, 1, 33, 2, 34, 3, 35)
    assert cores_of([7], 8, TWO_SOCKETS) == (28, 60, 29, 61, 30, 62, 31, 63)
    assert threads_of([4, 5], 8, TWO_SOCKETS) == 16


def test_the_order_of_gpus_does_not_have_to_be_that_of_sockets() -> None:
    crossed = Topology(tuple(range(4)), numa_nodes={0: 0, 1: 0, 2: 1, 3: 1}, gpu_numa_nodes=(1, 0, 1, 0))
    assert owned(crossed, 4) == [(2,), (0,), (3,), (1,)]


@pytest.mark.parametrize("places", [(), (None, 1), (0, 0), (5, 1)])
def test_where_a_gpu_is_unknown_or_its_socket_lacks_cores_all_gpus_divide_all_cores(places: tuple[int, ...]) -> None:
    container = Topology((3, 8, 9, 10), numa_nodes={3: 0, 8: 1, 9: 1, 10: 1}, gpu_numa_nodes=places)
    assert owned(container, 2) == [(3, 8), (9, 10)]


def test_cpu_slots_share_no_physical_core_unless_there_are_more_slots_than_physical_cores() -> None:
    laptop = Topology((0, 1, 2, 3), physical_cores={0: 0, 1: 1, 2: 0, 3: 1})
    assert owned(laptop, 2) == [(0, 2), (1, 3)]
    assert owned(laptop, 3) == [(0,), (2,), (1, 3)]


def test_a_container_may_have_one_hyperthread_of_a_core() -> None:
    container = Topology((1, 5, 6), physical_cores={1: 1, 5: 1, 6: 2})
    assert owned(container, 2) == [(1, 5), (6,)]


def test_more_devices_than_cores_share_all_cores_with_a_fair_share_of_threads() -> None:
    two = Topology((0, 1))
    assert cores_of([3], 4, two) == (0, 1)
    assert threads_of([3], 4, two) == 1
    assert threads_of([0, 1, 2, 3], 4, two) == 2


@settings(deadline=None)
@given(st.integers(1, 16), st.integers(0, 48), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_devices_with_a_core_each_share_none(
    devices: int, extra: int, threads: int, sockets: int, has_gpus: bool
) -> None:
    cores = tuple(range(100, 100 + devices + extra))
    physical = {core: 100 + (core - 100) // threads for core in cores}
    topology = Topology(
        cores,
        physical,
        {core: physical[core] % sockets for core in cores},
        tuple(device % sockets for device in range(devices)) if has_gpus else (),
    )
    groups = owned(topology, devices)
    assert all(groups)
    every = [core for group in groups for core in group]
    assert len(set(every)) == len(every) and set(every) <= set(cores)
    assert has_gpus or sorted(every) == list(cores)
    assert [threads_of([device], devices, topology) for device in range(devices)] == list(map(len, groups))
    if not has_gpus and len(set(physical.values())) >= devices:
        assert sum(len({physical[core] for core in group}) for group in groups) == len(set(physical.values()))


@settings(deadline=None)
@given(st.integers(1, 16), st.integers(0, 48))
def test_without_hyperthreads_and_sockets_each_device_has_consecutive_cores(devices: int, extra: int) -> None:
    cores = tuple(range(devices + extra))
    assert [core for group in owned(Topology(cores), devices) for core in group] == list(cores)


def test_a_machine_without_these_files_has_its_cores_only(tmp_path: Path) -> None:
    cores = tuple(sorted(os.sched_getaffinity(0)))
    assert read_topology(["0"], tmp_path) == Topology(cores, gpu_numa_nodes=(None,))


def test_the_files_of_a_machine_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 3})
    gpus = {"0000:0A:00.0": ("GPU-b", "1"), "0000:07:00.0": ("GPU-a", "0"), "0000:c0:00.0": ("GPU-c", "-1")}
    files = {
        **{f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list": f"{core % 2},{core % 2 + 2}\n"
           for core in range(4)},
        "sys/devices/system/node/node0/cpulist": "0,2\n",
        "sys/devices/system/node/node1/cpulist": "1,3\n",
        "sys/devices/system/node/node2/cpulist": "\n",
        **{f"proc/driver/nvidia/gpus/{address}/information": f"GPU UUID: \t {uuid}\n"
           for address, (uuid, _) in gpus.items()},
        **{f"sys/bus/pci/devices/{address.lower()}/numa_node": f"{node}\n" for address, (_, node) in gpus.items()},
    }  # fmt: skip
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = read_topology(["1", "GPU-a", "2", "MIG-x", "7"], tmp_path)
    assert (found.cores, found.physical_cores) == ((0, 2, 3), {0: 0, 2: 0, 3: 1})
    assert found.numa_nodes == {0: 0, 2: 0, 1: 1, 3: 1}
    assert found.gpu_numa_nodes == (1, 0, None, None, None)

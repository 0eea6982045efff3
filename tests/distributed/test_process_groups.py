"""A held port cannot be in_use by another process before a store serves on it."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest

from roll.distributed import process_groups
from roll.distributed.process_groups import (
    BroadcastGroup,
    bind_to_device,
    hold_port,
    join_as_source,
    leave_group,
    open_port,
    release_port,
    serve_store,
)

BRIEFLY = timedelta(seconds=10)


def in_use(port: int) -> bool:
    with socket.socket() as other:
        try:
            other.bind(("", port))
        except OSError:
            return True
    return False


def test_a_held_port_is_not_free():
    ports = [hold_port() for _ in range(200)]
    try:
        assert len(set(ports)) == 200
        assert all(in_use(port) for port in ports)
    finally:
        for port in ports:
            release_port(port)


def test_a_store_serves_on_the_held_socket_and_accepts_earlier_connections():
    port = hold_port()
    early = socket.create_connection(("127.0.0.1", port), timeout=5)
    store = serve_store("127.0.0.1", port, 1, BRIEFLY)
    early.close()
    store.set("who", "rank 0")
    from torch.distributed import TCPStore

    other = TCPStore("127.0.0.1", port, is_master=False, timeout=BRIEFLY)
    assert other.get("who") == b"rank 0"


def test_a_given_listener_is_held_under_its_port():
    listener = open_port()
    port = hold_port(listener=listener)
    assert port == listener.getsockname()[1] and in_use(port)
    release_port(port)
    release_port(port)
    assert listener.fileno() == -1


def test_a_port_of_another_process_is_refused_by_name():
    from torch.distributed import DistNetworkError

    with open_port() as other, pytest.raises(DistNetworkError, match=str(other.getsockname()[1])):
        serve_store("127.0.0.1", other.getsockname()[1], 1, BRIEFLY)


class Joined:
    """A process group, and how torch was asked for it."""


@pytest.mark.parametrize(("backend", "seconds"), [("gloo", 7), ("nccl", 70)])
def test_the_watchdog_of_nccl_comes_after_the_deadline_of_an_update(monkeypatch, backend, seconds):
    from torch.distributed import HashStore
    from torch.distributed import distributed_c10d as c10d

    made = Joined()
    asked = {}

    def new_group(*args, **options):
        asked.update(options, backend=args[3])
        return made, None

    monkeypatch.setattr(process_groups, "serve_store", lambda *args: HashStore())
    monkeypatch.setattr(c10d, "_new_process_group_helper", new_group)
    group = BroadcastGroup("weights-0-stage-0", "127.0.0.1", 1, 3, backend)
    assert join_as_source(group, 7) is made
    assert c10d._world.pg_group_ranks.pop(made) == {0: 0, 1: 1, 2: 2}
    assert (asked["timeout"].total_seconds(), asked["backend"]) == (seconds, backend)


@pytest.mark.parametrize(("backend", "function"), [("gloo", "destroy_process_group"), ("nccl", "_abort_process_group")])
def test_a_group_of_nccl_is_aborted_because_its_kernels_may_never_end(monkeypatch, backend, function):
    from torch.distributed import distributed_c10d as c10d

    calls = []
    for name in ("destroy_process_group", "_abort_process_group"):
        monkeypatch.setattr(c10d, name, lambda group, name=name: calls.append((name, group)))
    monkeypatch.setattr(c10d, "get_backend", lambda group: backend)
    group = Joined()
    leave_group(group)
    assert calls == [(function, group)]


def test_the_first_collective_of_all_ranks_is_on_the_ranks_own_device(monkeypatch):
    import torch

    seen = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: seen.append(tensor.device.type))
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: 1.0)
    bind_to_device(torch.device("meta"), 1)
    assert seen == ["meta"]
    with pytest.raises(RuntimeError, match="1 of 2 ranks answered"):
        bind_to_device(torch.device("cpu"), 2)


def test_a_port_of_the_loopback_address_is_closed_to_other_machines():
    with open_port("127.0.0.1") as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    with open_port("10.0.0.1") as listener:
        assert listener.getsockname()[0] in ("::", "0.0.0.0")

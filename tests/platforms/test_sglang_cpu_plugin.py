"""What every process of an engine gets on a machine without GPUs."""

from __future__ import annotations

import importlib
import socket

import psutil
import pytest
import torch.distributed as dist

from roll.platforms.sglang_cpu_plugin import serve_on_loopback


def test_a_store_of_torch_listens_on_the_loopback_address_only(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("torch.distributed.rendezvous")
    monkeypatch.setattr(module, "TCPStore", module.TCPStore)  # restored at the end
    serve_on_loopback()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        dist.barrier()
        listening = [each for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        assert {each.laddr.ip for each in listening if each.laddr.port == port} == {"127.0.0.1"}
    finally:
        dist.destroy_process_group()

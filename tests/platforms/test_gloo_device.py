"""The network thread that all gloo groups of a process share, seen in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
from pathlib import Path
import torch
import torch.distributed as dist
from roll.platforms.gloo_device import share_gloo_device

share_gloo_device()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
groups = [dist.new_group([0], backend="gloo") for _ in range(3)]
for group in groups:
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    assert value.item() == 1
dist.destroy_process_group(groups[0])
value = torch.full((1,), 2.0)
dist.all_reduce(value, group=groups[1])
assert value.item() == 2
names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
print(names.count("gloo_tcp_loop"))
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("interface", "shared"), [(None, True), ("lo", True), ("lo,lo", False)])
def test_groups_share_a_thread_unless_there_are_several_networks(
    monkeypatch: pytest.MonkeyPatch, interface: str | None, shared: bool
) -> None:
    if interface is None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    else:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert (int(ended.stdout) == 1) == shared

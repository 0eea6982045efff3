"""The network thread that gloo groups of one rank share, seen in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from roll.distributed.process_groups import hold_port, join_all_ranks
from roll.platforms.platform import LOOPBACK, get_platform


def network_threads(expected):
    count = 0  # of those with a name, which a thread gives itself a moment after it was started
    while count < expected:
        time.sleep(1)
        names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
        count = names.count("gloo_tcp_loop")
    return count


def reduced(group, value):
    tensor = torch.full((1,), value)
    dist.all_reduce(tensor, group=group)
    return tensor.item()


if sys.argv[1] == "a training rank":
    os.environ |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(hold_port(LOOPBACK))}
    join_all_ranks(get_platform("cpu"), 0, 1, start_timeout_s=600, collective_timeout_s=50)
else:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=50))
groups = [dist.new_group([0], backend="gloo") for _ in range(3)]
assert [reduced(group, 3.0) for group in groups] == [3.0] * 3
dist.destroy_process_group(groups[0])
assert reduced(groups[1], 2.0) == 2.0
alone = network_threads(int(sys.argv[2]))

backend = dist.group.WORLD._get_backend(torch.device("cpu"))
assert isinstance(backend, c10d.ProcessGroupGloo) and backend.options._timeout == timedelta(seconds=50)
c10d._set_pg_timeout(timedelta(seconds=5), groups[1])
assert groups[1]._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=5)

store, pairs, sums = dist.HashStore(), {}, {}


def join(rank):
    pairs[rank] = c10d.ProcessGroupGloo(store, rank, 2, timeout=timedelta(seconds=600))
    sums[rank] = torch.full((1,), float(rank + 1))
    pairs[rank].allreduce([sums[rank]]).wait()


ranks = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
for rank in ranks:
    rank.start()
for rank in ranks:
    rank.join()
assert [sums[rank].item() for rank in (0, 1)] == [3.0, 3.0]
print(alone, network_threads(alone + 2) - alone)
pairs.clear()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("mode", "of_single_ranks"), [("a training rank", 1), ("as torch does", 4)])
def test_groups_of_one_rank_share_a_thread_and_others_have_their_own(mode: str, of_single_ranks: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode, str(of_single_ranks)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == [str(of_single_ranks), "2"]

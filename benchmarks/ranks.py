"""Runs a job on all ranks of a layout: one process, one core and one thread each, with a port for the process group."""

from __future__ import annotations

import os
import pickle
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from roll.configs.devices.parallel_layout import ParallelLayout


def spawn_ranks(layout: ParallelLayout, job: Callable[..., Any], folder: Path, work: Any) -> Any:
    """Runs `job(layout, rank, folder, work)` on all ranks, each in its own process; returns the result of rank 0."""
    from torch.multiprocessing.spawn import spawn

    from roll.distributed.process_groups import open_port

    result = folder / "result.pickle"
    with open_port() as listener:
        arguments = (layout, job, folder, work, listener, result)
        spawn(_rank_main, arguments, nprocs=layout.world_size)
    return pickle.loads(result.read_bytes())


def _rank_main(
    rank: int,
    layout: ParallelLayout,
    job: Callable[..., Any],
    folder: Path,
    work: Any,
    listener: socket.socket,
    result: Path,
) -> None:
    import torch

    from roll.distributed.process_groups import hold_port
    from roll.platforms import get_platform

    warnings.filterwarnings("ignore")
    cores = sorted(os.sched_getaffinity(0))
    get_platform("cpu").setup_process([cores[rank % len(cores)]], threads=1)
    port = listener.getsockname()[1]
    if rank == 0:
        hold_port(listener=listener)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    outcome = job(layout, rank, folder, work)
    if rank == 0:
        result.write_bytes(pickle.dumps(outcome))
    torch.distributed.destroy_process_group()  # threads of a group that outlive Python's end abort the process

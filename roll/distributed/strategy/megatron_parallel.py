"""Process groups and seeds of one Megatron rank."""

from __future__ import annotations

import math
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from roll.configs.layout import ParallelLayout, RankCoordinates
from roll.configs.seeds import role_seed
from roll.distributed.ports import serve_store
from roll.platforms.platform import Platform


def join_process_group(
    platform: Platform, layout: ParallelLayout, rank: int, start_timeout_s: float, collective_timeout_s: float
) -> RankCoordinates:
    """Joins the role's ranks at MASTER_ADDR:MASTER_PORT and builds Megatron's groups.

    Args:
        platform: names the collective backend.
        layout: sizes of the parallel dimensions; the world size is their product.
        rank: this rank.
        start_timeout_s: longest wait for all ranks to come up.
        collective_timeout_s: longest any later collective may take.

    Returns:
        Where this rank stands.

    Raises:
        RuntimeError: the environment lacks the address, contradicts the layout, or ranks did not come up in time.
    """
    address, port = _master()
    _check_environment(layout, rank)
    timeout = timedelta(seconds=start_timeout_s)
    if rank == 0:
        store = serve_store(address, port, layout.world_size, timeout)
    else:
        store = dist.TCPStore(address, port, layout.world_size, is_master=False, timeout=timeout)
    dist.init_process_group(
        platform.collective_backend,
        store=store,
        rank=rank,
        world_size=layout.world_size,
        timeout=timedelta(seconds=collective_timeout_s),
    )
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        distributed_timeout_minutes=math.ceil(collective_timeout_s / 60),
        create_gloo_process_groups=platform.collective_backend != "gloo",
    )
    return layout.coordinates(rank)


def leave_process_group() -> None:
    """Undoes `join_process_group`."""
    from megatron.core import parallel_state

    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def seed_rank(seed: int, role: str, coordinates: RankCoordinates) -> None:
    """Seeds torch and Megatron's tracker: equal over data ranks' weights, different over stages."""
    from megatron.core import tensor_parallel

    tensor_parallel.model_parallel_cuda_manual_seed(role_seed(seed, role, coordinates.pipeline), force_reset_rng=True)
    torch.manual_seed(role_seed(seed, role, "torch", coordinates.pipeline, coordinates.data, coordinates.tensor))


def _master() -> tuple[str, int]:
    try:
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except KeyError as missing:
        raise RuntimeError(f"environment variable {missing} is not set: the ranks cannot find each other") from None


def _check_environment(layout: ParallelLayout, rank: int) -> None:
    for name, expected in (("RANK", rank), ("WORLD_SIZE", layout.world_size)):
        value = os.environ.get(name)
        if value is not None and int(value) != expected:
            raise RuntimeError(f"environment variable {name} is {value} where the layout {layout} says {expected}")

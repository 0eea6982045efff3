"""Megatron's distributed checkpoint of one training role."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint import FileSystemWriter  # type: ignore[attr-defined]
from torch.distributed.checkpoint import save as save_distributed  # type: ignore[attr-defined]

from roll.configs.megatron import LAYER_SPLITS
from roll.distributed.strategy.megatron_optimizer import parts
from roll.distributed.strategy.safe_loading import check_metadata, only_data

FORMAT_KEY = "distrib_optim_sharding_type"

GATHERED_FORMAT = {FORMAT_KEY: "fully_reshardable"}
OPTIMIZER_FORMAT = {FORMAT_KEY: "dp_reshardable"}
"""Megatron's format in which every rank writes its own part of the optimizer without gathering it first.
`fully_reshardable`, which earlier checkpoints have, gathers fp32 weights and both moments of all data ranks on each of
them, 12 bytes per parameter of host memory. With either, `load` requires the layout of `save`: random state is saved
per rank."""


class InProcessSave(TorchDistSaveShardedStrategy):  # type: ignore[misc]  # Megatron is not typed
    """Megatron's torch_dist format, written by this process.

    Megatron's own writer forks a process per file and keeps a manager process for its results, even for a save that
    is synchronous; forking a process with threads, collectives and a Ray actor is not safe.
    """

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Writes this rank's tensors; collective over all ranks."""
        tensors, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        save_distributed(
            mcore_to_pyt_state_dict(tensors, False),
            storage_writer=FileSystemWriter(checkpoint_dir, thread_count=self.thread_count),
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
            ),
        )


def save(
    folder: Path, wrapped: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer, optimizer_steps: int
) -> None:
    """Writes weights, optimizer, step count and random state; collective over all ranks, complete on return."""
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    optimizer_format = _format(wrapped, optimizer)
    state = _sharded_state(wrapped, optimizer, optimizer_format, loading=False)
    state |= {"optimizer_steps": optimizer_steps, "layout": _layout(wrapped)}
    strategy = InProcessSave(backend="torch_dist", version=1, thread_count=1)
    dist_checkpointing.save(state, str(folder), sharded_strategy=strategy, content_metadata=optimizer_format)
    torch.distributed.barrier()


def _format(wrapped: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> dict[str, str]:
    """OPTIMIZER_FORMAT, or the earlier one where Megatron cannot read it.

    That is where a rank's part of a bucket has no parameter, and with `use_precision_aware_optimizer`.
    """
    (part,) = parts(optimizer)
    if part.config.use_precision_aware_optimizer:
        return GATHERED_FORMAT
    buckets = [bucket for maps in getattr(part, "gbuf_ranges", []) for each in maps.values() for bucket in each]
    empty = torch.tensor(float(any(not bucket["param_map"] for bucket in buckets)))
    empty = empty.to(next(wrapped[0].parameters()).device)
    torch.distributed.all_reduce(empty, op=torch.distributed.ReduceOp.MAX)
    return GATHERED_FORMAT if empty.item() else OPTIMIZER_FORMAT


def load(folder: Path, wrapped: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> int:
    """Restores what `save` wrote; the layout must be the same.

    Returns:
        Optimizer steps taken so far.

    Raises:
        FileNotFoundError: `folder` contains no checkpoint.
        ValueError: it was written at another layout, or it holds objects that are no data.
    """
    if not (folder / "metadata.json").is_file():
        raise FileNotFoundError(f"{folder}: contains no Megatron checkpoint (metadata.json)")
    check_metadata(folder / ".metadata")
    with only_data():
        return _load(folder, wrapped, optimizer)


def _load(folder: Path, wrapped: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> int:
    common = dist_checkpointing.load_common_state_dict(str(folder))
    written, ours = common["layout"], _layout(wrapped)
    if written != ours:
        raise ValueError(f"{folder}: written with {written}, this run has {ours}; resume with the same")
    _allocate_optimizer_state(optimizer)
    written_as = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or OPTIMIZER_FORMAT
    state = dist_checkpointing.load(_sharded_state(wrapped, optimizer, written_as, loading=True), str(folder))
    for name, each in _named(wrapped).items():
        each.module.load_state_dict(state[name])
    _load_optimizer(optimizer, state["optimizer"], written_as[FORMAT_KEY])
    _set_random_state(state["random"])
    return int(state["optimizer_steps"])


def _allocate_optimizer_state(optimizer: MegatronOptimizer) -> None:
    """Allocates the state of torch's Adam, which would do so on its first step, so that it can be read into."""
    (inner,) = (part.optimizer for part in parts(optimizer))
    if not isinstance(inner, torch.optim.AdamW):
        return
    for group in inner.param_groups:
        for parameter in group["params"]:
            if not inner.state[parameter]:
                moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
                inner.state[parameter] = {"step": torch.zeros(()), **moments}


@torch.no_grad()
def _load_optimizer(optimizer: MegatronOptimizer, state: dict[str, Any], written_as: str) -> None:
    """Loads `state` and restores the step counters of torch's Adam.

    Megatron-Core 0.16 copies every entry of a parameter's state, finds no stored `step`, and gives all parameters one
    shared counter, which would then advance once per parameter. So the counters are restored here.
    """
    (inner,) = parts(optimizer)
    sharded = state.pop("param_state", None)
    optimizer.load_state_dict(state)
    entries = [entry for entry in inner.optimizer.state.values() if "step" in entry]
    counters = [entry.pop("step") for entry in entries]
    if sharded is not None:
        getattr(inner, f"load_parameter_state_from_{written_as}")(sharded)
    for entry, counter in zip(entries, counters, strict=True):
        entry["step"] = counter.clone()


def _sharded_state(
    wrapped: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    optimizer_format: dict[str, str],
    loading: bool,
) -> dict[str, Any]:
    metadata = dict(optimizer_format)  # Megatron adds the data-parallel group of this moment to it
    models = {name: each.module.sharded_state_dict(metadata=metadata) for name, each in _named(wrapped).items()}
    return {
        **models,
        "optimizer": optimizer.sharded_state_dict(models, is_loading=loading, metadata=metadata),
        "random": _random_state(),
    }


def _named(wrapped: Sequence[DistributedDataParallel]) -> dict[str, DistributedDataParallel]:
    """Megatron's names of the virtual stages of a rank."""
    return {"model": wrapped[0]} if len(wrapped) == 1 else {f"model{n}": each for n, each in enumerate(wrapped)}


def _layout(wrapped: Sequence[DistributedDataParallel]) -> dict[str, Any]:
    """Sizes of the parallel dimensions, in the order of Megatron's ranks, and what else decides who has which tensors.

    Without overlapped reduction there is one bucket, and without the options of `LAYER_SPLITS` stages are equal. The
    optimizer's tensors also depend on the dtypes of weights and gradients, and on how it is distributed.
    """
    config, buckets = wrapped[0].config, wrapped[0].ddp_config.bucket_size
    more: dict[str, Any] = {name: int(value) for name in LAYER_SPLITS if (value := getattr(config, name))}
    if config.params_dtype != torch.float32:
        more |= {"dtype": str(config.params_dtype).removeprefix("torch.")}
    if not wrapped[0].ddp_config.use_distributed_optimizer:
        more |= {"use_distributed_optimizer": False}
    if not wrapped[0].ddp_config.grad_reduce_in_fp32:
        more |= {"accumulate_allreduce_grads_in_fp32": False}
    return _sizes() | more | ({"bucket_size (overlap_grad_reduce: true)": buckets} if buckets else {})


def _sizes() -> dict[str, int]:
    return {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "data": parallel_state.get_data_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
    }


def _random_state() -> ShardedObject:
    """State of this rank's random generators."""
    position = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    state = {
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject("random", state, tuple(_sizes().values()), position, replica_id=0)


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["device"])
    get_cuda_rng_tracker().set_states(state["tracker"])

"""Megatron's distributed checkpoint of one training role; it can be read at any layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import FileSystemWriter  # type: ignore[attr-defined]
from torch.distributed.checkpoint import save as save_distributed  # type: ignore[attr-defined]

from roll.configs.devices.megatron import LAYER_SPLITS
from roll.distributed.train.checkpoint.frozen_base import Base, check_base
from roll.distributed.train.checkpoint.optimizer_pieces import (
    HeldState,
    Piece,
    held_states,
    load_pieces,
    pieces_of,
    save_pieces,
)
from roll.distributed.train.checkpoint.safe_loading import check_metadata, only_data
from roll.distributed.train.megatron_optimizer import parts

PRECISION = ("dtype", "use_distributed_optimizer", "accumulate_allreduce_grads_in_fp32")
"""What a run has to have in common with its checkpoint, of `_layout`."""

FORMAT_KEY = "distrib_optim_sharding_type"

PIECES = {FORMAT_KEY: "pieces"}
"""The format of `optimizer_pieces`. Megatron's own ones either gather fp32 weights and both moments of all data ranks,
12 bytes per parameter of host memory (`fully_reshardable`), or can be read at the same layout only (`dp_reshardable`).
Earlier checkpoints have one of those, which is the default of what does not say so."""
EARLIER = {FORMAT_KEY: "dp_reshardable"}

OPTIMIZER_FOLDER = "optimizer"
"""Folder of the pieces in that of the checkpoint."""


class InProcessSave(TorchDistSaveShardedStrategy):  # type: ignore[misc]  # Megatron is not typed
    """Megatron's torch_dist format, written later by this process.

    Megatron's own writer forks a process per file and keeps a manager process for its results, even for a save that
    is synchronous; forking a process with threads, collectives and a Ray actor is not safe.
    """

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        self._state, self._folder = state, checkpoint_dir

    def write(self, group: ProcessGroup) -> None:
        """Writes this rank's tensors; collective over the group of all ranks."""
        save_distributed(
            mcore_to_pyt_state_dict(self._state, False),
            storage_writer=FileSystemWriter(self._folder, thread_count=self.thread_count, sync_files=False),
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
            ),
            process_group=group,
        )


def begin_save(
    folder: Path,
    wrapped: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    optimizer_steps: int,
    base: Base | None = None,
) -> Callable[[ProcessGroup], None]:
    """Begins a checkpoint of weights, optimizer, step count and random state; collective over all ranks.

    With a `base` the weights are adapters.

    Returns:
        Writes the tensors, which it refers to, so that they must not change before; collective over a group of all
        ranks, and the checkpoint is complete when it returns on all of them.
    """
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    _allocate_optimizer_state(optimizer)  # before the first step there is none
    written_as = _format(optimizer)
    models = _models(wrapped)
    pieces: list[Piece] | None = None
    if written_as == PIECES:
        pieces = pieces_of(_held(optimizer), models)
    state = _sharded_state(models, optimizer, written_as, loading=False)
    state |= {"random": _random_state(), "optimizer_steps": optimizer_steps, "layout": _layout(wrapped)}
    state |= {"base": base} if base else {}
    strategy = InProcessSave(backend="torch_dist", version=1, thread_count=1)
    dist_checkpointing.save(state, str(folder), sharded_strategy=strategy, content_metadata=written_as)

    def write(group: ProcessGroup) -> None:
        if pieces is not None:
            save_pieces(folder / OPTIMIZER_FOLDER, pieces, group)
        strategy.write(group)

    return write


def _format(optimizer: MegatronOptimizer) -> dict[str, str]:
    """PIECES where each data rank holds a part of the state; any other optimizer is Megatron's to save."""
    return PIECES if all(hasattr(part, "gbuf_ranges") for part in parts(optimizer)) else EARLIER


def _held(optimizer: MegatronOptimizer) -> list[HeldState]:
    """What this rank holds of the state of all optimizers: that of experts is one of its own."""
    return [held for part in parts(optimizer) for held in held_states(part)]


def load(
    folder: Path, wrapped: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer, base: Base | None = None
) -> int:
    """Restores what `begin_save` wrote, at this layout or another one; returns the optimizer steps taken so far.

    At another layout the random generators are not restored, since each belongs to a rank. Checkpoints of earlier
    versions need the layout at which they were written.

    Raises:
        FileNotFoundError: `folder` contains no checkpoint.
        ValueError: it was written in another precision, at another layout by an earlier version, for another `base`, or
            it holds objects that are no data.
    """
    if not (folder / "metadata.json").is_file():
        raise FileNotFoundError(f"{folder}: contains no Megatron checkpoint (metadata.json)")
    check_metadata(folder / ".metadata")
    with only_data():
        return _load(folder, wrapped, optimizer, base or {})


def _load(folder: Path, wrapped: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer, base: Base) -> int:
    common = dist_checkpointing.load_common_state_dict(str(folder))
    check_base(folder, common.get("base", {}), base)
    written, ours = common["layout"], _layout(wrapped)
    written_as = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or EARLIER
    moves = written_as == PIECES or not ours.get("use_distributed_optimizer", True)
    fixed = PRECISION if moves else ours.keys() | written.keys()
    if {key: written.get(key) for key in fixed} != {key: ours.get(key) for key in fixed}:
        raise ValueError(f"{folder}: written with {written}, this run has {ours}; resume with the same")
    _allocate_optimizer_state(optimizer)
    wanted = _sharded_state(_models(wrapped), optimizer, written_as, loading=True)
    if written == ours:
        wanted["random"] = _random_state()
    state = dist_checkpointing.load(wanted, str(folder))
    for name, each in _named(wrapped).items():
        each.module.load_state_dict(state[name], strict=not base)
    _load_optimizer(optimizer, state["optimizer"], written_as[FORMAT_KEY])
    if written_as == PIECES:
        _load_pieces(folder / OPTIMIZER_FOLDER, wrapped, optimizer)
    if written == ours:
        _set_random_state(state["random"])
    return int(state["optimizer_steps"])


@torch.no_grad()
def _load_pieces(folder: Path, wrapped: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    held = {part: list(held_states(part)) for part in parts(optimizer)}
    load_pieces(folder, pieces_of([each for states in held.values() for each in states], _models(wrapped)))
    for part, of_part in held.items():
        if part.config.use_precision_aware_optimizer:  # it gives copies where it scales its states
            for parameter, _, states in of_part:
                part._set_main_param_and_optimizer_states(parameter, states)


def _allocate_optimizer_state(optimizer: MegatronOptimizer) -> None:
    """Allocates the state of torch's Adam, which would do so on its first step, so that it can be saved or loaded."""
    for inner in (part.optimizer for part in parts(optimizer)):
        if not isinstance(inner, torch.optim.AdamW):
            continue
        for parameter in (parameter for group in inner.param_groups for parameter in group["params"]):
            if not inner.state[parameter]:
                moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
                inner.state[parameter] = {"step": torch.zeros(()), **moments}


@torch.no_grad()
def _load_optimizer(optimizer: MegatronOptimizer, state: dict[str, Any], written_as: str) -> None:
    """Loads `state` and restores the step counters of torch's Adam.

    Megatron-Core 0.16 copies every entry of a parameter's state, finds no stored `step`, and gives all parameters one
    shared counter, which would then advance once per parameter. So the counters are restored here.
    """
    several = parts(optimizer)
    if written_as == PIECES[FORMAT_KEY]:
        states = [_of_part(state, part) for part in several]
    else:
        states = [state] if len(several) == 1 else [own for _, own in sorted(state.items())]
    for part, own in zip(several, states, strict=True):
        sharded = own.pop("param_state", None)
        part.load_state_dict(own)
        entries = [entry for entry in part.optimizer.state.values() if "step" in entry]
        counters = [entry.pop("step") for entry in entries]
        if sharded is not None:
            getattr(part, f"load_parameter_state_from_{written_as}")(sharded)
        for entry, counter in zip(entries, counters, strict=True):
            entry["step"] = counter.clone()


def _of_part(state: dict[str, Any], part: Any) -> dict[str, Any]:
    """The options of a checkpoint, which are those of the dense weights, for one of the optimizers."""
    of_experts = {"is_expert_parallel": part.param_groups[0]["is_expert_parallel"]}
    groups = [group | of_experts for group in state["optimizer"]["param_groups"]]
    return {**state, "optimizer": state["optimizer"] | {"param_groups": groups}}


def _sharded_state(
    models: dict[str, Any], optimizer: MegatronOptimizer, optimizer_format: dict[str, str], loading: bool
) -> dict[str, Any]:
    metadata = dict(optimizer_format)  # Megatron adds the data-parallel group of this moment to it
    if optimizer_format == PIECES:  # the same at layouts where experts have no optimizer of their own
        return {**models, "optimizer": parts(optimizer)[0].state_dict()}
    return {**models, "optimizer": optimizer.sharded_state_dict(models, is_loading=loading, metadata=metadata)}


def _models(wrapped: Sequence[DistributedDataParallel]) -> dict[str, Any]:
    """Megatron's description of the parameters of each virtual stage, and of their places in the whole model."""
    return {name: _stored(each.module) for name, each in _named(wrapped).items()}


def _stored(stage: Any) -> dict[str, Any]:
    """All parameters, or the adapters alone: a part of the layers cannot be left out, since they are one tensor."""
    state: dict[str, Any] = stage.sharded_state_dict(metadata=dict(EARLIER))
    return {name: each for name, each in state.items() if name.startswith("adapters.")} or state


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
    if config.context_parallel_size > 1:
        more |= {"context": config.context_parallel_size}
    if config.num_moe_experts:
        more |= {"expert": config.expert_model_parallel_size, "expert_tensor": config.expert_tensor_parallel_size}
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
    return ShardedObject(
        "random", state, tuple(_sizes().values()), position, parallel_state.get_context_parallel_rank()
    )


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["device"])
    get_cuda_rng_tracker().set_states(state["tracker"])

"""The frozen Megatron model of a role, which computes log-probs or values, and the process groups of its ranks.

Imports Megatron: on a CPU, `Platform.prepare_megatron` must be called before this module is imported.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from roll.configs.arguments import TORCH_DTYPES
from roll.configs.devices.megatron import MegatronConfig, virtual_stages, with_defaults
from roll.configs.devices.parallel_layout import ParallelLayout, RankCoordinates
from roll.configs.pipeline import role_seed
from roll.configs.roles import MegatronRoleConfig
from roll.configs.run_options import TrainerOptions
from roll.datasets.batch import POLICY, ROUTING, Batch
from roll.distributed.process_groups import join_all_ranks
from roll.distributed.train.host_copies import HostCopies, StateKind
from roll.distributed.train.megatron_forward import ForwardPass, ValuePass
from roll.distributed.train.megatron_model import (
    BuildOptions,
    HiddenStateModel,
    build_gpt_model,
    gradient_kernel_available,
    transformer_engine_available,
)
from roll.hub.names import local_model
from roll.models.families.shape import ModelShape, known_model_shape
from roll.models.hf_import import import_hf
from roll.models.lora import Adapters
from roll.platforms.platform import Platform


class MegatronInferStrategy:
    """A frozen Megatron model: log-probs of given tokens, or values of a role with a value head."""

    def __init__(
        self,
        worker_config: MegatronRoleConfig,
        pipeline_config: TrainerOptions,
        layout: ParallelLayout,
        rank: int,
        platform: Platform,
        role: str = "megatron",
    ) -> None:
        """Builds nothing: `initialize` does. Seeds are derived from `role`."""
        self.worker_config = worker_config
        self.pipeline_config = pipeline_config
        self.layout = layout
        self.rank = rank
        self.platform = platform
        self.role = role
        self.megatron: MegatronConfig = worker_config.strategy_args.strategy_config
        self.adapters: Sequence[Adapters] = ()

    def select(self, policy: str) -> None:
        """Makes a policy the one that is computed and trained; a frozen model is the only one."""

    def initialize(self) -> None:
        """Joins the role's process group at MASTER_ADDR and MASTER_PORT, and builds the model with its weights.

        Raises:
            UnsupportedModel: the model folder is missing or its model is not supported.
            ValueError: the layout does not divide the model.
            RuntimeError: the ranks did not find each other in time.
        """
        folder = self.model_folder
        role = self.worker_config
        self.model: ModelShape = known_model_shape(folder, role.value_head, role.value_bias)
        self.device = self.platform.torch_device(0)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.pipeline_config.deterministic:
            self.platform.use_deterministic_kernels()
        start, call = self.pipeline_config.start_timeout_s, self.pipeline_config.rpc_timeout_s
        self.megatron = self._with_defaults(self.megatron)
        virtual = virtual_stages(self.megatron)
        self.coordinates = join_process_group(self.platform, self.layout, self.rank, start, max(start, call), virtual)
        seed_rank(self.pipeline_config.seed, self.role, self.coordinates)
        self.stages = self._build_stages(folder)
        self.states = HostCopies(self._state_tensors, self.platform)
        self._set_up()

    @property
    def model_folder(self) -> Path:
        """The role's own model, or the pipeline's.

        Raises:
            ValueError: neither is set.
        """
        path = self.worker_config.model_args.model_name_or_path or self.pipeline_config.pretrain
        if path is None:
            raise ValueError("model_args.model_name_or_path: not set, and neither is pretrain; name a HF model folder")
        return local_model(path)

    def compute_log_probs(self, data: Batch) -> Batch:
        """Log-probs and entropies of the given tokens.

        Args:
            data: `input_ids`, `attention_mask`, `position_ids` [B, T]; `meta_info["temperature"]` divides the
                logits; `meta_info["micro_batches"]` lists the sample indices of each forward pass. Where the batch
                has a `response_mask`, only its tokens are scored and the others are 0.

        Returns:
            `log_probs` and `entropy` [B, T] float32 in the order of `data`, index t for token t (0 at t = 0),
            on every tensor-parallel rank of the last pipeline stage; no samples elsewhere. With
            `meta_info["sum_pi_squared"]` also `sum_pi_squared` [B, T], the sum of the squared probabilities of all
            tokens that could have been token t. With `meta_info["top_k"]` instead `top_ids` [B, T, K] int32, the most
            likely tokens in place of token t, -1 for none, and `top_log_probs` [B, T, K]; K is at most the vocabulary.
            With `meta_info["base"]` they are those of the model without its adapters. With
            `meta_info["records_routing"]` there is also a column `ROUTING` with the experts of each token.
        """
        more = ("top_ids", "top_log_probs") if data.meta_info.get("top_k") else ("sum_pi_squared",)
        return self._score(data, ("log_probs", "entropy", *more))

    def compute_values(self, data: Batch) -> Batch:
        """Values of the states before given tokens; arguments and shapes as for `compute_log_probs`.

        Returns:
            `values` [B, T] float32, index t for the tokens before t (0 at t = 0), on every tensor-parallel rank of the
            last pipeline stage; no samples elsewhere.
        """
        return self._score(data, ("values",))

    def _score(self, data: Batch, names: Sequence[str]) -> Batch:
        """A forward pass; its outputs under the first of these names."""
        self.states.require("parameters")
        meta = data.meta_info
        self.select(meta.get(POLICY, ""))
        squares = bool(meta.get("sum_pi_squared"))
        top_k = int(meta.get("top_k", 0))
        arguments = data.batch, meta["micro_batches"], meta["temperature"], squares, top_k
        columns: dict[str, Any] = {}
        with self.adapters[0].off() if meta.get("base") else contextlib.nullcontext():
            if meta.get("records_routing"):
                outputs, columns[ROUTING] = self.forward.recorded(*arguments)
            else:
                self.forward.routing = data.non_tensor_batch.get(ROUTING, ())
                outputs = self.forward.scores(*arguments)
        if outputs is None:
            return Batch({})
        return Batch(dict(zip(names, outputs, strict=False)), columns)

    def memory(self) -> dict[str, int]:
        """Bytes of this process as the platform counts them, and of the parameters."""
        return {**self.platform.memory(), "parameters": total_bytes(self._parameters())}

    def offload(self, kinds: Sequence[StateKind]) -> int:
        """Moves states to host memory; returns the bytes of the device that are free now."""
        return self.states.offload(kinds)

    def _state_tensors(self, kind: StateKind) -> Iterable[torch.Tensor]:
        return self._parameters() if kind == "parameters" else ()

    def _parameters(self) -> Iterator[torch.Tensor]:
        return (parameter for stage in self.stages for parameter in stage.parameters())

    def shutdown(self) -> None:
        """Leaves the process group, so that this process can join another."""
        for stage in self.stages:
            _forget_graphs(stage)
        leave_process_group()

    def _set_up(self) -> None:
        for stage in self.stages:
            stage.requires_grad_(False).eval()
        self.forward = self._forward_pass(self.stages)

    def _forward_pass(self, wrapped: Sequence[torch.nn.Module]) -> ForwardPass:
        kind = ValuePass if self.worker_config.value_head else ForwardPass
        packed, on_cpu = self.worker_config.use_sequence_packing, self.device.type == "cpu"
        return kind(wrapped, self.stages, self.model, self.device, packed, shared=on_cpu and self.layout.context == 1)

    def _with_defaults(self, megatron: MegatronConfig) -> MegatronConfig:
        on_gpu = self.device.type == "cuda"
        return with_defaults(
            megatron,
            on_gpu,
            self.layout.data * self.layout.context,
            self._use_transformer_engine(),
            gradient_kernel_available(),
        )

    def _build_stages(self, folder: Path) -> list[HiddenStateModel]:
        options = BuildOptions(
            megatron=self.megatron,
            dtype=getattr(torch, TORCH_DTYPES[self.worker_config.model_args.dtype]),
            transformer_engine=self._use_transformer_engine(),
            deterministic=self.pipeline_config.deterministic and self.device.type == "cuda",
        )
        stages = build_gpt_model(self.model, options)
        for stage in stages:
            place = self.layout.expert_place(self.rank)
            import_hf(stage, folder, self.model, self.coordinates.tensor, self.layout.tensor, place)
        return stages

    def _use_transformer_engine(self) -> bool:
        """On a GPU where it is installed, unless `attn_implementation: sdpa` declines it; fp32 would be rounded.

        Its spec does not compute the layers of every family.
        """
        model = self.worker_config.model_args
        usable = self.device.type == "cuda" and transformer_engine_available()
        if not self.model.is_plain:
            return False
        if model.attn_implementation == "fa2" and not usable:
            raise ValueError("attn_implementation: fa2 needs platform cuda with Transformer Engine; use auto or sdpa")
        if model.attn_implementation == "sdpa" or model.dtype == "fp32":
            return False
        backend = self.megatron.attention_backend
        if backend != "auto" and not usable:
            raise ValueError(f"attention_backend: {backend} needs platform cuda with Transformer Engine; use auto")
        return usable


def total_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def join_process_group(
    platform: Platform,
    layout: ParallelLayout,
    rank: int,
    start_timeout_s: float,
    collective_timeout_s: float,
    virtual: int | None = None,
) -> RankCoordinates:
    """Joins the role's ranks at MASTER_ADDR:MASTER_PORT and builds Megatron's groups; returns this rank's coordinates.

    The parts of each pipeline stage are interleaved if there are `virtual` ones. Timeouts as of `join_all_ranks`.

    Raises:
        RuntimeError: the environment lacks the address, contradicts the layout, or ranks did not start in time.
    """
    _check_environment(layout, rank)
    join_all_ranks(platform, rank, layout.world_size, start_timeout_s, collective_timeout_s)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        context_parallel_size=layout.context,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=virtual,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        distributed_timeout_minutes=math.ceil(collective_timeout_s / 60),
        create_gloo_process_groups=platform.collective_backend != "gloo",
    )
    return layout.coordinates(rank)


def _forget_graphs(stage: torch.nn.Module) -> None:
    """Drops the tensors that token dispatchers keep of their last forward pass.

    Their graph refers to the weights, and so to the model and its process groups: a cycle through nodes of autograd,
    which Python never frees.
    """
    for module in stage.modules():
        dispatcher = getattr(module, "token_dispatcher", None)
        if dispatcher is not None:
            kept = [name for name, value in vars(dispatcher).items() if isinstance(value, torch.Tensor)]
            vars(dispatcher).update(dict.fromkeys(kept))


def leave_process_group() -> None:
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def seed_rank(seed: int, role: str, coordinates: RankCoordinates) -> None:
    """Seeds torch and Megatron's tracker, which must agree over data ranks and differ over pipeline stages."""
    tensor_parallel.model_parallel_cuda_manual_seed(role_seed(seed, role, coordinates.pipeline), force_reset_rng=True)
    torch.manual_seed(role_seed(seed, role, "torch", coordinates.pipeline, coordinates.data, coordinates.tensor))


def _check_environment(layout: ParallelLayout, rank: int) -> None:
    for name, expected in (("RANK", rank), ("WORLD_SIZE", layout.world_size)):
        value = os.environ.get(name)
        if value is not None and int(value) != expected:
            raise RuntimeError(f"environment variable {name} is {value}, but the layout {layout} needs {expected}")

"""The Megatron model of a role: `MegatronInferStrategy` computes log-probs, `MegatronTrainStrategy` is also trained.

Imports Megatron: on a CPU, `Platform.prepare_megatron` must be called before this module is imported.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from tensordict import TensorDict

from roll.algorithms.aggregation import LossScale
from roll.algorithms.losses import LOSSES
from roll.algorithms.options.policy_options import PolicySettings
from roll.configs.arguments import TORCH_DTYPES, TrainModelArguments
from roll.configs.devices.megatron import MegatronConfig, MegatronTrainConfig, virtual_stages, with_defaults
from roll.configs.devices.parallel_layout import ParallelLayout, RankCoordinates
from roll.configs.pipeline import role_seed
from roll.configs.roles import ActorTrainConfig, MegatronRoleConfig, TrainedRoleConfig
from roll.configs.run_options import TrainerOptions
from roll.datasets.batch import ROUTING, Batch
from roll.distributed.process_groups import join_all_ranks
from roll.distributed.train.checkpoint import megatron_checkpoint
from roll.distributed.train.checkpoint.background_save import BackgroundSave
from roll.distributed.train.checkpoint.frozen_base import Base, frozen_base
from roll.distributed.train.expert_balance import ExpertBalance
from roll.distributed.train.host_copies import ALL_STATES, HostCopies, StateKind
from roll.distributed.train.learning_rate import LearningRate
from roll.distributed.train.megatron_forward import (
    ForwardPass,
    LossFunction,
    ValuePass,
    over_optimizer_steps,
    reduce_micro_batches,
)
from roll.distributed.train.megatron_model import (
    BuildOptions,
    HiddenStateModel,
    build_gpt_model,
    freeze,
    gradient_kernel_available,
    transformer_engine_available,
)
from roll.distributed.train.megatron_optimizer import (
    build_optimizer,
    require_finite,
    update,
    wrap_model,
)
from roll.distributed.train.megatron_weights import MegatronWeights
from roll.distributed.train.router_replay import RoutingReplay
from roll.hub.names import local_model
from roll.models.families.frozen import frozen_names
from roll.models.families.shape import ModelShape, known_model_shape
from roll.models.hf_import import import_hf
from roll.models.lora import AdapterOptions, Adapters, adapter_norms, attach_adapters, first_adapter, saved_adapter
from roll.platforms.platform import Platform


class OptimizerStep(TypedDict):
    """One optimizer step of a shard: its micro-batches, and token and sequence counts of the whole global batch."""

    micro_batches: list[list[int]]
    tokens: float
    sequences: float


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
        return {**self.platform.memory(), "parameters": _bytes(self._parameters())}

    def offload(self, kinds: Sequence[StateKind]) -> int:
        """Moves states to host memory; returns the bytes of the device that are free now."""
        return self.states.offload(kinds)

    def _state_tensors(self, kind: StateKind) -> Iterable[torch.Tensor]:
        return self._parameters() if kind == "parameters" else ()

    def _parameters(self) -> Iterator[torch.Tensor]:
        return (parameter for stage in self.stages for parameter in stage.parameters())

    def shutdown(self) -> None:
        """Leaves the process group, so that this process can join another."""
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


class MegatronTrainStrategy(MegatronInferStrategy):
    """A Megatron model with its optimizer.

    Attributes:
        weights: the weights of this stage under their HF names.
        saving: writes checkpoints.
        optimizer_steps: taken so far.
    """

    def train_step(
        self, data: Batch, kept: list[tuple[torch.Tensor, torch.Tensor | None]] | None = None
    ) -> dict[str, float]:
        """Optimizer steps over this rank's shard.

        Args:
            data: samples of this data-parallel rank; `meta_info["optimizer_steps"]` is a list of `OptimizerStep`,
                `meta_info["loss"]` names the loss in `roll.algorithms.losses`, `meta_info["loss_config"]` is the
                loss's last argument, and `meta_info["temperature"]` divides the logits (1 where absent).
            kept: gets the log-probs of each micro-batch, in their order, and the entropy where there is one.

        Returns:
            Metrics reduced over micro-batches, ranks and optimizer steps, the same on every rank: `loss`,
            `grad_norm`, `lr`, and what the loss reports.

        Raises:
            NonFiniteError: a loss or gradient norm is not finite; the message names the optimizer step.
        """
        self.states.require(*ALL_STATES)
        meta = data.meta_info
        function, config = LOSSES[meta["loss"]], meta["loss_config"]
        entropy_gradient = isinstance(config, PolicySettings) and config.needs_entropy_gradient
        length = self.pipeline_config.max_sequence_length
        steps: list[OptimizerStep] = meta["optimizer_steps"]
        results = []
        for step in steps:
            scale = LossScale(float(step["tokens"]), float(step["sequences"]), length)

            def loss(
                log_probs: torch.Tensor, entropy: torch.Tensor | None, fields: TensorDict, scale: LossScale = scale
            ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
                if kept is not None:
                    kept.append((log_probs.detach(), None if entropy is None else entropy.detach()))
                return function(log_probs, entropy, fields, scale, config)

            results.append(self.optimizer_step(data, step["micro_batches"], loss, entropy_gradient))
        self._finish_gathers()
        return over_optimizer_steps(results) | self._adapter_norms(results)

    def train_step_with_log_probs(self, data: Batch) -> tuple[dict[str, float], Batch]:
        """`train_step` with one optimizer step, and what its forward passes gave, before the update.

        These are `log_probs` and `entropy` [b, T]: 0 where no token is scored, and on all but the last pipeline stage.
        """
        kept: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        metrics = self.train_step(data, kept)
        log_probs, entropies = (torch.zeros(data.batch["input_ids"].shape, dtype=torch.float32) for _ in range(2))
        (step,) = data.meta_info["optimizer_steps"]
        for indices, (part, entropy) in zip(step["micro_batches"], kept, strict=False):
            rows = torch.as_tensor(list(indices))
            log_probs[rows, : part.shape[1]] = part.float().cpu()
            if entropy is not None:
                entropies[rows, : entropy.shape[1]] = entropy.float().cpu()
        return metrics, Batch({"log_probs": log_probs, "entropy": entropies})

    def optimizer_step(
        self, data: Batch, micro_batches: list[list[int]], loss: LossFunction, entropy_gradient: bool = False
    ) -> dict[str, float]:
        """One optimizer step on the sum of `loss` over all micro-batches of all data-parallel ranks.

        Raises:
            NonFiniteError: see `train_step`.
        """
        for wrapped in self.wrapped:
            wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        temperature = data.meta_info.get("temperature", 1.0)
        self.forward.routing = data.non_tensor_batch.get(ROUTING, ())
        if self.balance is not None:
            self.balance.begin(lambda: self.forward.computed_tokens(data.batch, micro_batches), self.device)
        rows = self.forward.backward(data.batch, micro_batches, temperature, loss, entropy_gradient)
        metrics = reduce_micro_batches(rows, self.device)
        if self.balance is not None:
            metrics |= self.balance.metrics(self.device)
        require_finite("loss", metrics["loss"], self.optimizer_steps)
        rate = self.schedule.at(self.optimizer_steps)
        self.saving.wait()
        norm = update(self.optimizer, rate, self.pipeline_config.max_grad_norm, self.optimizer_steps)
        self.optimizer_steps += 1
        replayed = {} if self.forward.replay is None else self.forward.replay.agreement()
        return {**metrics, **replayed, "grad_norm": norm, "lr": rate}

    def begin_checkpoint(self, folder: Path) -> None:
        """Begins to write weights, distributed optimizer, step count and random state; collective over all ranks.

        They are written while this rank computes; its next optimizer step waits until they are.
        """
        self.states.require(*ALL_STATES)
        steps, base = self.optimizer_steps, self._base()
        self.saving.start(megatron_checkpoint.begin_save(folder, self.wrapped, self.optimizer, steps, base))

    def load_checkpoint(self, folder: Path) -> None:
        """Restores what `begin_checkpoint` wrote: at the same layout bit for bit, at another without random state.

        Raises:
            FileNotFoundError: `folder` contains no checkpoint.
            ValueError: it was written in another precision, at another layout by an earlier version, or for other
                frozen weights.
        """
        self.states.require(*ALL_STATES)
        self.saving.wait()
        self.optimizer_steps = megatron_checkpoint.load(folder, self.wrapped, self.optimizer, self._base())

    def _base(self) -> Base | None:
        """What a checkpoint without the model's own weights belongs to; None where it has them."""
        model = self.worker_config.model_args
        assert isinstance(model, TrainModelArguments)
        return frozen_base(self.model_folder, model) if self.adapters else None

    def memory(self) -> dict[str, int]:
        """As for a frozen model, and the bytes of gradient buffers and optimizer state with its fp32 weights."""
        shared = {parameter.untyped_storage()._cdata for parameter in self._parameters()}
        optimizer = (each for each in self._state_tensors("optimizer") if each.untyped_storage()._cdata not in shared)
        return {
            **super().memory(),
            "gradients": _bytes(self._state_tensors("gradients")),
            "optimizer": _bytes(optimizer),
        }

    def offload(self, kinds: Sequence[StateKind]) -> int:
        """As for a frozen model; the optimizer's own gradients are dropped with the others."""
        self.saving.wait()
        if "gradients" in kinds:
            self.optimizer.zero_grad()
        return super().offload(kinds)

    def _optimizer_state(self) -> Iterator[torch.Tensor]:
        values = (value for _, state in self.optimizer.state.items() for value in state.values())
        return (value for value in values if isinstance(value, torch.Tensor))

    def _state_tensors(self, kind: StateKind) -> Iterable[torch.Tensor]:
        """The optimizer's tensors include its fp32 copies of parameters in half precision."""
        if kind == "gradients":
            buffers = (wrapped.buffers + wrapped.expert_parallel_buffers for wrapped in self.wrapped)
            return [buffer.grad_data for each in buffers for buffer in each]
        if kind == "optimizer":
            groups = [group["params"] for group in self.optimizer.param_groups]
            return [*itertools.chain(*groups), *self._optimizer_state()]
        return super()._state_tensors(kind)

    def _set_up(self) -> None:
        role, megatron = self.worker_config, self.megatron
        assert isinstance(role, TrainedRoleConfig) and isinstance(megatron, MegatronTrainConfig)
        frozen = frozen_names(self.model, role.model_args.freeze_module_prefix)
        for stage in self.stages:
            freeze(stage, self.model, frozen, self.layout.expert_place(self.rank))
        if role.model_args.trains_adapters:
            self.adapters = self._attach_adapters(role.model_args)
        self.wrapped = wrap_model(self.stages, megatron)
        self.optimizer = build_optimizer(self.wrapped, role.training_args, megatron)
        self.forward = self._forward_pass(self.wrapped)
        if isinstance(role, ActorTrainConfig) and role.router_replay.replays:
            self.forward.replay = RoutingReplay(self.stages, megatron.recompute_granularity == "full")
        self.weights = MegatronWeights(self.stages, self.model, self.model_folder, self.layout, self.adapters)
        self.schedule = LearningRate.of(role.training_args, self.pipeline_config.schedule_steps(role))
        self.optimizer_steps = 0
        self.balance = None if self.model.mixture is None else ExpertBalance(self.stages, megatron)
        self.saving: BackgroundSave = BackgroundSave(self.device, self.pipeline_config.rpc_timeout_s)
        self._finish_gathers()

    def _attach_adapters(self, model: TrainModelArguments) -> list[Adapters]:
        """Adapters on all virtual stages, which are frozen: the first ones, or those of `adapter_name_or_path`."""
        options = AdapterOptions(model.lora_target, model.lora_rank, model.lora_scale)
        source = first_adapter(lambda name: role_seed(self.pipeline_config.seed, self.role, name))
        if model.adapter_name_or_path is not None:
            source = saved_adapter(local_model(model.adapter_name_or_path), self.model, model.lora_target)
        return attach_adapters(self.stages, self.model, options, self.coordinates.tensor, self.layout.tensor, source)

    def _adapter_norms(self, steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """`lora/...` after these optimizer steps; none without adapters.

        Raises:
            RuntimeError: the steps had gradients, and the adapters still add nothing.
        """
        norms = adapter_norms(self.adapters) if self.adapters else {}
        if norms and not norms["lora/update_norm"] and any(step["grad_norm"] * step["lr"] for step in steps):
            raise RuntimeError(f"optimizer step {self.optimizer_steps}: the adapters have gradients and did not change")
        return norms

    def _finish_gathers(self) -> None:
        """With `overlap_param_gather`, gathers the weights that a next optimizer step would gather while it runs.

        Forward passes without an optimizer step, weight updates and checkpoints read them before.
        """
        for wrapped in self.wrapped:
            if wrapped.ddp_config.overlap_param_gather:
                wrapped.start_param_sync(force_sync=True)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
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

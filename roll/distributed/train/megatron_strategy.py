"""The Megatron model of a role that is trained, with its optimizer.

Imports Megatron: on a CPU, `Platform.prepare_megatron` must be called before this module is imported.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import torch
import torch.distributed as dist
from tensordict import TensorDict

from roll.algorithms.aggregation import LossScale
from roll.algorithms.losses import LOSSES
from roll.algorithms.options.policy_options import PolicySettings
from roll.configs.arguments import TrainModelArguments
from roll.configs.devices.megatron import MegatronTrainConfig
from roll.configs.learning.lora import by_policy, training_of
from roll.configs.pipeline import role_seed
from roll.configs.roles import ActorTrainConfig, TrainedRoleConfig
from roll.datasets.batch import POLICY, ROUTING, Batch
from roll.distributed.train.checkpoint import megatron_checkpoint
from roll.distributed.train.checkpoint.background_save import BackgroundSave
from roll.distributed.train.checkpoint.frozen_base import Base, frozen_base
from roll.distributed.train.experts.balance import ExpertBalance
from roll.distributed.train.experts.router_replay import RoutingReplay
from roll.distributed.train.host_copies import ALL_STATES, StateKind
from roll.distributed.train.learning_rate import LearningRate
from roll.distributed.train.megatron_forward import over_optimizer_steps, reduce_micro_batches
from roll.distributed.train.megatron_infer import MegatronInferStrategy, total_bytes
from roll.distributed.train.megatron_model import freeze
from roll.distributed.train.megatron_optimizer import (
    TrainedPolicy,
    build_optimizer,
    forget_moments,
    reduce_gradients,
    require_finite,
    unreduced,
    update,
    wrap_model,
)
from roll.distributed.train.megatron_weights import MegatronWeights
from roll.hub.names import local_model
from roll.models.families.frozen import frozen_names
from roll.models.lora import AdapterOptions, Adapters, adapter_norms, attach_adapters, first_adapter, saved_adapter


class OptimizerStep(TypedDict):
    """One optimizer step of a shard: its micro-batches, and token and sequence counts of the whole global batch."""

    micro_batches: list[list[int]]
    tokens: float
    sequences: float


Kept = list[tuple[torch.Tensor, torch.Tensor | None]]
"""Log-probs [b, T] of each micro-batch, and the entropy where there is one."""


class MegatronTrainStrategy(MegatronInferStrategy):
    """A Megatron model with its optimizer; policies that share its weights each have one.

    What belongs to a policy is that of the one that was selected last.

    Attributes:
        policies: by name; the only one has no name.
        weights: the weights of this stage under their HF names.
        saving: writes checkpoints.
    """

    @property
    def optimizer_steps(self) -> int:
        """Taken so far with the selected policy."""
        return self._selected.optimizer_steps

    @optimizer_steps.setter
    def optimizer_steps(self, steps: int) -> None:
        self._selected.optimizer_steps = steps

    def select(self, policy: str) -> None:
        """Makes a policy the one that is computed, trained, saved and loaded from now on.

        Raises:
            ValueError: there is none of this name.
        """
        if policy not in self.policies:
            raise ValueError(f"policy {policy!r} is not trained here; there are {', '.join(map(repr, self.policies))}")
        chosen = self._selected = self.policies[policy]
        chosen.place(self.stages)
        self.adapters, self.wrapped, self.forward = chosen.adapters, chosen.wrapped, chosen.forward
        self.optimizer, self.weights, self.schedule = chosen.optimizer, chosen.weights, chosen.schedule

    def train_step(self, data: Batch, kept: Kept | None = None) -> dict[str, float]:
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
        self.select(data.meta_info.get(POLICY, ""))
        results = []
        for step in data.meta_info["optimizer_steps"]:
            self._clear_gradients()
            metrics = self._backward(data, step, kept)
            results.append(metrics | self._update())
        self._finish_gathers()
        return over_optimizer_steps(results) | self._adapter_norms(results)

    def train_step_with_log_probs(self, data: Batch) -> tuple[dict[str, float], Batch]:
        """`train_step` with one optimizer step, and what its forward passes gave, before the update.

        These are `log_probs` and `entropy` [b, T]: 0 where no token is scored, and on all but the last pipeline stage.
        """
        kept: Kept = []
        metrics = self.train_step(data, kept)
        return metrics, _rows_of(data, kept)

    def forward_backward(self, data: Batch) -> tuple[dict[str, float], Batch]:
        """The first half of `train_step` with one optimizer step: adds gradients to those of earlier calls.

        They are summed over ranks by `optimizer_step`, so that calls add up in any layout.

        Returns:
            Metrics of the loss, and `log_probs` and `entropy` as `train_step_with_log_probs` has them.

        Raises:
            NonFiniteError: the loss is not finite; the gradients of all calls are dropped.
        """
        self.states.require(*ALL_STATES)
        self.select(data.meta_info.get(POLICY, ""))
        if not self._selected.has_gradients:
            self._clear_gradients()
        kept: Kept = []
        self._selected.has_gradients = False
        with unreduced(self.wrapped):
            metrics = self._backward(data, data.meta_info["optimizer_steps"][0], kept)
        self._selected.has_gradients = True
        return metrics, _rows_of(data, kept)

    def optimizer_step(
        self, learning_rate: float | None = None, max_grad_norm: float | None = None
    ) -> dict[str, float]:
        """The second half of `train_step`: one step with the gradients of all calls of `forward_backward` before.

        Rate and bound of the norm are those of the configuration unless they are given.

        Returns:
            `grad_norm` before clipping, `lr`, and norms of adapters, the same on every rank.

        Raises:
            RuntimeError: there are no gradients.
            NonFiniteError: the norm is not finite; weights are untouched, and the gradients are dropped.
        """
        self.states.require(*ALL_STATES)
        if not self._selected.has_gradients:
            raise RuntimeError("optimizer_step: there are no gradients; call forward_backward before it")
        self._selected.has_gradients = False
        reduce_gradients(self.wrapped)
        metrics = self._update(learning_rate, max_grad_norm)
        self._finish_gathers()
        return metrics | self._adapter_norms([metrics])

    def _clear_gradients(self) -> None:
        for wrapped in self.wrapped:
            wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _backward(self, data: Batch, step: OptimizerStep, kept: Kept | None) -> dict[str, float]:
        """Adds the gradient of the loss over the micro-batches of a step on all data-parallel ranks; its metrics."""
        meta, micro_batches = data.meta_info, step["micro_batches"]
        function, config = LOSSES[meta["loss"]], meta["loss_config"]
        length = self.pipeline_config.max_sequence_length
        scale = LossScale(float(step["tokens"]), float(step["sequences"]), length)

        def loss(
            log_probs: torch.Tensor, entropy: torch.Tensor | None, fields: TensorDict
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            if kept is not None:
                kept.append((log_probs.detach(), None if entropy is None else entropy.detach()))
            return function(log_probs, entropy, fields, scale, config)

        entropy_gradient = isinstance(config, PolicySettings) and config.needs_entropy_gradient
        self.forward.routing = data.non_tensor_batch.get(ROUTING, ())
        if self.balance is not None:
            self.balance.begin(lambda: self.forward.computed_tokens(data.batch, micro_batches), self.device)
        temperature = meta.get("temperature", 1.0)
        rows = self.forward.backward(data.batch, micro_batches, temperature, loss, entropy_gradient)
        metrics = reduce_micro_batches(rows, self.device)
        if self.balance is not None:
            metrics |= self.balance.metrics(self.device)
        if self.forward.replay is not None:
            metrics |= self.forward.replay.agreement()
        require_finite("loss", metrics["loss"], self.optimizer_steps)
        return metrics

    def _update(self, learning_rate: float | None = None, max_grad_norm: float | None = None) -> dict[str, float]:
        rate = self.schedule.at(self.optimizer_steps) if learning_rate is None else learning_rate
        bound = self.pipeline_config.max_grad_norm if max_grad_norm is None else max_grad_norm
        self.saving.wait()
        norm = update(self.optimizer, rate, bound, self.optimizer_steps)
        self.optimizer_steps += 1
        return {"grad_norm": norm, "lr": rate}

    def begin_checkpoint(self, folder: Path) -> None:
        """Begins to write weights, distributed optimizer, step count and random state; collective over all ranks.

        They are written while this rank computes; its next optimizer step waits until they are. Of several policies
        each has a folder with its name in `folder`.
        """
        self.states.require(*ALL_STATES)
        writes = []
        for name in self.policies:
            self.select(name)
            steps, base = self.optimizer_steps, self._base()
            writes.append(megatron_checkpoint.begin_save(folder / name, self.wrapped, self.optimizer, steps, base))

        def write(group: dist.ProcessGroup) -> None:
            for each in writes:
                each(group)

        self.saving.start(write)

    def load_checkpoint(self, folder: Path) -> None:
        """Restores what `begin_checkpoint` wrote: at the same layout bit for bit, at another without random state.

        Raises:
            FileNotFoundError: `folder` contains no checkpoint.
            ValueError: it was written in another precision, at another layout by an earlier version, or for other
                frozen weights.
        """
        self.states.require(*ALL_STATES)
        self.saving.wait()
        for name in self.policies:
            self.select(name)
            self._selected.has_gradients = False
            loaded = megatron_checkpoint.load(folder / name, self.wrapped, self.optimizer, self._base())
            self.optimizer_steps = loaded

    def reset_optimizer(self) -> None:
        """Makes the optimizer as it was before the first step; the weights stay."""
        self.states.require(*ALL_STATES)
        forget_moments(self.optimizer)
        self.optimizer_steps = 0

    def _base(self) -> Base | None:
        """What a checkpoint without the model's own weights belongs to; None where it has them."""
        return frozen_base(self.model_folder, self._selected.model) if self.adapters else None

    def memory(self) -> dict[str, int]:
        """As for a frozen model, and the bytes of gradient buffers and optimizer state with its fp32 weights."""
        shared = {parameter.untyped_storage()._cdata for parameter in self._parameters()}
        optimizer = (each for each in self._state_tensors("optimizer") if each.untyped_storage()._cdata not in shared)
        return {
            **super().memory(),
            "gradients": total_bytes(self._state_tensors("gradients")),
            "optimizer": total_bytes(optimizer),
        }

    def offload(self, kinds: Sequence[StateKind]) -> int:
        """As for a frozen model; the optimizer's own gradients are dropped with the others."""
        self.saving.wait()
        if "gradients" in kinds:
            for policy in self.policies.values():
                policy.optimizer.zero_grad()
                policy.has_gradients = False
        return super().offload(kinds)

    def _parameters(self) -> Iterator[torch.Tensor]:
        """Those of all policies."""
        others = [policy for policy in self.policies.values() if policy is not self._selected]
        adapters = (adapters for policy in others for adapters in policy.adapters)
        return itertools.chain(super()._parameters(), (each for own in adapters for each in own.parameters()))

    def _optimizer_state(self) -> Iterator[torch.Tensor]:
        states = (state for policy in self.policies.values() for _, state in policy.optimizer.state.items())
        return (value for state in states for value in state.values() if isinstance(value, torch.Tensor))

    def _state_tensors(self, kind: StateKind) -> Iterable[torch.Tensor]:
        """The optimizer's tensors include its fp32 copies of parameters in half precision."""
        policies = self.policies.values()
        if kind == "gradients":
            stages = (wrapped for policy in policies for wrapped in policy.wrapped)
            return [buffer.grad_data for each in stages for buffer in each.buffers + each.expert_parallel_buffers]
        if kind == "optimizer":
            groups = [group["params"] for policy in policies for group in policy.optimizer.param_groups]
            return [*itertools.chain(*groups), *self._optimizer_state()]
        return super()._state_tensors(kind)

    def _set_up(self) -> None:
        role, megatron = self.worker_config, self.megatron
        assert isinstance(role, TrainedRoleConfig) and isinstance(megatron, MegatronTrainConfig)
        several = self.pipeline_config.policies if role.model_args.trains_adapters else {}
        frozen = frozen_names(self.model, role.model_args.freeze_module_prefix)
        for stage in self.stages:
            freeze(stage, self.model, frozen, self.layout.expert_place(self.rank))
        models = by_policy(role.model_args, several)
        self.policies = {name: self._policy(name, model, role, megatron) for name, model in models.items()}
        for name in reversed(self.policies):  # the first one is computed from now on
            self.select(name)
            self._finish_gathers()
        if isinstance(role, ActorTrainConfig) and role.router_replay.replays:
            self.forward.replay = RoutingReplay(self.stages, megatron.recompute_granularity == "full")
        self.balance = None if self.model.mixture is None else ExpertBalance(self.stages, megatron)
        self.saving: BackgroundSave = BackgroundSave(self.device, self.pipeline_config.rpc_timeout_s)

    def _policy(
        self, name: str, model: TrainModelArguments, role: TrainedRoleConfig, megatron: MegatronTrainConfig
    ) -> TrainedPolicy:
        """A policy with adapters of its own, if any are trained; the stages compute it."""
        adapters = self._attach_adapters(name, model) if model.trains_adapters else ()
        training = training_of(role.training_args, self.pipeline_config.policies.get(name))
        wrapped = wrap_model(self.stages, megatron)
        return TrainedPolicy(
            model,
            adapters,
            wrapped,
            build_optimizer(wrapped, training, megatron),
            self._forward_pass(wrapped),
            MegatronWeights(self.stages, self.model, self.model_folder, self.layout, adapters),
            LearningRate.of(training, self.pipeline_config.schedule_steps(role)),
            self.stages[0].config.no_sync_func,
        )

    def _attach_adapters(self, policy: str, model: TrainModelArguments) -> list[Adapters]:
        """Adapters on all virtual stages, which are frozen: the first ones, or those of `adapter_name_or_path`."""
        options = AdapterOptions(model.lora_target, model.lora_rank, model.lora_scale)
        names = (self.role, policy) if policy else (self.role,)
        source = first_adapter(lambda name: role_seed(self.pipeline_config.seed, *names, name))
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


def _rows_of(data: Batch, kept: Kept) -> Batch:
    """What the forward passes of one optimizer step gave, `log_probs` and `entropy` [b, T] in the order of `data`."""
    log_probs, entropies = (torch.zeros(data.batch["input_ids"].shape, dtype=torch.float32) for _ in range(2))
    (step,) = data.meta_info["optimizer_steps"]
    for indices, (part, entropy) in zip(step["micro_batches"], kept, strict=False):
        rows = torch.as_tensor(list(indices))
        log_probs[rows, : part.shape[1]] = part.float().cpu()
        if entropy is not None:
            entropies[rows, : entropy.shape[1]] = entropy.float().cpu()
    return Batch({"log_probs": log_probs, "entropy": entropies})

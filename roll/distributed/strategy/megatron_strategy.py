"""The Megatron engines of a role: `MegatronInferStrategy` scores, `MegatronTrainStrategy` also learns."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

from roll.configs.batches import training_batch
from roll.configs.layout import ParallelLayout
from roll.configs.layouts import megatron_config
from roll.configs.pipeline import BaseConfig
from roll.configs.worker import WorkerConfig
from roll.distributed.protocol import DataProto
from roll.distributed.strategy.base import InferenceStrategy, TrainStrategy, WeightSpec
from roll.distributed.strategy.megatron_parallel import join_process_group, leave_process_group, seed_rank
from roll.models.hf_config import DecoderConfig, read_hf_config
from roll.platforms.platform import Platform

if TYPE_CHECKING:
    from roll.distributed.strategy.megatron_forward import LossFunction

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class MegatronInferStrategy(InferenceStrategy):
    """A frozen Megatron model of a role: log-probs of given tokens."""

    def __init__(
        self,
        worker_config: WorkerConfig,
        pipeline_config: BaseConfig,
        layout: ParallelLayout,
        rank: int,
        platform: Platform,
        role: str = "megatron",
    ) -> None:
        """Only remembers; `initialize` does the work.

        Args:
            worker_config: the role's section of the configuration.
            pipeline_config: the whole of it.
            layout: sizes of the parallel dimensions.
            rank: this rank within the role.
            platform: where it runs.
            role: seeds derive from it.
        """
        self.worker_config = worker_config
        self.pipeline_config = pipeline_config
        self.layout = layout
        self.rank = rank
        self.platform = platform
        self.role = role
        self.megatron = megatron_config(worker_config)

    def initialize(self) -> None:
        """Joins the role's process group (MASTER_ADDR and MASTER_PORT say where) and builds the model.

        Raises:
            UnsupportedModel: the model folder is missing or cannot be run.
            ValueError: the layout does not divide the model.
            RuntimeError: the ranks did not find each other in time.
        """
        folder = self.model_folder
        self.model: DecoderConfig = read_hf_config(folder)
        warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
        self.platform.prepare_megatron()
        self.device = self.platform.torch_device(0)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        start, call = self.pipeline_config.start_timeout_s, self.pipeline_config.rpc_timeout_s
        self.coordinates = join_process_group(self.platform, self.layout, self.rank, start, max(start, call))
        seed_rank(self.pipeline_config.seed, self.role, self.coordinates)
        self._build(folder)

    @property
    def model_folder(self) -> Path:
        """The role's own model, or the pipeline's.

        Raises:
            ValueError: neither is set.
        """
        path = self.worker_config.model_args.model_name_or_path or self.pipeline_config.pretrain
        if path is None:
            raise ValueError("model_args.model_name_or_path: not set, and neither is pretrain; name a HF model folder")
        return Path(path)

    def compute_log_probs(self, data: DataProto) -> DataProto:
        """See `InferenceStrategy`; where the batch has a `response_mask` only its tokens are scored, others are 0."""
        meta = data.meta_info
        outputs = self.forward.log_probs(data.batch, meta["micro_batches"], meta["temperature"])
        if outputs is None:
            return DataProto(TensorDict({}, batch_size=[0]))
        return DataProto.from_dict({"log_probs": outputs[0], "entropy": outputs[1]})

    def memory(self) -> dict[str, int]:
        """Bytes of this process by the platform's count, and of the parameters."""
        return {**self.platform.memory(), "parameters": _bytes(self.stage.parameters())}

    def shutdown(self) -> None:
        """Leaves the process group."""
        leave_process_group()

    def _build(self, folder: Path) -> None:
        from roll.distributed.strategy.megatron_forward import ForwardPass

        self.stage = self._imported_stage(folder)
        self.stage.requires_grad_(False)
        self.forward = ForwardPass(self.stage, self.stage, self.model, self.device)

    def _imported_stage(self, folder: Path) -> Any:
        from roll.models.factory import BuildOptions, build_gpt_model
        from roll.models.hf_import import import_hf

        megatron = self.megatron
        options = BuildOptions(
            dtype=DTYPES[self.worker_config.model_args.dtype],
            tensor=self.layout.tensor,
            pipeline=self.layout.pipeline,
            sequence_parallel=megatron.sequence_parallel,
            recompute=megatron.recompute_granularity,
            transformer_engine=self._use_transformer_engine(),
            bias_activation_fusion=megatron.bias_activation_fusion,
            apply_rope_fusion=megatron.apply_rope_fusion,
        )
        stage = build_gpt_model(self.model, options)
        import_hf(stage, folder, self.model, self.coordinates.tensor, self.layout.tensor)
        return stage

    def _use_transformer_engine(self) -> bool:
        """On a GPU, if it is installed and not declined by `attn_implementation: sdpa`."""
        from roll.models.factory import transformer_engine_available

        wanted = self.worker_config.model_args.attn_implementation
        usable = self.device.type == "cuda" and transformer_engine_available()
        if wanted == "fa2" and not usable:
            raise ValueError("attn_implementation: fa2 needs platform cuda with Transformer Engine; use auto or sdpa")
        return usable and wanted != "sdpa"


class MegatronTrainStrategy(MegatronInferStrategy, TrainStrategy):
    """A Megatron model that learns, publishes its weights and saves itself."""

    def train_step(self, data: DataProto) -> dict[str, float]:
        """See `TrainStrategy`; `meta_info["temperature"]` divides the logits and is 1 where absent (SFT has none).

        Raises:
            NonFiniteError: a loss or gradient norm is not finite; the message names the optimizer step.
        """
        from roll.algorithms.losses import LOSSES
        from roll.distributed.strategy.megatron_metrics import over_optimizer_steps

        meta = data.meta_info
        function, config = LOSSES[meta["loss"]], meta["loss_config"]
        results = []
        for plan in meta["optimizer_steps"]:
            scale = self._loss_scale(plan)

            def loss(log_probs: Any, entropy: Any, fields: Any, scale: Any = scale) -> Any:
                return function(log_probs, entropy, fields, scale, config)

            results.append(self.optimizer_step(data, plan["micro_batches"], loss, _differentiates_entropy(config)))
        return over_optimizer_steps(results)

    def optimizer_step(
        self, data: DataProto, micro_batches: list[list[int]], loss: LossFunction, entropy_gradient: bool = False
    ) -> dict[str, float]:
        """One optimizer step with the sum of `loss` over all micro-batches of all data ranks as the loss.

        Raises:
            NonFiniteError: see `train_step`.
        """
        from roll.distributed.strategy.megatron_metrics import reduce_micro_batches
        from roll.distributed.strategy.megatron_optimizer import require_finite, update

        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        temperature = data.meta_info.get("temperature", 1.0)
        rows = self.forward.backward(data.batch, micro_batches, temperature, loss, entropy_gradient)
        metrics = reduce_micro_batches(rows, self.device)
        require_finite("loss", metrics["loss"], self.optimizer_steps)
        rate = self.schedule.at(self.optimizer_steps)
        norm = update(self.optimizer, rate, self.pipeline_config.max_grad_norm, self.optimizer_steps)
        self.optimizer_steps += 1
        return {**metrics, "grad_norm": norm, "lr": rate}

    def weight_specs(self) -> list[WeightSpec]:
        """See `TrainStrategy`."""
        from roll.distributed.strategy.megatron_weights import weight_specs

        return weight_specs(self.stage, self.model)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `TrainStrategy`; tensors may share memory with the model, so use them before the next step."""
        from roll.distributed.strategy.megatron_weights import hf_weights

        return hf_weights(self.stage, self.model)

    def source_weights(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """See `TrainStrategy`."""
        from roll.distributed.strategy.megatron_weights import source_weights

        return source_weights(self.stage, self.model)

    def weight_slices(self) -> Iterator[tuple[str, Callable[[torch.Tensor], None]]]:
        """See `TrainStrategy`."""
        from roll.distributed.strategy.megatron_weights import weight_slices

        return weight_slices(self.stage, self.model)

    def save_checkpoint(self, folder: Path) -> None:
        """See `TrainStrategy`."""
        from roll.distributed.strategy import megatron_checkpoint

        megatron_checkpoint.save(Path(folder), self.wrapped, self.optimizer, self.optimizer_steps)

    def load_checkpoint(self, folder: Path) -> None:
        """See `TrainStrategy`.

        Raises:
            FileNotFoundError: there is no checkpoint in `folder`.
        """
        from roll.distributed.strategy import megatron_checkpoint

        self.optimizer_steps = megatron_checkpoint.load(Path(folder), self.wrapped, self.optimizer)

    def export_hf(self, folder: Path) -> None:
        """See `TrainStrategy`."""
        from roll.distributed.strategy.megatron_export import export_hf

        export_hf(self.stage, self.model, self.model_folder, Path(folder))

    def memory(self) -> dict[str, int]:
        """Also the bytes of gradient buffers and optimizer state."""
        gradients = sum(buffer.grad_data.nbytes for buffer in self.wrapped.buffers)
        state = [value for _, values in self.optimizer.state.items() for value in values.values()]
        return {**super().memory(), "gradients": gradients, "optimizer": _bytes(state)}

    def _build(self, folder: Path) -> None:
        from roll.distributed.strategy.megatron_forward import ForwardPass
        from roll.distributed.strategy.megatron_optimizer import build_optimizer, wrap_model
        from roll.distributed.strategy.megatron_schedule import LearningRate

        arguments = self.worker_config.training_args
        self.stage = self._imported_stage(folder)
        self.wrapped = wrap_model(self.stage, self.megatron)
        self.optimizer = build_optimizer(self.wrapped, arguments, self.megatron)
        self.forward = ForwardPass(self.wrapped, self.stage, self.model, self.device)
        self.schedule = LearningRate.of(arguments, training_batch(self.pipeline_config).schedule_steps)
        self.optimizer_steps = 0

    def _loss_scale(self, plan: dict[str, Any]) -> Any:
        from roll.algorithms.aggregation import LossScale

        pipeline = self.pipeline_config
        length = pipeline.sequence_length or pipeline.prompt_length + (pipeline.response_length or 0)
        return LossScale(float(plan["tokens"]), float(plan["sequences"]), length)


def _differentiates_entropy(config: Any) -> bool:
    from roll.algorithms.policy_losses import PolicyLossConfig

    return isinstance(config, PolicyLossConfig) and config.needs_entropy_gradient


def _bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))

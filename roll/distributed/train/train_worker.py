"""One Megatron rank of `actor_train`, `critic` or `reference`; its remote methods are those of its parts."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from roll.configs.roles import MegatronRoleConfig
from roll.distributed.processes import gc_freeze, gc_paused
from roll.distributed.train.weight_sender import SendError, WeightSender
from roll.distributed.weights.delta_sender import DeltaSender
from roll.distributed.worker import SYNC, P, ResultT, StrategyMethod, Worker, WorkerRank, register
from roll.platforms import get_platform

if TYPE_CHECKING:
    from roll.configs.run_options import TrainerOptions
    from roll.distributed.train.megatron_infer import MegatronInferStrategy
    from roll.distributed.train.megatron_strategy import MegatronTrainStrategy


class TrainMethod(StrategyMethod["TrainWorker", P, ResultT]):
    """A method of `TrainWorker` that is documented at its strategy or at `WeightSender`."""


class TrainWorker(Worker):
    """A Megatron model that computes log-probs; with strategy `megatron_train` it is also trained.

    This module does not import Megatron, so that the driver can import it: `initialize` does, in the rank's process.
    """

    config: MegatronRoleConfig
    pipeline_config: TrainerOptions

    def __init__(self, rank: WorkerRank, config: MegatronRoleConfig, pipeline_config: TrainerOptions) -> None:
        super().__init__(rank, config, pipeline_config)
        self._infer_strategy: MegatronInferStrategy | None = None
        self._train_strategy: MegatronTrainStrategy | None = None
        self._sender: WeightSender | None = None
        self.deltas = DeltaSender(lambda: self.sender)

    @property
    def infer_strategy(self) -> MegatronInferStrategy:
        """The model.

        Raises:
            RuntimeError: the worker was not initialized.
        """
        if self._infer_strategy is None:
            raise RuntimeError(f"{self.rank.name} is not initialized; initialize() builds its model")
        return self._infer_strategy

    @property
    def train_strategy(self) -> MegatronTrainStrategy:
        """The model and its optimizer.

        Raises:
            RuntimeError: the role is frozen, or the worker was not initialized.
        """
        if self._train_strategy is None:
            raise RuntimeError(f"{self.rank.name} has no optimizer: only megatron_train roles do, once initialized")
        return self._train_strategy

    @property
    def sender(self) -> WeightSender:
        """The rank's part in weight updates.

        Raises:
            SendError: the role is frozen, or not initialized.
        """
        if self._sender is None:
            raise SendError(f"{self.rank.name} has no weights to send: only megatron_train roles do, once initialized")
        return self._sender

    @register(deadline="start_timeout_s")
    def initialize(self) -> None:
        """Joins the role's process group and loads the model."""
        platform = get_platform(self.rank.platform)
        platform.setup_process(self.rank.cores, self.rank.threads)
        warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
        platform.prepare_megatron()
        with gc_paused():  # on a CPU Megatron must be patched before its first import
            from roll.distributed.train.megatron_infer import MegatronInferStrategy
            from roll.distributed.train.megatron_strategy import MegatronTrainStrategy

        layout, rank = self.config.layout, self.rank
        if self.config.strategy_args.strategy_name == "megatron_train":
            trained = MegatronTrainStrategy(
                self.config, self.pipeline_config, layout, rank.rank, platform, role=rank.role
            )
            trained.initialize()
            self._infer_strategy = self._train_strategy = trained
            self._sender = WeightSender(rank, trained, self.pipeline_config.sync_timeout_s)
        else:
            frozen = MegatronInferStrategy(
                self.config, self.pipeline_config, layout, rank.rank, platform, role=rank.role
            )
            frozen.initialize()
            self._infer_strategy = frozen
        gc_freeze()

    offload_states = TrainMethod(lambda worker: worker.infer_strategy.offload)
    load_states = TrainMethod(lambda worker: worker.infer_strategy.states.load)
    compute_log_probs = TrainMethod(lambda worker: worker.infer_strategy.compute_log_probs)
    compute_values = TrainMethod(lambda worker: worker.infer_strategy.compute_values)
    memory = TrainMethod(lambda worker: worker.infer_strategy.memory)
    train_step = TrainMethod(lambda worker: worker.train_strategy.train_step)
    train_step_with_log_probs = TrainMethod(lambda worker: worker.train_strategy.train_step_with_log_probs)
    forward_backward = TrainMethod(lambda worker: worker.train_strategy.forward_backward)
    optimizer_step = TrainMethod(lambda worker: worker.train_strategy.optimizer_step)
    begin_checkpoint = TrainMethod(lambda worker: worker.train_strategy.begin_checkpoint)
    checkpoint_written = TrainMethod(lambda worker: worker.train_strategy.saving.seconds_waited)
    load_checkpoint = TrainMethod(lambda worker: worker.train_strategy.load_checkpoint)
    reset_optimizer = TrainMethod(lambda worker: worker.train_strategy.reset_optimizer)
    pack_adapters = TrainMethod(lambda worker: worker.sender.pack_adapters, SYNC)
    describe_weights = TrainMethod(lambda worker: worker.sender.describe_weights, SYNC)
    hold_broadcast_port = TrainMethod(lambda worker: worker.sender.hold_broadcast_port, SYNC)
    join_broadcast_group = TrainMethod(lambda worker: worker.sender.join_broadcast_group, SYNC)
    leave_broadcast_group = TrainMethod(lambda worker: worker.sender.leave_broadcast_group, SYNC)
    broadcast_weights = TrainMethod(lambda worker: worker.sender.broadcast_weights, SYNC)
    create_shm = TrainMethod(lambda worker: worker.sender.create_shm, SYNC)
    open_shm = TrainMethod(lambda worker: worker.sender.open_shm, SYNC)
    fill_bucket = TrainMethod(lambda worker: worker.sender.fill_bucket, SYNC)
    checksum_bucket = TrainMethod(lambda worker: worker.sender.checksum_bucket, SYNC)
    release_buckets = TrainMethod(lambda worker: worker.sender.release_buckets, SYNC)
    keep_weights = TrainMethod(lambda worker: worker.deltas.keep_weights, SYNC)
    pack_delta = TrainMethod(lambda worker: worker.deltas.pack_delta, SYNC)
    release_delta = TrainMethod(lambda worker: worker.deltas.release_delta, SYNC)

    @register()
    def export_hf(self, folder: Path) -> None:
        """Writes a HF folder, or a PEFT folder of adapters, of several policies one each in it; every rank its part."""
        self.train_strategy.states.require("parameters")
        for name, policy in self.train_strategy.policies.items():
            if policy.adapters:
                policy.weights.export_adapter(folder / name, policy.model)
            else:
                policy.weights.export_hf(folder)

    @register()
    def export_merged(self, folder: Path) -> None:
        """Writes a HF folder with the adapters added to the weights, for each policy; every rank its part."""
        self.train_strategy.states.require("parameters")
        for name, policy in self.train_strategy.policies.items():
            policy.weights.export_hf(folder / name)

    @register()
    def peak_tflops(self) -> float | None:
        """What this rank's device could do in the dtype of the model; see `Platform.peak_tflops`."""
        return get_platform(self.rank.platform).peak_tflops(self.config.model_args.dtype)

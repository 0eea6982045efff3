"""One Megatron rank of `actor_train`, `critic` or `reference`: the remote methods around its strategy."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from roll.configs.roles import MegatronRoleConfig
from roll.datasets.batch import DataProto
from roll.distributed.processes import gc_freeze, gc_paused
from roll.distributed.train.weight_sender import WeightSender
from roll.distributed.worker import WorkerRank, register
from roll.platforms import get_platform

if TYPE_CHECKING:
    from roll.configs.pipeline import BaseConfig
    from roll.distributed.train.host_copies import StateKind
    from roll.distributed.train.megatron_strategy import (
        MegatronInferStrategy,
        MegatronTrainStrategy,
    )


class TrainWorker(WeightSender):
    """A Megatron model that computes log-probs; with strategy `megatron_train` it is also trained.

    This module does not import Megatron, so that the driver can import it: `initialize` does, in the rank's process.
    """

    def __init__(self, rank: WorkerRank, config: MegatronRoleConfig, pipeline_config: BaseConfig) -> None:
        super().__init__(rank, config, pipeline_config)
        self._infer_strategy: MegatronInferStrategy | None = None
        self._train_strategy: MegatronTrainStrategy | None = None

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

    @register(deadline="start_timeout_s")
    def initialize(self) -> None:
        """Joins the role's process group and loads the model."""
        platform = get_platform(self.rank.platform)
        platform.setup_process(self.rank.cores, self.rank.threads)
        warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
        platform.prepare_megatron()
        with gc_paused():  # on a CPU Megatron must be patched before its first import
            from roll.distributed.train.megatron_strategy import MegatronInferStrategy, MegatronTrainStrategy

        layout, rank = self.config.layout, self.rank
        if self.config.strategy_args.strategy_name == "megatron_train":
            trained = MegatronTrainStrategy(
                self.config, self.pipeline_config, layout, rank.rank, platform, role=rank.role
            )
            trained.initialize()
            self._infer_strategy = self._train_strategy = trained
            self._model_weights, self._states = trained.weights, trained.states
        else:
            frozen = MegatronInferStrategy(
                self.config, self.pipeline_config, layout, rank.rank, platform, role=rank.role
            )
            frozen.initialize()
            self._infer_strategy = frozen
        gc_freeze()

    @register()
    def offload_states(self, kinds: Sequence[StateKind]) -> int:
        """Moves states of this rank to host memory; returns the bytes of its device that are free now."""
        return self.infer_strategy.offload(kinds)

    @register()
    def load_states(self, kinds: Sequence[StateKind]) -> int:
        """Brings states back to the device; returns their bytes."""
        return self.infer_strategy.states.load(kinds)

    @register()
    def compute_log_probs(self, data: DataProto) -> DataProto:
        """Log-probs and entropies of the shard; see `MegatronInferStrategy.compute_log_probs`."""
        return self.infer_strategy.compute_log_probs(data)

    @register()
    def compute_values(self, data: DataProto) -> DataProto:
        """Values of the shard, of a role with a value head; see `MegatronInferStrategy.compute_values`."""
        return self.infer_strategy.compute_values(data)

    @register()
    def train_step(self, data: DataProto) -> dict[str, float]:
        """Optimizer steps over the shard; see `MegatronTrainStrategy.train_step`."""
        return self.train_strategy.train_step(data)

    @register()
    def train_step_with_log_probs(self, data: DataProto) -> tuple[dict[str, float], DataProto]:
        """One optimizer step and the log-probs before it; see `MegatronTrainStrategy.train_step_with_log_probs`."""
        return self.train_strategy.train_step_with_log_probs(data)

    @register()
    def begin_checkpoint(self, folder: str) -> None:
        """Begins to write the role's state, every rank its part, in the background while it computes."""
        self.train_strategy.begin_checkpoint(Path(folder))

    @register()
    def checkpoint_written(self) -> float | None:
        """Seconds that the rank waited for the state to be written; None while it still is; raises what failed."""
        return self.train_strategy.saving.seconds_waited()

    @register()
    def load_checkpoint(self, folder: str) -> None:
        """Restores what `begin_checkpoint` wrote."""
        self.train_strategy.load_checkpoint(Path(folder))

    @register()
    def export_hf(self, folder: str) -> None:
        """Writes a HF folder; every rank its part."""
        self.require_parameters()
        self.weights.export_hf(Path(folder))

    @register()
    def peak_tflops(self) -> float | None:
        """What this rank's device could do in the dtype of the model; see `Platform.peak_tflops`."""
        return get_platform(self.rank.platform).peak_tflops(self.config.model_args.dtype)

    @register()
    def memory(self) -> dict[str, int]:
        """Bytes in use on this rank, by kind."""
        return self.infer_strategy.memory()

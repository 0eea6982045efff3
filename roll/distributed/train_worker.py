"""One Megatron rank of `actor_train` or `reference`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.distributed.dispatch import Dispatch, register
from roll.distributed.protocol import DataProto
from roll.distributed.worker import Worker, WorkerRank
from roll.platforms import get_platform

if TYPE_CHECKING:
    from roll.configs.layout import ParallelLayout
    from roll.configs.pipeline import BaseConfig
    from roll.configs.worker import WorkerConfig
    from roll.distributed.weight_sync.groups import WeightsGroup
    from roll.distributed.weight_sync.plan import Bucket
    from roll.distributed.weight_sync.sender import Sent, SourceInfo, WeightSender
    from roll.distributed.weight_sync.stage_tensors import Fault

STRATEGIES = {
    "megatron_train": "roll.distributed.strategy.megatron_strategy:MegatronTrainStrategy",
    "megatron_infer": "roll.distributed.strategy.megatron_strategy:MegatronInferStrategy",
}
"""The class behind each `strategy_name`; named, not imported, so that a driver needs no engine."""


class TrainWorker(Worker):
    """Wraps the role's strategy; what a frozen strategy cannot do raises where it is asked."""

    def __init__(self, rank: WorkerRank, config: WorkerConfig, pipeline_config: BaseConfig) -> None:
        """Builds nothing yet."""
        super().__init__(rank, config, pipeline_config)
        self._strategy: Any = None
        self._sender: WeightSender | None = None
        self._shared: Iterator[Any] | None = None

    @register(deadline="start_timeout_s")
    def initialize(self) -> None:
        """Joins the role's process group and loads the model."""
        from roll.configs.layouts import role_layout

        platform = get_platform(self.rank.platform)
        platform.setup_process(self.rank.cores, self.rank.threads)
        self._layout: ParallelLayout = role_layout(self.config)
        cls = load(STRATEGIES[self.config.strategy_args.strategy_name])
        self._strategy = cls(
            self.config, self.pipeline_config, self._layout, self.rank.rank, platform, role=self.rank.role
        )
        self._strategy.initialize()

    @register(dispatch=Dispatch.DP)
    def compute_log_probs(self, data: DataProto) -> DataProto:
        """Log-probs and entropies of the shard; see `InferenceStrategy.compute_log_probs`."""
        return self._strategy.compute_log_probs(data)

    @register(dispatch=Dispatch.DP)
    def train_step(self, data: DataProto) -> dict[str, float]:
        """Optimizer steps over the shard; see `TrainStrategy.train_step`."""
        return self._strategy.train_step(data)

    @register()
    def save_checkpoint(self, folder: str) -> None:
        """Writes the role's state; every rank its part."""
        self._strategy.save_checkpoint(Path(folder))

    @register()
    def load_checkpoint(self, folder: str) -> None:
        """Restores what `save_checkpoint` wrote."""
        self._strategy.load_checkpoint(Path(folder))

    @register()
    def export_hf(self, folder: str) -> None:
        """Writes a HF folder; every rank its part."""
        self._strategy.export_hf(Path(folder))

    @register()
    def memory(self) -> dict[str, int]:
        """Bytes in use on each rank, by kind."""
        return self._strategy.memory()

    @register(deadline="sync_timeout_s")
    def prepare_publishing(self) -> SourceInfo | None:
        """What this rank publishes: a `SourceInfo` on the source of each stage, None elsewhere."""
        from roll.distributed.weight_sync.sender import WeightSender

        if self._sender is None:
            self._sender = WeightSender(self._strategy, self.rank, self._layout, self._strategy.model_folder)
        return self._sender.source_info()

    @register(deadline="sync_timeout_s")
    def free_weights_port(self) -> int | None:
        """A port for a new group, on the source of each stage."""
        return self._publishing().free_port()

    @register(deadline="sync_timeout_s")
    def join_weights_groups(self, groups: list[WeightsGroup], timeout_s: float) -> None:
        """Joins the broadcast group of its stage where this rank is the source."""
        self._publishing().join(groups, timeout_s)

    @register(deadline="sync_timeout_s")
    def leave_weights_groups(self) -> None:
        """Leaves it; an engine that waits in it is freed."""
        self._publishing().leave()

    @register(deadline="sync_timeout_s")
    def broadcast_weights(self, buckets: list[list[Bucket]], digest_ranks: int, fault: Fault | None) -> Sent | None:
        """Sends this stage's buckets; see `WeightSender.broadcast`."""
        return self._publishing().broadcast(buckets, digest_ranks, fault)

    @register(deadline="sync_timeout_s")
    def share_weights(
        self, buckets: list[list[Bucket]], index: int, receivers: int, digest_ranks: int, fault: Fault | None
    ) -> Sent | None:
        """Offers bucket `index` of this stage to engines on this node; see `WeightSender.share`."""
        return self._publishing().share(buckets, index, receivers, digest_ranks, fault)

    @register(deadline="sync_timeout_s")
    def release_weights(self) -> None:
        """Lets go of buckets shared with engines."""
        self._publishing().release()

    def _publishing(self) -> WeightSender:
        if self._sender is None:
            raise RuntimeError(f"{self.rank.name}: prepare_publishing comes first")
        return self._sender


def load(path: str) -> Any:
    """What `module:name` names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)

"""One Megatron rank of `actor_train` or `reference`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from roll.distributed.dispatch import Dispatch, register
from roll.distributed.garbage import freeze_heap
from roll.distributed.protocol import DataProto
from roll.distributed.worker import Worker, WorkerRank
from roll.platforms import get_platform

if TYPE_CHECKING:
    from roll.configs.parallel_layout import ParallelLayout
    from roll.configs.pipeline import BaseConfig
    from roll.configs.roles import MegatronRoleConfig
    from roll.distributed.weight_sync.broadcast import BroadcastSender
    from roll.distributed.weight_sync.groups import WeightsGroup
    from roll.distributed.weight_sync.plan import Bucket
    from roll.distributed.weight_sync.sender import Sent, SourceInfo
    from roll.distributed.weight_sync.sharing import SharedSender
    from roll.distributed.weight_sync.stage_tensors import Fault

S = TypeVar("S")

STRATEGIES = {
    "megatron_train": "roll.distributed.strategy.megatron_strategy:MegatronTrainStrategy",
    "megatron_infer": "roll.distributed.strategy.megatron_strategy:MegatronInferStrategy",
}
"""The class behind each `strategy_name`; named, not imported, so that a driver needs no engine."""


class TrainWorker(Worker):
    """Wraps the role's strategy; what a frozen strategy cannot do raises where it is asked."""

    def __init__(self, rank: WorkerRank, config: MegatronRoleConfig, pipeline_config: BaseConfig) -> None:
        """Builds nothing yet."""
        super().__init__(rank, config, pipeline_config)
        self._strategy: Any = None
        self._broadcast: BroadcastSender | None = None
        self._shared: SharedSender | None = None

    @register(deadline="start_timeout_s")
    def initialize(self) -> None:
        """Joins the role's process group and loads the model."""
        platform = get_platform(self.rank.platform)
        platform.setup_process(self.rank.cores, self.rank.threads)
        self._layout: ParallelLayout = self.config.layout
        cls = load(STRATEGIES[self.config.strategy_args.strategy_name])
        self._strategy = cls(
            self.config, self.pipeline_config, self._layout, self.rank.rank, platform, role=self.rank.role
        )
        self._strategy.initialize()
        freeze_heap()

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
        """What this rank publishes, on the source of each stage; None elsewhere."""
        from roll.distributed.weight_sync.broadcast import BroadcastSender
        from roll.distributed.weight_sync.sender import SourceInfo, StageMember
        from roll.distributed.weight_sync.sharing import SharedSender

        member = StageMember(self._strategy, self._layout, self.rank.rank, self._strategy.model_folder)
        self._broadcast = self._broadcast or BroadcastSender(member)
        self._shared = self._shared or SharedSender(member)
        return SourceInfo(member.stage, self._strategy.weight_specs(), self.rank.address) if member.is_source else None

    @register(deadline="sync_timeout_s")
    def hold_weights_port(self) -> int | None:
        """A port for a new group, on the source of each stage."""
        return self._prepared(self._broadcast).hold_port()

    @register(deadline="sync_timeout_s")
    def join_weights_groups(self, groups: list[WeightsGroup], timeout_s: float) -> None:
        """Joins the broadcast group of its stage where this rank is the source."""
        self._prepared(self._broadcast).join(groups, timeout_s)

    @register(deadline="sync_timeout_s")
    def leave_weights_groups(self) -> None:
        """Leaves it; an engine that waits in it is freed."""
        self._prepared(self._broadcast).leave()

    @register(deadline="sync_timeout_s")
    def broadcast_weights(self, buckets: list[list[Bucket]], digest_ranks: int, fault: Fault | None) -> Sent | None:
        """Sends this stage's buckets; see `BroadcastSender.broadcast`."""
        return self._prepared(self._broadcast).broadcast(buckets, digest_ranks, fault)

    @register(deadline="sync_timeout_s")
    def reserve_shared_weights(self, num_bytes: list[int]) -> list[str] | None:
        """Makes shared memory for the largest bucket of each stage; see `SharedSender.reserve`."""
        return self._prepared(self._shared).reserve(num_bytes)

    @register(deadline="sync_timeout_s")
    def attach_shared_weights(self, handles: list[list[str]]) -> None:
        """Opens the memory of the stage's source."""
        self._prepared(self._shared).attach(handles)

    @register(deadline="sync_timeout_s")
    def fill_shared_weights(
        self, buckets: list[list[Bucket]], index: int, receivers: int, fault: Fault | None
    ) -> Sent | None:
        """Writes what this rank has of bucket `index`; see `SharedSender.fill`."""
        return self._prepared(self._shared).fill(buckets, index, receivers, fault)

    @register(deadline="sync_timeout_s")
    def inspect_shared_weights(
        self, buckets: list[list[Bucket]], index: int, digest_ranks: int, fault: Fault | None
    ) -> dict[str, str] | None:
        """Takes checksums of bucket `index` once all ranks have filled it; see `SharedSender.inspect`."""
        return self._prepared(self._shared).inspect(buckets, index, digest_ranks, fault)

    @register(deadline="sync_timeout_s")
    def release_shared_weights(self) -> None:
        """Ends a publish through shared memory."""
        self._prepared(self._shared).release()

    def _prepared(self, sender: S | None) -> S:
        if sender is None:
            raise RuntimeError(f"{self.rank.name}: prepare_publishing comes first")
        return sender


def load(path: str) -> Any:
    """What `module:name` names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)

"""The training side of updates by deltas: a copy of what the engines have, and what has changed since."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from roll.distributed.infer.sglang_checksums import EngineChecksums
from roll.distributed.train.weight_sender import SendError, StageWeights, WeightSender
from roll.distributed.weights.delta import ChangedPiece, RankDelta, encoded
from roll.distributed.weights.plan import Bucket
from roll.models.families.shape import ModelShape, known_model_shape


@dataclass(frozen=True)
class StageDelta:
    """What has changed in the weights of one bucket.

    Attributes:
        num_bytes: positions and values, of all ranks of an engine together.
        deltas: reference to a list of RankDelta in Ray's object store, one for each rank of an engine.
        checksums: of all weights of the stage, with its last bucket.
    """

    num_bytes: int
    deltas: Any
    checksums: dict[str, str] = field(default_factory=dict)


class EngineDeltas(EngineChecksums):
    """Deltas and checksums of an engine's parameters, from tensors added one by one in any order."""

    def __init__(self, model: ModelShape, tensor_parallel: int, kept: dict[str, torch.Tensor]) -> None:
        """`kept` has the tensors of the engine, by HF name; an added tensor replaces its own."""
        super().__init__(model, tensor_parallel)
        self._kept = kept
        self._changed: list[list[tuple[ChangedPiece, torch.Tensor]]] = [[] for _ in range(tensor_parallel)]

    def take(self) -> list[RankDelta]:
        """What has changed in the parameters that are complete since the last call, for each rank of the engine."""
        taken = [
            RankDelta(tuple(each for each, _ in rank), b"".join(data.cpu().numpy().tobytes() for _, data in rank))
            for rank in self._changed
        ]
        self._changed = [[] for _ in taken]
        return taken

    def _finish(self, parameter: str, parts: list[tuple[str, torch.Tensor]]) -> None:
        super()._finish(parameter, parts)
        kept = [(name, self._kept[name].to(tensor.device)) for name, tensor in parts]
        for rank, changed in enumerate(self._changed):
            old, new = (
                torch.cat([self._slice(name, tensor.detach(), rank).reshape(-1) for name, tensor in each])
                for each in (kept, parts)
            )
            changed += encoded(parameter, old, new)
        for name, tensor in parts:
            self._kept[name].copy_(tensor.detach())


class DeltaSender:
    """The part of a training rank in updates by deltas.

    The source rank of a stage keeps a copy of the weights of the stage in host memory.
    """

    def __init__(self, sender: Callable[[], WeightSender]) -> None:
        """`sender` gives the rank's part in whole updates."""
        self._sender = sender
        self._kept: dict[str, torch.Tensor] = {}
        self._tensors: StageWeights[torch.Tensor | None] | None = None
        self._deltas: EngineDeltas | None = None

    def keep_weights(self) -> None:
        """Copies the weights as they are, which the engines have; frozen ones do not change."""
        sender = self._sender()
        if sender.takes_part:
            sender.require_parameters()
            gathered = sender.weights.gathered([sender.weights.source], sender.weights.frozen())
            for name, each in gathered:
                if each is not None and name in self._kept:
                    self._kept[name].copy_(each.detach())
                elif each is not None:
                    self._kept[name] = each.detach().to("cpu", copy=True)

    def pack_delta(self, stages: list[list[Bucket]], index: int, checksum_ranks: int) -> StageDelta | None:
        """What has changed in bucket `index` since the last update; call it with 0, 1, 2, ... for all buckets.

        Args:
            stages: buckets of every stage, without frozen weights.
            index: of the bucket.
            checksum_ranks: tensor-parallel ranks of an engine.

        Returns:
            On the source rank; None elsewhere and beyond the last bucket.

        Raises:
            SendError: the model yields other tensors than planned, or the weights of the last update were not kept.
        """
        sender = self._sender()
        buckets = stages[sender.stage]
        if not sender.takes_part or index >= len(buckets):
            return None
        sender.require_parameters()
        is_last, weights = index == len(buckets) - 1, sender.weights
        if index == 0:
            self.release_delta()
            self._tensors = StageWeights(weights.gathered([weights.source], weights.frozen()))
        assert self._tensors is not None, "bucket 0 comes first"
        named = [(spec.name, self._tensors.take(spec)) for spec in buckets[index].specs]
        if is_last:
            self._tensors.check_end()
        if not sender.is_source:
            return None
        if not self._kept:
            raise SendError(f"{sender.rank.name} has not kept the weights of the last update")
        if self._deltas is None:
            self._deltas = EngineDeltas(known_model_shape(weights.folder), checksum_ranks, self._kept)
        for name, tensor in named:
            assert tensor is not None
            self._deltas.add(name, tensor)
        deltas = self._deltas.take()
        checksums = self._deltas.result() if is_last else {}
        import ray  # here, since scripts that check GPUs import this module without it

        return StageDelta(sum(len(each.data) for each in deltas), ray.put(deltas), checksums)

    def release_delta(self) -> None:
        """Ends an update by deltas, also one that failed half way: finishes started gathers."""
        if self._tensors is not None:
            self._tensors.drain()
        self._tensors, self._deltas = None, None

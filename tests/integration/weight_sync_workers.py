"""Training workers and a synchronizer for the weight update tests, with faults injected on request."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

import torch
import torch.distributed as dist

from roll.distributed.calls.remote_call import ALL
from roll.distributed.cluster import Cluster
from roll.distributed.train import weight_sender as sender
from roll.distributed.train.train_worker import TrainWorker
from roll.distributed.train.weight_sender import SendError, WeightSender
from roll.distributed.weights.plan import Bucket, WeightSpec, spec_bytes
from roll.distributed.weights.report import UpdateReport
from roll.distributed.weights.shared_memory import SharedMemoryTransport
from roll.distributed.weights.shm_buckets import tensor_locations, views_of
from roll.distributed.weights.synchronizer import WeightSynchronizer
from roll.distributed.worker import register
from roll.platforms.cpu.shared_memory import SharedMemory, make_handle

T = TypeVar("T")


@dataclass(frozen=True)
class Fault:
    """Damage to one weight update.

    Attributes:
        kind: `corrupt` changes one element after its checksum was computed, as a faulty network would; `drop` leaves
            the tensor out, as a weight mapping with a hole would; `fail` raises when the tensor is sent; `hang` waits
            before it is sent; `add` announces expert 3 also as expert 9.
        name: HF name of the tensor.
        until: a file; `hang` waits until there is one.
    """

    kind: Literal["corrupt", "drop", "fail", "hang", "add"]
    name: str
    until: str = ""


class FaultyWeights:
    """The weights of a stage, with a fault."""

    def __init__(self, weights, fault: Fault) -> None:
        self._weights, self._fault = weights, fault

    def __getattr__(self, name: str):
        return getattr(self._weights, name)

    def specs(self) -> list[WeightSpec]:
        fault, specs = self._fault, self._weights.specs()
        if fault.kind == "add":
            added = (spec for spec in specs if ".experts.3." in spec.name)
            return [*specs, *(replace(spec, name=spec.name.replace(".experts.3.", ".experts.9.")) for spec in added)]
        return _without(specs, fault.name) if fault.kind == "drop" else specs

    def gathered(self, receivers: Collection[int], without=()) -> Iterator[tuple[str, torch.Tensor | None]]:
        return self._faulty(self._weights.gathered(receivers, without))

    def slice_writers(self, without=()) -> Iterator[tuple[str, Callable[[torch.Tensor], None]]]:
        return self._faulty(self._weights.slice_writers(without))

    def _faulty(self, named: Iterator[tuple[str, T]]) -> Iterator[tuple[str, T]]:
        for name, value in named:
            if name == self._fault.name and self._fault.kind == "fail":
                for _ in named:  # ends the gathers that other ranks take part in
                    pass
                raise SendError(f"{name}: injected failure")
            while name == self._fault.name and self._fault.kind == "hang" and not Path(self._fault.until).exists():
                time.sleep(0.05)
            if name != self._fault.name or self._fault.kind != "drop":
                yield name, value


class FaultySender(WeightSender):
    """Damages weight updates on request."""

    fault: Fault | None = None

    def set_fault(self, fault: Fault | None) -> None:
        weights = self.weights._weights if isinstance(self.weights, FaultyWeights) else self.weights
        self.fault, self.weights = fault, weights if fault is None else FaultyWeights(weights, fault)

    def gather_as_on_a_gpu(self) -> None:
        self._shm = None
        self._copies: list[SharedMemory] = []
        sender.cuda_ipc_handle = self._handle_of_a_copy

    def _handle_of_a_copy(self, named: list[tuple[str, torch.Tensor]]) -> bytes:
        specs = [WeightSpec(name, tuple(value.shape), str(value.dtype).removeprefix("torch.")) for name, value in named]
        memory = SharedMemory.create(sum(spec_bytes(spec) for spec in specs))
        for (_, copy), (_, value) in zip(views_of(memory.tensor, specs), named, strict=True):
            copy.copy_(value)
        self._copies.append(memory)
        return make_handle(memory, tensor_locations(specs))

    def _broadcast(self, named: list[tuple[str, torch.Tensor]]) -> tuple[dist.Work | None, torch.Tensor]:
        named = [(name, tensor.clone()) for name, tensor in named]
        self._corrupt(named)
        return super()._broadcast(named)

    def checksum_bucket(self, stages: list[list[Bucket]], index: int, checksum_ranks: int) -> dict[str, str] | None:
        checksums = super().checksum_bucket(stages, index, checksum_ranks)
        if self.is_source and index < len(stages[self.stage]):
            self._corrupt(self.filled_tensors(index, stages[self.stage][index]))
        return checksums

    def _corrupt(self, named: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            if self.fault == Fault("corrupt", name):
                tensor.view(-1)[0] += 1


class FaultyWorker(TrainWorker):
    """A real training rank that changes its weights without training and damages weight updates on request."""

    def initialize(self) -> None:
        super().initialize()
        self._sender = FaultySender(self.rank, self.train_strategy, self.pipeline_config.sync_timeout_s)

    @register()
    def scale_weights(self, factor: float) -> None:
        """Multiplies every parameter of this rank; tied embeddings stay equal on all stages."""
        with torch.no_grad():
            for parameter in self.train_strategy._state_tensors("parameters"):
                parameter.mul_(factor)

    @register()
    def move_adapters(self, seed: int) -> None:
        """Adds random numbers to all adapters."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.train_strategy._parameters():
                if parameter.requires_grad:
                    parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))

    @register()
    def nudge_weights(self, seed: int, size: float) -> None:
        """Adds random numbers of this standard deviation to what is trained; in bf16 most weights stay the same."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.train_strategy._parameters():
                if parameter.requires_grad:
                    parameter.add_(size * torch.randn(parameter.shape, generator=generator))

    @register()
    def set_adapters(self, seed: int, policy: str = "") -> None:
        """Sets all adapters of a policy to random numbers; with seed 0 every B is 0."""
        self.train_strategy.select(policy)
        with torch.no_grad():
            for each in self.train_strategy.adapters:
                for number, (_, adapter) in enumerate(each.pairs()):
                    generator = torch.Generator().manual_seed(1000 * seed + number)
                    adapter.a.copy_(0.05 * torch.randn(adapter.a.shape, generator=generator))
                    adapter.b.copy_((seed > 0) * 0.05 * torch.randn(adapter.b.shape, generator=generator))
                    if adapter._owners is not None:  # rows without an adapter stay 0
                        adapter.b.mul_(adapter._owners.sum(1, keepdim=True))

    @register()
    def set_fault(self, fault: Fault | None) -> None:
        """Damages the following weight updates; None ends that."""
        self.sender.set_fault(fault)

    @register()
    def gather_as_on_a_gpu(self) -> None:
        """From now on every rank that exports handles gathers whole tensors; a handle is that of a copy on the CPU."""
        self.sender.gather_as_on_a_gpu()


class OwnRankTransport(SharedMemoryTransport):
    """As on GPUs where the engine is on the device of the second tensor-parallel rank."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._connected, self.handle_sources = True, [[1]]


class FaultySynchronizer(WeightSynchronizer):
    """Updates weights with a fault."""

    _train: Cluster[FaultyWorker]

    async def update_with(self, version: int, fault: Fault) -> UpdateReport:
        """As `update_weights`, with this fault in every attempt."""
        sources = self._transport.sources
        if fault.kind == "drop":
            self._transport.sources = [replace(source, specs=_without(source.specs, fault.name)) for source in sources]
        await self._train.call(ALL, FaultyWorker.set_fault, fault)
        try:
            return await self.update_weights(version)
        finally:
            self._transport.sources = sources
            await self._train.call(ALL, FaultyWorker.set_fault, None)


def _without(specs: list[WeightSpec], name: str) -> list[WeightSpec]:
    return [spec for spec in specs if spec.name != name]

"""How weights are sent from the training ranks to the engines: the interface of a transport, and the registry.

A transport is one file: `broadcast.py` and `shared_memory.py` here, or a module of the user that `custom_modules` names
and that calls `register_transport`; `weight_transport` chooses it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from roll.distributed.infer.infer_worker import InferWorker
from roll.distributed.train.train_worker import TrainWorker
from roll.distributed.train.weight_sender import SendResult, StageSource
from roll.distributed.weights.plan import Bucket, make_buckets
from roll.distributed.weights.report import Transfer

if TYPE_CHECKING:
    from roll.distributed.cluster import Cluster


class Transport(ABC):
    """Sends weights from the training ranks to the engines.

    Attributes:
        sources: what each pipeline stage sends; set before `connect`.
        engines: ranks of the engines that take part in the next update; all of them at first.
        whole: whether frozen weights are sent too, which engines need once.
    """

    def __init__(
        self, train: Cluster[TrainWorker], infer: Cluster[InferWorker], timeout_s: float, bucket_bytes: int
    ) -> None:
        self._train, self._infer = train, infer
        self._timeout_s, self._bucket_bytes = timeout_s, bucket_bytes
        self.sources: list[StageSource] = []
        self.engines = list(range(infer.world_size))
        self.whole = True

    @abstractmethod
    async def connect(self) -> None:
        """Connects training ranks and engines; returns at once where they are connected."""

    @abstractmethod
    async def transfer(self, checksums: bool) -> Transfer:
        """Sends every tensor, and computes checksums where requested."""

    @abstractmethod
    async def disconnect(self) -> None:
        """After a failure: frees ranks and engines that wait for each other; `connect` then starts again."""

    def buckets(self, whole: bool | None = None) -> list[list[Bucket]]:
        """What every stage sends, with frozen weights or without; by default as the next update does."""
        whole = self.whole if whole is None else whole
        sent = ([spec for spec in each.specs if whole or spec.name not in each.frozen] for each in self.sources)
        return [make_buckets(specs, self._bucket_bytes) for specs in sent]

    def checksum_ranks(self, checksums: bool) -> int:
        """Tensor-parallel ranks of an engine whose checksums are computed; 0 computes none."""
        return self._infer.layout.tensor if checksums else 0


TransportT = TypeVar("TransportT", bound=type[Transport])

TRANSPORTS: dict[str, type[Transport]] = {}
"""Name in `weight_transport` -> class."""


def register_transport(name: str) -> Callable[[TransportT], TransportT]:
    """Decorator that registers a transport under `name`."""

    def add(transport: TransportT) -> TransportT:
        if name in TRANSPORTS:
            raise ValueError(f"a weight transport named {name!r} is registered already")
        TRANSPORTS[name] = transport
        return transport

    return add


def shares_devices(train: Cluster[TrainWorker], infer: Cluster[InferWorker]) -> bool:
    return not set(train.config.device_mapping).isdisjoint(infer.config.device_mapping)


def on_cpu(cluster: Cluster[TrainWorker]) -> bool:
    """Whether the cluster's devices are slots of CPU cores."""
    return cluster.platform == "cpu"


def total(results: Sequence[SendResult]) -> Transfer:
    checksums = {name: value for result in results for name, value in result.checksums.items()}
    return Transfer(sum(result.num_bytes for result in results), checksums)

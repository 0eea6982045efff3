"""One rank of a role: what it is told about itself, and the base class of what it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roll.configs.parallel_layout import RankCoordinates
from roll.distributed.dispatch import Collect, register

if TYPE_CHECKING:
    from roll.configs.pipeline import BaseConfig
    from roll.configs.roles import RoleConfig


@dataclass(frozen=True)
class WorkerRank:
    """What one worker knows about itself.

    Attributes:
        role: name of the cluster, such as `actor_train`.
        rank: place in the cluster, 0 to world_size - 1.
        world_size: workers of the cluster.
        coordinates: place in each parallel dimension.
        device: index of the worker's first device among those its process sees.
        devices: global ranks of the devices it owns.
        node: index of the node it runs on.
        address: address of that node for other ranks.
        master_address: address of rank 0's node.
        master_port: held by rank 0's process for the cluster's process group.
        cores: cores the process is pinned to.
        threads: compute threads that go with them.
        platform: cpu or cuda.
    """

    role: str
    rank: int
    world_size: int
    coordinates: RankCoordinates
    device: int
    devices: tuple[int, ...]
    node: int
    address: str
    master_address: str
    master_port: int
    cores: tuple[int, ...]
    threads: int
    platform: str

    @property
    def name(self) -> str:
        """`actor_train-0`."""
        return f"{self.role}-{self.rank}"

    def environment(self) -> dict[str, str]:
        """The variables torch's process group reads."""
        return {
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.device),
        }


class Worker:
    """Base of what runs in a cluster's processes; methods marked with `register` become methods of the cluster.

    A subclass whose methods are coroutines says `concurrent = True`: its calls then run side by side. One whose single
    process drives all tensor-parallel devices says `spans_tensor_parallel = True`.
    """

    concurrent = False
    spans_tensor_parallel = False

    def __init__(self, rank: WorkerRank, config: RoleConfig, pipeline_config: BaseConfig) -> None:
        """Keeps what it is told; engines are built by `initialize`, so that all ranks can start at once."""
        self.rank = rank
        self.config = config
        self.pipeline_config = pipeline_config

    @register(collect=Collect.ALL)
    def describe(self) -> WorkerRank:
        """What each rank knows about itself."""
        return self.rank

    def close(self) -> Any:
        """Ends what the worker started; may be a coroutine where the class is concurrent."""
        return None

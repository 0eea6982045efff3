"""One rank of a role: the base class of workers, what a worker knows about its rank, and which methods are remote."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, overload

from roll.configs.devices.parallel_layout import RankCoordinates
from roll.platforms.platform import LOOPBACK

if TYPE_CHECKING:
    from roll.configs.roles import RoleConfig
    from roll.configs.run_options import WorkerOptions

MethodT = TypeVar("MethodT", bound=Callable[..., object])
OwnerT = TypeVar("OwnerT", bound="Worker")
P = ParamSpec("P")
ResultT = TypeVar("ResultT")
Deadline = Literal["rpc_timeout_s", "start_timeout_s", "sync_timeout_s"]
"""Key of the pipeline's configuration that bounds a remote call."""
SYNC: Deadline = "sync_timeout_s"

_MARK = "_roll_deadline"


def register(deadline: Deadline = "rpc_timeout_s") -> Callable[[MethodT], MethodT]:
    """Makes a worker's method callable through its `Cluster`.

    Args:
        deadline: key of the pipeline's configuration that bounds a call, as an enclosing `deadline_scope` does.
    """

    def mark(method: MethodT) -> MethodT:
        setattr(method, _MARK, deadline)
        return method

    return mark


class StrategyMethod(Generic[OwnerT, P, ResultT]):
    """A remote method of a worker that is a method of one of its parts, with the same arguments, result and errors.

    train_step = StrategyMethod(lambda worker: worker.train_strategy.train_step)
    """

    def __init__(self, find: Callable[[OwnerT], Callable[P, ResultT]], deadline: Deadline = "rpc_timeout_s") -> None:
        """`find` gives the method of a worker's part, such as its strategy; for `deadline` see `register`."""
        self._find = find
        register(deadline)(self)

    def __set_name__(self, owner: type[OwnerT], name: str) -> None:
        self.__name__ = name

    @overload
    def __get__(self, worker: None, owner: type[OwnerT]) -> Callable[Concatenate[OwnerT, P], ResultT]: ...
    @overload
    def __get__(self, worker: OwnerT, owner: type[OwnerT]) -> Callable[P, ResultT]: ...
    def __get__(self, worker: OwnerT | None, owner: type[OwnerT]) -> Callable[..., ResultT]:
        return self if worker is None else self._find(worker)

    def __call__(self, worker: OwnerT, /, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        return self._find(worker)(*args, **kwargs)


def registered_methods(worker_cls: type) -> dict[str, Deadline]:
    """Deadline key of each registered method of a worker class; an override inherits the registration."""
    found: dict[str, Deadline] = {}
    for base in reversed(worker_cls.__mro__):
        found |= {name: getattr(item, _MARK) for name, item in vars(base).items() if hasattr(item, _MARK)}
    return found


@dataclass(frozen=True)
class WorkerRank:
    """What one worker knows about itself; by default the only one of its role, in this process, on the cores it has.

    Attributes:
        role: name of the cluster, such as `actor_train`.
        rank: index in the cluster, 0 to world_size - 1.
        world_size: workers of the cluster.
        coordinates: index in each parallel dimension.
        device: index of the worker's first device among those its process sees.
        devices: global ranks of the devices it owns.
        node: index of the node it runs on.
        address: address of that node for other ranks.
        master_address: address of rank 0's node.
        master_port: held by rank 0's process for the cluster's process group.
        nnodes: nodes of the worker; only an engine has several.
        node_rank: index of this node among them.
        further_nodes: on the first of several nodes, the index of each other one and the Ray actor that runs an
            `EngineNode` there.
        cores: cores the process is pinned to.
        threads: compute threads that go with them.
        platform: cpu or cuda.
    """

    role: str
    rank: int = 0
    world_size: int = 1
    coordinates: RankCoordinates = RankCoordinates(0, 0, 0)
    device: int = 0
    devices: tuple[int, ...] = (0,)
    node: int = 0
    address: str = LOOPBACK
    master_address: str = LOOPBACK
    master_port: int = 0
    cores: tuple[int, ...] = ()
    threads: int = 0
    platform: str = "cpu"
    nnodes: int = 1
    node_rank: int = 0
    further_nodes: tuple[tuple[int, Any], ...] = ()

    @property
    def name(self) -> str:
        return f"{self.role}-{self.rank}"

    @property
    def process_name(self) -> str:
        return process_name(self.role, self.rank, self.node, self.node_rank)

    def environment(self) -> dict[str, str]:
        """The environment variables that torch's process group reads."""
        return {
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.device),
        }


def process_name(role: str, rank: int, node: int, node_rank: int) -> str:
    return f"{role}-{rank}" + (f"-node-{node}" if node_rank else "")


class Worker:
    """Base class of what runs in a cluster's processes; methods marked with `register` can be called remotely.

    A subclass whose methods are coroutines sets `concurrent = True`: its calls then run concurrently. A subclass whose
    single process drives all tensor-parallel devices sets `spans_tensor_parallel = True`, and `further_node_cls` to the
    class of the processes on further nodes, where those devices are on several. `restartable = True` lets
    `Cluster.restart` start the process of a rank again; the class must be concurrent.
    """

    concurrent = False
    restartable = False
    spans_tensor_parallel = False
    further_node_cls: type[Worker] | None = None

    def __init__(self, rank: WorkerRank, config: RoleConfig, pipeline_config: WorkerOptions) -> None:
        """Starts no engine: `initialize` does, so that all ranks can start at once."""
        self.rank = rank
        self.config = config
        self.pipeline_config = pipeline_config

    @register(deadline="start_timeout_s")
    def initialize(self) -> Awaitable[None] | None:
        """Starts the worker's engine; a coroutine where the class is concurrent."""
        return None

    def close(self) -> None:
        """Ends what the worker started; called once, before its process is killed."""

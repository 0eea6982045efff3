"""An engine over several nodes: the process that runs its part on a further node, and that process seen from the first.

SGLang starts on each node the tensor-parallel ranks whose devices are there. Requests and control messages go to the
first node; SGLang passes them on to the other ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from roll.distributed.calls.remote_errors import Failure, ray_failure
from roll.distributed.infer.sglang_engine import STOP_TIMEOUT_S, Engine, EngineError, make_engine
from roll.distributed.worker import Worker, WorkerRank

if TYPE_CHECKING:
    from roll.configs.roles import EngineRoleConfig
    from roll.configs.run_options import EngineOptions


class EngineNode(Worker):
    """The ranks of one engine on a further node. `InferWorker` of the first node calls it; the driver only ends it."""

    concurrent = True
    config: EngineRoleConfig
    pipeline_config: EngineOptions

    def __init__(self, rank: WorkerRank, config: EngineRoleConfig, pipeline_config: EngineOptions) -> None:
        super().__init__(rank, config, pipeline_config)
        self._engine: Engine | None = None
        self._starting: asyncio.Task[None] | None = None

    async def start(self, address: str, timeout_s: float) -> None:
        """Starts the ranks and waits until they have joined the other nodes' and loaded the model.

        Raises:
            EngineError: SGLang failed, with its reason, or was not ready within `timeout_s`.
        """
        await self.stop()
        if self._engine is None:  # only the first time: it shares out the cores that this process was given
            self._engine = make_engine(self.rank, self.config, self.pipeline_config)
        self._starting = asyncio.create_task(self._engine.start({"dist_init_addr": address}, timeout_s))
        await self._starting

    async def death(self) -> str:
        """Waits until a rank dies; returns the node and the cause."""
        if self._engine is None:
            raise EngineError(f"{self.rank.name}: the engine is not running on node {self.rank.node}")
        return f"node {self.rank.node}: {await self._engine.death()}"

    async def stop(self) -> None:
        """Ends the ranks, also where they are about to start, and waits until their processes are gone."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        if self._engine is not None:
            self._engine.died("the engine was stopped")
            self._engine.end()

    def close(self) -> None:
        """Ends the ranks; may be called twice."""
        if self._engine is not None:
            self._engine.stop()


class FurtherNodes:
    """The further nodes of one engine."""

    def __init__(self, rank: WorkerRank, died: Callable[[str], None]) -> None:
        """Finds the further nodes of this rank's engine, if any; `died` gets the reason why a part of it died."""
        self._rank, self._died = rank, died
        self._nodes = dict(rank.further_nodes)
        self._watches: list[asyncio.Task[None]] = []

    async def start(self, engine: Engine, address: str, timeout_s: float) -> None:
        """Starts all nodes together, `engine` on this one. After a failure nothing runs on any.

        Args:
            engine: the part on this node.
            address: where ranks rendezvous, as host:port of this node.
            timeout_s: longest wait.

        Raises:
            EngineError: a node failed; the message names it.
        """
        own = asyncio.ensure_future(engine.start({"dist_init_addr": address}, timeout_s))
        others = [
            asyncio.ensure_future(self._call(node, "start", timeout_s + STOP_TIMEOUT_S, address, timeout_s))
            for node in self._nodes
        ]
        try:
            await asyncio.gather(own, *others)
        except BaseException:
            own.cancel()
            await asyncio.wait([own])
            engine.end()
            await asyncio.gather(
                *(self._call(node, "stop", 2 * STOP_TIMEOUT_S) for node in self._nodes), return_exceptions=True
            )
            raise
        self._watches = [asyncio.create_task(self._watch(node)) for node in self._nodes]

    def stop_watching(self) -> None:
        """Ends the watch; the driver ends the nodes."""
        for watch in self._watches:
            watch.cancel()

    async def _watch(self, node: int) -> None:
        try:
            self._died(await self._call(node, "death", None))
        except EngineError as error:
            self._died(str(error))

    async def _call(self, node: int, method: str, deadline_s: float | None, *arguments: Any) -> Any:
        asked = asyncio.wrap_future(self._nodes[node].call.remote(method, True, *arguments).future())
        try:
            answer = await asyncio.wait_for(asked, deadline_s)
        except TimeoutError as error:
            message = f"{self._rank.name} on node {node}: {method}: no answer within {deadline_s:g} s"
            raise EngineError(message) from error
        except Exception as error:
            answer = ray_failure(self._rank.rank, error)
        if isinstance(answer, Failure):
            raise EngineError(f"{self._rank.name} on node {node}: {answer.message}")
        return answer

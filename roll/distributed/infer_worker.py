"""One SGLang engine of `actor_infer`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from roll.configs.pipeline import role_seed
from roll.distributed.dispatch import Dispatch, register
from roll.distributed.worker import Worker, WorkerRank
from roll.platforms import get_platform
from roll.rollout.types import GenerateRequest, GenerateResult

if TYPE_CHECKING:
    from roll.configs.asynchronous import InFlightPolicy
    from roll.configs.pipeline import BaseConfig
    from roll.configs.roles import ActorInferConfig
    from roll.distributed.weight_sync.groups import WeightsGroup
    from roll.distributed.weight_sync.plan import Bucket


class DirtyEngineError(RuntimeError):
    """The engine was asked to generate while its weights are no version: part old and part new, or never given."""


class InferWorker(Worker):
    """Wraps the engine, and remembers whether its weights are whole.

    From `begin_update` to a verified end the engine is dirty: requests wait while the publish goes on, and are refused
    once it was given up. An engine that started on dummy weights is dirty from the start.
    """

    concurrent = True
    spans_tensor_parallel = True
    config: ActorInferConfig

    def __init__(self, rank: WorkerRank, config: ActorInferConfig, pipeline_config: BaseConfig) -> None:
        """Starts no engine yet."""
        super().__init__(rank, config, pipeline_config)
        self._dirty = ""
        self._settled = asyncio.Event()
        self._settled.set()
        self._strategy: Any = None
        self._joined: set[str] = set()

    @register(deadline="start_timeout_s")
    async def initialize(self) -> None:
        """Starts the engine and proves it ready by one generated token."""
        from roll.distributed.strategy.sglang_strategy import SGLangStrategy

        platform = get_platform(self.rank.platform)
        seed = role_seed(self.pipeline_config.seed, self.rank.role, self.rank.rank)
        self._strategy = SGLangStrategy(
            self.config, self.pipeline_config, platform.engine_arguments(), self.rank.rank, seed
        )
        await self._strategy.initialize()
        if self.config.strategy_args.strategy_config.get("load_format") == "dummy":
            self._dirty = "it started on dummy weights and none were published yet"

    @register(dispatch=Dispatch.ALL_TO_ALL)
    async def generate(self, requests: list[GenerateRequest]) -> list[GenerateResult]:
        """One result per request, in order; what arrives during a publish waits for its end.

        Raises:
            DirtyEngineError: the engine holds no whole version of the weights, and none is on its way.
        """
        await self._settled.wait()
        if self._dirty:
            raise DirtyEngineError(f"{self.rank.name} serves nothing: {self._dirty}")
        return await self._strategy.generate(requests)

    @register(deadline="sync_timeout_s")
    async def pause(self, mode: InFlightPolicy) -> None:
        """Stops generation until `resume`; see `SGLangStrategy.pause`."""
        await self._strategy.pause(mode)

    @register(deadline="sync_timeout_s")
    async def resume(self) -> None:
        """Ends a pause."""
        await self._strategy.resume()

    @register(deadline="sync_timeout_s")
    async def flush_cache(self) -> None:
        """Empties the prefix cache."""
        await self._strategy.flush_cache()

    @register(deadline="sync_timeout_s")
    async def join_weights_groups(self, groups: list[WeightsGroup]) -> None:
        """Joins the broadcast group of every pipeline stage."""
        for group in groups:
            offset = 1 + self.rank.rank * self.config.num_gpus_per_worker
            await self._strategy.init_weights_group(
                group.address, group.port, offset, group.world_size, group.name, group.backend
            )
            self._joined.add(group.name)

    @register(deadline="sync_timeout_s")
    async def leave_weights_groups(self, groups: list[WeightsGroup]) -> None:
        """Leaves those it has joined."""
        for group in groups:
            if group.name in self._joined:
                self._joined.remove(group.name)
                await self._strategy.destroy_weights_group(group.name)

    @register(deadline="sync_timeout_s")
    async def begin_update(self, version: int) -> None:
        """Opens an update session; the engine is dirty until `accept_update`."""
        self._dirty = f"the publish of version {version} did not complete"
        self._settled.clear()
        await self._strategy.begin_update()

    @register(deadline="sync_timeout_s")
    async def receive_broadcast(self, groups: list[WeightsGroup], buckets: list[list[Bucket]]) -> None:
        """Receives the buckets of every stage from that stage's source, one stage after the other."""
        for group, stage in zip(groups, buckets, strict=True):
            for bucket in stage:
                await self._strategy.receive_broadcast(list(bucket.specs), group.name, flattened=False)

    @register(dispatch=Dispatch.ALL_TO_ALL, deadline="sync_timeout_s")
    async def receive_shared(self, handles: list[bytes]) -> None:
        """Loads one bucket that a process on this node shares; one handle for each rank of this engine."""
        await self._strategy.receive_tensors(handles)

    @register(deadline="sync_timeout_s")
    async def end_update(self, version: int) -> None:
        """Closes the session: tokens sampled from now on carry `version`."""
        await self._strategy.end_update(version)

    @register(deadline="sync_timeout_s")
    async def checksums(self) -> dict[str, str]:
        """Checksums of what the engine holds, by its own names and ranks."""
        return await self._strategy.checksums()

    @register(deadline="sync_timeout_s")
    async def accept_update(self) -> None:
        """Declares the weights whole: the engine may serve again."""
        self._dirty = ""
        self._settled.set()

    @register(deadline="sync_timeout_s")
    async def give_up_update(self) -> None:
        """No attempt follows: an engine that is dirty now refuses what waits."""
        self._settled.set()

    @register()
    async def process_ids(self) -> list[int]:
        """The worker's process and its engine's."""
        return self._strategy.process_ids()

    def close(self) -> None:
        """Ends the engine and its processes."""
        if self._strategy is not None:
            self._strategy.shutdown()

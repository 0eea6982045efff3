"""The engine that generates: SGLang behind the methods a worker of `actor_infer` offers."""

from __future__ import annotations

import os
import time
from typing import Any

from roll.configs.asynchronous import InFlightPolicy
from roll.configs.pipeline import BaseConfig
from roll.configs.roles import ActorInferConfig
from roll.distributed.garbage import freeze_heap
from roll.distributed.strategy.base import WeightSpec
from roll.distributed.strategy.sglang_arguments import (
    LONGER_CONTEXT,
    engine_arguments,
    free_port,
    is_free,
    preferred_port,
    thread_environment,
)
from roll.distributed.strategy.sglang_engine import Engine, EngineError
from roll.distributed.strategy.sglang_generation import Generation
from roll.distributed.strategy.sglang_weights import WeightUpdates
from roll.rollout.types import GenerateRequest, GenerateResult, SamplingParams

PROBE_TOKEN = 1
"""Prompt of the request that proves the engine ready; any id does."""

PORT_ATTEMPTS = 3
"""Starts of one engine, as long as what it fails on is a port that was taken between choosing and binding it."""


class SGLangStrategy:
    """One SGLang engine over `num_gpus_per_worker` devices; all methods run on the owner's event loop."""

    def __init__(
        self,
        worker_config: ActorInferConfig,
        pipeline_config: BaseConfig,
        platform_engine_arguments: dict[str, Any],
        rank: int,
        seed: int,
    ) -> None:
        """Prepares the engine; `initialize` starts it.

        Args:
            worker_config: the role `actor_infer`.
            pipeline_config: the run.
            platform_engine_arguments: ServerArgs that the platform forces.
            rank: this engine among the engines of the role.
            seed: of the engine's own random state; each request brings its own seed.
        """
        arguments = engine_arguments(worker_config, pipeline_config, platform_engine_arguments, seed)
        environment = {**LONGER_CONTEXT, **worker_config.system_envs}
        if arguments.get("device") == "cpu":
            environment |= thread_environment(arguments["tp_size"])
        self._engine = Engine(f"actor_infer[{rank}]", arguments, environment)
        self._generation = Generation(
            self._engine,
            worker_config.generation_timeout_s,
            deterministic=pipeline_config.deterministic,
            running=worker_config.max_running_requests,
        )
        self._weights = WeightUpdates(self._engine, pipeline_config.sync_timeout_s)
        self._start_timeout_s = pipeline_config.start_timeout_s

    async def initialize(self) -> None:
        """Starts the engine and proves it ready by one generated token.

        Raises:
            EngineError: it did not start, or did not answer, with SGLang's reason.
        """
        await self._start()
        probe = GenerateRequest("probe", [PROBE_TOKEN], SamplingParams(max_new_tokens=1), seed=0)
        [answer] = await self.generate([probe])
        if answer.error is not None or len(answer.response_ids) != 1:
            self.shutdown()
            raise EngineError(f"{self._engine.name}: started, but generates nothing: {answer.error}")
        await self.flush_cache()
        freeze_heap()
        await self._engine.manager.freeze_gc()  # in the scheduler's processes too

    async def _start(self) -> None:
        """Starts the engine on a free port; where another process takes it meanwhile, on the next."""
        until = time.monotonic() + self._start_timeout_s
        first = preferred_port(os.getpid())
        for attempt in range(PORT_ATTEMPTS):
            port = free_port(first)
            try:
                return await self._engine.start({"nccl_port": port}, until - time.monotonic())
            except EngineError:
                if is_free(port) or attempt == PORT_ATTEMPTS - 1:
                    raise
            first = port + 1

    async def generate(self, requests: list[GenerateRequest]) -> list[GenerateResult]:
        """One result per request, in order.

        A request that takes longer than `generation_timeout_s`, or that the engine refuses, comes back with
        finish_reason `abort`, `error` set, and the tokens drawn so far. With `deterministic` the same requests give
        the same results bit for bit.

        Raises:
            EngineError: the engine died.
        """
        return await self._generation.generate(requests)

    async def pause(self, mode: InFlightPolicy) -> None:
        """Stops generation until `resume`; requests that arrive meanwhile wait.

        Args:
            mode: running requests keep their key-value cache (`in_place`), recompute it when resumed (`retract`), are
                waited for (`drain`), or leave the engine and are continued from their exact tokens (`abort_resume`).
        """
        await self._generation.pause(mode)

    async def resume(self) -> None:
        """Ends a pause."""
        await self._generation.resume()

    async def flush_cache(self) -> None:
        """Empties the prefix cache.

        Raises:
            EngineError: requests run in place, so it cannot be emptied.
        """
        await self._generation.flush_cache()

    async def init_weights_group(
        self, address: str, port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Joins a broadcast group of which rank 0 sends; rank t of this engine becomes rank `rank_offset + t`."""
        await self._weights.init_group(address, port, rank_offset, world_size, group_name, backend)

    async def destroy_weights_group(self, group_name: str) -> None:
        """Leaves a broadcast group."""
        await self._weights.destroy_group(group_name)

    async def begin_update(self) -> None:
        """Opens an update session; one that a failed update left open is closed first."""
        await self._weights.begin()

    async def receive_broadcast(self, specs: list[WeightSpec], group_name: str, flattened: bool) -> None:
        """Receives one bucket; see `WeightUpdates.receive_broadcast`."""
        await self._weights.receive_broadcast(specs, group_name, flattened)

    async def receive_tensors(self, handles: list[bytes]) -> None:
        """Loads one bucket shared on this node: one handle per rank of this engine."""
        await self._weights.receive_tensors(handles)

    async def end_update(self, version: int) -> None:
        """Closes the update session; tokens sampled from now on carry `version`."""
        await self._weights.end(version)
        self._generation.version = version

    async def checksums(self) -> dict[str, str]:
        """Checksum of every parameter on every rank, as `name@rank`; see `WeightUpdates.checksums`."""
        return await self._weights.checksums()

    def process_ids(self) -> list[int]:
        """The engine's processes and this one."""
        return [os.getpid(), *self._engine.processes()]

    def shutdown(self) -> None:
        """Ends the engine's processes and waits for them; may be called twice."""
        self._engine.stop()

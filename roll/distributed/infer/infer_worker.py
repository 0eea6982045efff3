"""One SGLang engine: its start, generation, pauses and end; weight updates are in `WeightReceiver`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from roll.base.events import EventLog
from roll.configs.asynchronous import versions_ahead
from roll.configs.roles import ActorInferConfig
from roll.distributed.calls.remote_errors import PROCESS_DIED, ClusterError
from roll.distributed.infer.engine_node import EngineNode, FurtherNodes
from roll.distributed.infer.sglang_engine import (
    Engine,
    EngineError,
    EngineNotRunningError,
    free_port,
    is_free,
    make_engine,
    preferred_port,
)
from roll.distributed.infer.sglang_generation import Generation
from roll.distributed.infer.weight_receiver import StaleWeightsError, WeightReceiver
from roll.distributed.processes import gc_freeze, pin
from roll.distributed.weights.engine_adapters import EngineAdapters, LoadedAdapter
from roll.distributed.worker import SYNC, P, ResultT, StrategyMethod, Worker, WorkerRank, register
from roll.rollout.engine_pool import EngineDownError
from roll.rollout.types import GenerateRequest, GenerateResult, SamplingParams

if TYPE_CHECKING:
    from roll.configs.roles import EngineRoleConfig
    from roll.configs.run_options import EngineOptions
    from roll.distributed.calls.remote_call import ClusterClient
    from roll.distributed.train.weight_sender import StageAdapters

PROBE_TOKEN = 1
"""Prompt of the request that checks a started engine; any token id would do."""

WEIGHTS, CACHE = "weights", "kv_cache"
"""SGLang's names of the memory that an engine can release."""

PORT_ATTEMPTS = 3
"""Starts of one engine, as long as it fails on a port that was taken between choosing and binding it."""


DOWN = {PROCESS_DIED, EngineNotRunningError.__name__, StaleWeightsError.__name__}
"""Kinds of errors that another engine, or the same one after its restart, would not raise."""

ANSWER_S = 10.0
"""Longest wait for the answer of an engine to the check whether it serves."""


class InferMethod(StrategyMethod["InferWorker", P, ResultT]):
    """A method of `InferWorker` that is documented at `Generation` or at `WeightReceiver`."""


class InferWorker(Worker):
    """One SGLang engine over `num_gpus_per_worker` devices; all methods run on the actor's event loop."""

    concurrent = True
    restartable = True
    spans_tensor_parallel = True
    further_node_cls = EngineNode
    config: EngineRoleConfig
    pipeline_config: EngineOptions

    def __init__(self, rank: WorkerRank, config: EngineRoleConfig, pipeline_config: EngineOptions) -> None:
        super().__init__(rank, config, pipeline_config)
        self.receiver = WeightReceiver(rank, config, pipeline_config, lambda: self.engine)
        self.adapters: EngineAdapters | None = None
        self._engine: Engine | None = None
        self._generation: Generation | None = None
        self._further_nodes: FurtherNodes | None = None
        self._released: set[str] = set()
        self._memory_changes = asyncio.Lock()

    @property
    def engine(self) -> Engine:
        """The engine.

        Raises:
            EngineNotRunningError: it was not started.
        """
        if self._engine is None:
            raise EngineNotRunningError(f"{self.rank.name}: the engine is not running; initialize() starts it")
        return self._engine

    @property
    def generation(self) -> Generation:
        """Requests to the engine.

        Raises:
            EngineNotRunningError: it was not started.
        """
        if self._generation is None:
            raise EngineNotRunningError(f"{self.rank.name}: the engine is not running; initialize() starts it")
        return self._generation

    @register(deadline="start_timeout_s")
    async def initialize(self) -> None:
        """Starts the engine and checks that it answers a request of one token.

        It is started once more where a signal, such as SIGKILL, has ended one of its processes.

        Raises:
            EngineError: it did not start, or did not answer, with SGLang's reason.
        """
        until = time.monotonic() + self.pipeline_config.start_timeout_s
        if self._engine is None:  # only the first time: it shares out the cores that this process was given
            self._engine = make_engine(self.rank, self.config, self.pipeline_config)
        try:
            await self._start_and_probe(self._engine, until)
        except EngineError as error:
            if not self._engine.killed:
                raise
            cause = str(error).removeprefix(f"{self.rank.name}: ")
            events = EventLog(self.pipeline_config.output_dir)
            events.record(self.rank.name, "start failed", f"is started once more: {cause}")
            self._end_engine()
            await self._start_and_probe(self._engine, until)
        if self.config.strategy_args.strategy_config.get("load_format") == "dummy":
            self.receiver.stale_weights = "it started on dummy weights and received no weight update yet"
        options = self.pipeline_config
        if isinstance(self.config, ActorInferConfig) and options.adapters(self.rank.platform) is not None:
            self.receiver.stale_weights = "it has no adapter yet"
            self.adapters = EngineAdapters(self._engine, options.async_generation_ratio, options.sync_timeout_s)
            self.generation.adapters = self.adapters
        gc_freeze()
        await self._engine.manager.freeze_gc()  # in the scheduler's processes too

    async def _start_and_probe(self, engine: Engine, until: float) -> None:
        config = self.config
        self._further_nodes = FurtherNodes(self.rank, engine.died)
        self._generation = Generation(
            engine,
            config.generation_timeout_s,
            deterministic=self.pipeline_config.deterministic,
            running=config.max_running_requests,
            newer=config.newer_requests(self.rank.platform),
            ahead=versions_ahead(self.pipeline_config.async_generation_ratio),
            version=lambda: self.receiver.version,
        )
        if self.rank.cores:
            pin(self.rank.cores)  # which the engine's processes inherit
        await self._start(engine, self._further_nodes, until)
        await self.probe(engine)
        await self.flush_cache()
        self._leave_cores()

    def _leave_cores(self) -> None:
        """On a CPU lets this process, which handles requests, run on any core of its node: the scheduler needs its own.

        For 1,024 answers of 3 tokens it takes two thirds of the scheduler's time.
        """
        if self.rank.cores and self.rank.platform == "cpu":
            pin(tuple(os.sched_getaffinity(os.getppid())))

    async def probe(self, engine: Engine) -> None:
        """Generates one token with the engine, which has started.

        Raises:
            EngineError: it does not.
        """
        request = GenerateRequest("probe", [PROBE_TOKEN], SamplingParams(max_new_tokens=1), seed=0)
        [answer] = await self.generation.generate([request])
        if answer.error is not None or len(answer.response_ids) != 1:
            self.close()
            raise EngineError(f"{self.rank.name}: the engine started but generates nothing: {answer.error}")

    @register(deadline="start_timeout_s")
    async def start_again(self, needs_weights: bool) -> None:
        """Starts an engine in place of the one that died, in this process or in a new one; requests are refused.

        With `needs_weights` they are refused until a weight update has updated the engine.

        Raises:
            EngineError: as in `initialize`, or a process of the earlier engine did not end.
        """
        if self._engine is not None:
            self._engine.died("it is started again")  # every request that it has, or that waits for it, fails
        self._end_engine()
        self.receiver.reset()
        self._released.clear()
        await self.initialize()
        if not needs_weights:
            self.receiver.stale_weights = ""

    @register(deadline="sync_timeout_s")
    async def leave_trainer(self, needs_weights: bool) -> None:
        """After the training ranks have ended: leaves their groups and empties the cache; requests were cancelled.

        With `needs_weights` requests are refused until new training ranks have sent their weights.

        Raises:
            EngineError: a request does not end, or a group cannot be left.
        """
        if needs_weights:
            self.receiver.stale_weights = "its trainer has ended, and the next one has sent no weights yet"
        await self.receiver.abort_update()
        await self.resume()
        await self.flush_cache()
        if self.adapters is not None:
            self.adapters.newest = {}
            await self.adapters.unload(lambda adapter: True)
        await self.receiver.leave_broadcast_groups()

    @register()
    async def check_health(self, timeout_s: float | None, watch_s: float = 0.0) -> None:
        """Checks that the engine's processes run and, unless `timeout_s` is None, that its scheduler answers in time.

        Returns after `watch_s` more seconds in which the engine did not die, or when it is stopped meanwhile.

        Raises:
            EngineNotRunningError: it died, with the cause.
            EngineError: it did not answer.
        """
        self.engine.check_running()
        if timeout_s is not None:
            with contextlib.suppress(EngineNotRunningError):  # it is raised below, with the cause alone
                await self.engine.wait_for(self.engine.manager.get_internal_state(), "health check", timeout_s)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.engine.death(), watch_s)
        if not self.engine.is_stopped:
            self.engine.check_running()

    def _end_engine(self) -> None:
        """Ends the processes of the engine, which may be started again."""
        if self._further_nodes is not None:
            self._further_nodes.stop_watching()
        if self._engine is not None:
            self._engine.end()

    async def _start(self, engine: Engine, further_nodes: FurtherNodes, until: float) -> None:
        """Starts the engine on a free port; tries another one if the port is taken before the engine binds it."""
        first = preferred_port(os.getpid())
        for attempt in range(PORT_ATTEMPTS):
            port, left_s = free_port(first), until - time.monotonic()
            try:
                if self.rank.nnodes == 1:
                    return await engine.start({"nccl_port": port}, left_s)
                address = f"{self.rank.address}:{port}"
                return await further_nodes.start(engine, address, left_s)
            except EngineError:
                if is_free(port) or attempt == PORT_ATTEMPTS - 1:
                    raise
            first = port + 1

    @register()
    async def generate(self, requests: list[GenerateRequest]) -> list[GenerateResult]:
        """One result per request, in order; requests that arrive during a weight update wait for its end.

        A request that takes longer than `generation_timeout_s`, or that the engine refuses, is returned with
        finish_reason `abort`, `error` set, and the tokens sampled so far. With `deterministic` the same requests give
        the same results bit for bit.

        Raises:
            StaleWeightsError: the engine has no complete version of the weights, and no update is in progress.
            EngineNotRunningError: the engine died.
        """
        engine = self.engine

        async def answers() -> list[GenerateResult]:
            await self.receiver.wait_until_serving()
            return await self.generation.generate(requests)

        answering = asyncio.ensure_future(answers())
        try:
            return await engine.wait_for(answering, "generate", None)  # also where requests wait for the end of a pause
        finally:
            answering.cancel()  # where the call was cancelled

    pause = InferMethod(lambda worker: worker.generation.pause, SYNC)
    resume = InferMethod(lambda worker: worker.generation.resume, SYNC)
    flush_cache = InferMethod(lambda worker: worker.generation.flush_cache, SYNC)
    join_broadcast_groups = InferMethod(lambda worker: worker.receiver.join_broadcast_groups, SYNC)
    leave_broadcast_groups = InferMethod(lambda worker: worker.receiver.leave_broadcast_groups, SYNC)
    begin_update = InferMethod(lambda worker: worker.receiver.begin_update, SYNC)
    receive_broadcast = InferMethod(lambda worker: worker.receiver.receive_broadcast, SYNC)
    receive_shared = InferMethod(lambda worker: worker.receiver.receive_shared, SYNC)
    receive_delta = InferMethod(lambda worker: worker.receiver.receive_delta, SYNC)
    end_update = InferMethod(lambda worker: worker.receiver.end_update, SYNC)
    checksums = InferMethod(lambda worker: worker.receiver.checksums, SYNC)
    commit_update = InferMethod(lambda worker: worker.receiver.commit_update, SYNC)
    abort_update = InferMethod(lambda worker: worker.receiver.abort_update, SYNC)

    @register(deadline="sync_timeout_s")
    async def load_adapter(self, version: int, stages: list[StageAdapters]) -> int:
        """Loads the adapters of all policies, while requests run; how many the engine has then.

        Requests that start later get them, those of all policies from the same moment on.

        Raises:
            EngineError: they arrived damaged, or SGLang does not load them or compute with them. The engine serves the
                version before.
        """
        if self.adapters is None:
            raise EngineError(f"{self.rank.name}: was not started for adapters")
        policies, loaded = dict.fromkeys(stage.policy for stage in stages), {}
        for policy in policies:
            own = [stage for stage in stages if stage.policy == policy]
            loaded[policy] = await self.adapters.load(policy, version, own)
            await self._try_adapter(self.adapters, loaded[policy])
        self.adapters.newest = loaded
        self.receiver.serve(version)
        await self.adapters.unload_old()
        return len(self.adapters.names)

    async def _try_adapter(self, adapters: EngineAdapters, adapter: LoadedAdapter) -> None:
        request = GenerateRequest("probe", [PROBE_TOKEN], SamplingParams(max_new_tokens=1), 0, policy=adapter.policy)
        answer = await self.generation.try_adapter(request, adapter)
        if answer.error is not None or len(answer.response_ids) != 1:
            await adapters.unload(lambda loaded: loaded is adapter)
            why = answer.error or "no token"
            raise EngineError(f"{self.rank.name}: generates nothing with adapter {adapter.name}: {why}")

    @register()
    async def release_memory(self, tags: list[str]) -> None:
        """Frees memory of the paused engine: CACHE empties its cache, WEIGHTS discards its weights.

        Without SGLang's memory saver, which needs a GPU, nothing is freed and nothing discarded.
        """
        async with self._memory_changes:
            tags = [tag for tag in tags if tag not in self._released]
            self._released.update(tags)  # also if the answer is late: SGLang takes messages in order
            await self._change_memory("release", tags)

    @register()
    async def resume_memory(self, tags: list[str]) -> None:
        """Allocates the released memory again; the weights are stale until a weight update has sent them."""
        async with self._memory_changes:
            tags = [tag for tag in tags if tag in self._released]
            self._released.difference_update(tags)
            await self._change_memory("resume", tags)

    async def _change_memory(self, change: Literal["release", "resume"], tags: list[str]) -> None:
        from sglang.srt.managers import io_struct

        if tags:
            message = getattr(io_struct, f"{change.title()}MemoryOccupationReqInput")(tags=tags)
            answer = getattr(self.engine.manager, f"{change}_memory_occupation")(message)
            what = f"{change} memory of {' and '.join(tags)}"
            await self.engine.wait_for(answer, what, self.pipeline_config.rpc_timeout_s)

    @register()
    async def is_serving(self) -> bool:
        """Whether the engine runs, and its weights are a complete version that is not being replaced."""
        return self._engine is not None and self._engine.is_running and self.receiver.has_version

    @register()
    async def process_ids(self) -> list[int]:
        return [os.getpid(), *(self._engine.processes() if self._engine is not None else [])]

    def close(self) -> None:
        """Ends the engine's processes on this node and waits for them; may be called twice."""
        if self._further_nodes is not None:
            self._further_nodes.stop_watching()
        if self._engine is not None:
            self._engine.stop()


@dataclass(frozen=True)
class EngineClient:
    """The engines of a run as the process that samples calls them; can be pickled."""

    client: ClusterClient[InferWorker]

    @property
    def world_size(self) -> int:
        return self.client.world_size

    async def generate(self, rank: int, requests: list[GenerateRequest], /) -> list[GenerateResult]:
        """Results of one engine; see `InferWorker.generate`.

        Raises:
            EngineDownError: the engine died, or is not started again yet.
            ClusterError: the engine failed otherwise.
        """
        try:
            [results] = await self.client.call([rank], InferWorker.generate, requests)
            return results
        except ClusterError as error:
            if error.kind in DOWN:
                raise EngineDownError(str(error)) from error
            raise

    async def is_serving(self, rank: int, /) -> bool:
        """Whether an engine runs and has current weights; False also where its process is being started."""
        try:
            async with asyncio.timeout(ANSWER_S):
                return (await self.client.call([rank], InferWorker.is_serving))[0]
        except (ClusterError, TimeoutError):
            return False

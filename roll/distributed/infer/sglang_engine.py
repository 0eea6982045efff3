"""One SGLang engine: its arguments and ports, and when its processes are started, watched and stopped."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import socket
import time
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import psutil

from roll.base.errors import RunError
from roll.configs.arguments import TORCH_DTYPES
from roll.configs.asynchronous import versions_ahead
from roll.configs.devices.system_envs import compiler_problem
from roll.configs.learning.lora import adapter_arguments
from roll.configs.pipeline import role_seed
from roll.configs.roles import ActorInferConfig, EngineRoleConfig
from roll.configs.run_options import EngineOptions, WorkerOptions
from roll.configs.scoring.scoring_roles import JudgeConfig, RewardEngineConfig, ScoringEngineConfig
from roll.distributed.core_pinning import read_topology
from roll.distributed.infer.sglang_processes import (
    exit_reason,
    ignore_quit_signal,
    import_engine,
    kill_reason,
    last_exception,
    shared_files,
    size_of,
    start_fork_server,
)
from roll.distributed.processes import gc_paused, kill, log_file, wait_for_end
from roll.distributed.weights.delta import LOADER
from roll.distributed.worker import WorkerRank
from roll.hub.names import local_model
from roll.models.families.hf_config import read_positions
from roll.models.families.shape import known_model_shape
from roll.platforms import get_platform
from roll.usercode.stopped import StopTimes, is_alive, is_stopped

T = TypeVar("T")

WATCH_INTERVAL_S = 0.5
"""How often the engine's processes are checked."""

STOPPED_S = 3.0
"""How long a process may be stopped by a signal, in a debugger's hands for example, before it counts as dead."""

FURTHER_NODE_GRACE_S = 5.0
"""How long a process of an engine over several nodes may be dead before it is the cause: where a whole node is lost,
the processes of others die of it before Ray knows."""

STOP_TIMEOUT_S = 20.0
"""Time killed processes get to disappear; a process with much memory needs seconds."""


class EngineError(RuntimeError):
    """The engine refused a request, died, or did not answer in time; the message names the request."""


class EngineNotRunningError(EngineError):
    """The engine was not started, was stopped, or died; another one can take its requests."""


class Engine:
    """SGLang's scheduler processes, seen from the process that owns them.

    SGLang asks the kernel to kill its processes when the thread that started them ends, so they are started by a
    thread that lives as long as this object: they always end with the owning process.

    Attributes:
        is_stopped: whether `stop` was called: the engine has not failed.
        killed: how a signal has ended a process of the last start, so that another start may succeed; else empty.
    """

    def __init__(self, name: str, arguments: dict[str, Any], environment: dict[str, str], log: str) -> None:
        """Starts nothing: `start` does.

        Args:
            name: of the engine in errors, such as `actor_infer-0`.
            arguments: SGLang's ServerArgs.
            environment: variables of the engine's processes; they remain set in this process.
            log: path of the log of this process and the engine's, for errors.
        """
        self.name = name
        self._log, self._logged = log, 0
        self.arguments = arguments
        self._environment = environment
        self._forks = arguments.get("device") == "cpu"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sglang-owner")
        self._engine: Any = None
        self._processes: list[psutil.Process] = []
        self._other_children: set[psutil.Process] = set()
        self._schedulers: list[int] = []
        self._children: list[BaseProcess] = []
        self._shared_files: set[Path] = set()
        self._death: asyncio.Future[str] | None = None
        self.is_stopped = False
        self.killed = ""
        self._watcher: asyncio.Task[None] | None = None

    @property
    def manager(self) -> Any:
        """SGLang's tokenizer manager, which takes requests and control messages.

        Raises:
            EngineNotRunningError: it was not started, or was stopped.
        """
        if self._engine is None:
            raise EngineNotRunningError(f"{self.name}: the engine is not running; initialize() starts it")
        return self._engine.tokenizer_manager

    async def start(self, arguments: dict[str, Any], timeout_s: float) -> None:
        """Starts the processes and waits until the model is loaded; may be called again after a failure.

        Args:
            arguments: further ServerArgs of this start.
            timeout_s: longest wait.

        Raises:
            EngineError: SGLang failed, with its reason, or was not ready within `timeout_s`.
        """
        loop = asyncio.get_running_loop()
        self.killed, self._children = "", []
        self._other_children = _child_processes()
        start = loop.run_in_executor(self._thread, self._launch, {**self.arguments, **arguments})
        killer = asyncio.create_task(self._kill_stopped())
        self._logged = size_of(self._log)
        try:
            self._engine = await asyncio.wait_for(asyncio.shield(start), timeout_s)
        except TimeoutError as error:
            raise EngineError(f"{self.name}: SGLang was not ready after {timeout_s:g} s (start_timeout_s)") from error
        except Exception as error:
            self.killed = await kill_reason(self._children)
            cause: object = error
            if self.killed:
                cause = f"one of its processes was {self.killed}; its log is {self._log}"
            elif exception := last_exception(self._log, self._logged):
                cause = f"{exception}; {error}; its log is {self._log}"
            raise EngineError(f"{self.name}: SGLang did not start: {cause}") from error
        finally:
            killer.cancel()
            self._processes = list(_child_processes() - self._other_children)
            self._shared_files = {path for process in self._processes for path in shared_files(process.pid)}
            if self._engine is None:
                start.add_done_callback(_discard)
                self._kill()
        self._schedulers = self._engine.get_all_child_pids()
        self._death = loop.create_future()
        self._watcher = asyncio.create_task(self._watch())

    def _launch(self, arguments: dict[str, Any]) -> Any:
        os.environ.update(self._environment)
        ignore_quit_signal()
        if self._forks:
            start_fork_server()
            self._other_children = _child_processes()  # the server is for later starts too
        with gc_paused():
            engine_class = import_engine(self._forks, self._children)
        engine = engine_class(**arguments)
        atexit.unregister(engine.shutdown)  # it would kill every child of this process
        if engine.tokenizer_manager is not None and engine.tokenizer_manager._subprocess_watchdog is not None:
            engine.tokenizer_manager._subprocess_watchdog.stop()  # `_watch` replaces it
        return engine

    async def wait_for(self, answer: Awaitable[T], what: str, timeout_s: float | None) -> T:
        """Awaits the engine's `answer` until the engine dies or `timeout_s` seconds have passed (None: no limit).

        Raises:
            EngineNotRunningError: the engine died; the message names `what` and the cause.
            EngineError: it did not answer in time.
        """
        if self._death is None:
            raise EngineNotRunningError(f"{self.name}: {what}: the engine is not running")
        death = self._death
        task = asyncio.ensure_future(answer)
        waited: set[asyncio.Future[Any]] = {task, death}
        await asyncio.wait(waited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        if death.done():
            raise EngineNotRunningError(f"{self.name}: {what}: {death.result()}")
        raise EngineError(f"{self.name}: {what}: no answer within {timeout_s:g} s")

    async def death(self) -> str:
        """Waits for the death of the running engine; its cause."""
        assert self._death is not None
        return await asyncio.shield(self._death)

    def died(self, cause: str) -> None:
        """Makes calls in progress and later ones fail with this cause; the first cause counts."""
        if self._death is not None and not self._death.done():
            self._death.set_result(cause)

    @property
    def is_running(self) -> bool:
        return self._death is not None and not self._death.done()

    def check_running(self) -> None:
        """Raises EngineNotRunningError with the cause unless the engine runs."""
        if self._death is None:
            raise EngineNotRunningError(f"{self.name}: the engine is not running")
        if self._death.done():
            raise EngineNotRunningError(f"{self.name}: {self._death.result()}")

    def processes(self) -> list[int]:
        return [process.pid for process in self._processes if is_alive(process)]

    async def _kill_stopped(self) -> None:
        """Kills processes that a signal has stopped for STOPPED_S while the engine starts: its start waits for them."""
        stop_times = StopTimes(is_stopped, STOPPED_S)
        while True:
            for process_id in stop_times.overdue(time.monotonic(), [process.pid for process in _child_processes()]):
                kill(process_id)
            await asyncio.sleep(WATCH_INTERVAL_S)

    async def _watch(self) -> None:
        """Waits for the death of a scheduler; other processes, such as those of torch's compiler, end when idle.

        A scheduler that was stopped by a signal for STOPPED_S counts as dead.
        """
        stop_times = StopTimes(is_stopped, STOPPED_S)
        while True:
            dead = sorted({*self._schedulers} - {*self.processes()})
            if stopped := stop_times.overdue(time.monotonic(), self._schedulers):
                return self.died(f"process {min(stopped)} of the engine is stopped by a signal")
            if dead:
                if "nnodes" in self.arguments and not self.arguments["node_rank"]:
                    await asyncio.sleep(FURTHER_NODE_GRACE_S)
                how = await exit_reason({child.pid: child for child in self._children}.get(dead[0]))
                self.killed = await kill_reason(self._children)
                exception = "" if self.killed else last_exception(self._log, self._logged)
                last = f", whose last exception is {exception}" if exception else ""
                return self.died(f"process {dead[0]} of the engine died{how}; its log is {self._log}{last}")
            await asyncio.sleep(WATCH_INTERVAL_S)

    def stop(self) -> None:
        """Ends the engine and waits until its processes are gone; may be called twice.

        Raises:
            EngineError: a process did not end.
        """
        self.is_stopped = True
        self.died("the engine was stopped")
        self.end()
        self._thread.shutdown(wait=False)

    def end(self) -> None:
        """Ends the processes of this start, if any; `start` may be called again.

        Raises:
            EngineError: a process did not end.
        """
        if self._watcher is not None:
            self._watcher.cancel()
        if self._engine is not None and self._engine.tokenizer_manager is not None:
            for task in self._engine.tokenizer_manager.asyncio_tasks:
                task.cancel()
        if self._engine is not None:
            _close_sockets(self._engine)
        self._engine = None
        self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            if is_alive(process):
                process.kill()
        if alive := wait_for_end(self._processes, STOP_TIMEOUT_S):
            raise EngineError(
                f"{self.name}: processes {[p.pid for p in alive]} are alive {STOP_TIMEOUT_S:g} s after SIGKILL"
            )
        for path in self._shared_files:  # killed processes leave them
            path.unlink(missing_ok=True)
        self._processes, self._shared_files = [], set()


def _discard(start: asyncio.Future[Any]) -> None:
    """Kills the processes of a start that ends after its timeout or cancellation."""
    if not start.cancelled() and start.exception() is None:
        for process_id in start.result().get_all_child_pids():
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(process_id).kill()


def _child_processes() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _close_sockets(engine: Any) -> None:
    """Closes the sockets to the engine's processes, which SGLang leaves open, and ends their contexts' threads."""
    import zmq

    owners = [owner for owner in (engine, engine.tokenizer_manager) if owner is not None]
    held = [each for owner in owners for each in vars(owner).values()]
    for context in {id(each.context): each.context for each in held if isinstance(each, zmq.Socket)}.values():
        context.destroy(linger=0)


CONTEXT_MARGIN = 8
"""SGLang refuses prompts that leave less than 6 tokens of its context, and ends responses 2 before its end. Responses
continued after a pause, and last turns of a conversation, reach that limit."""

LONGER_CONTEXT = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
"""Allows the margin where the longest sequence uses all positions of the model; no position beyond is ever used."""

FIRST_PORT = 20000
"""First port to try: above the ports of Ray's workers, below the kernel's ephemeral ports."""

PORTS = 8000
"""Number of ports to try."""

PORT_STRIDE = 16
"""Distance of the first ports of processes with consecutive ids."""


UNSHARED_PROMPT = 256
"""Longest prompt in tokens for which a single-turn run does without the prefix cache on a CPU. SGLang computes the
prompts of a group that arrive together in one batch, so they share nothing, and the cache costs time per request."""


def make_engine(rank: WorkerRank, config: EngineRoleConfig, pipeline: EngineOptions) -> Engine:
    """The engine of this rank, or its part on this node; not started.

    Raises:
        EngineError: SGLang cannot compile its kernels on this node.
    """
    platform, dtype = get_platform(rank.platform), config.model_args.dtype
    turns = pipeline.takes_turns(platform.name) and rank.role == "actor_infer"
    required = platform.engine_arguments(dtype, pipeline.deterministic, releases_memory=turns)
    seed = role_seed(pipeline.seed, rank.role, rank.rank)  # each request has its own seed as well
    arguments = engine_arguments(config, pipeline, required, seed)
    environment = {**LONGER_CONTEXT, **platform.engine_environment(dtype), **config.system_envs}
    if isinstance(config, ActorInferConfig) and (of_policies := pipeline.adapters(platform.name)):
        shape, ahead = known_model_shape(arguments["model_path"]), versions_ahead(pipeline.async_generation_ratio)
        arguments = adapter_arguments(of_policies.values(), shape, ahead) | arguments
    if pipeline.weight_update == "delta" and rank.role == "actor_infer":
        arguments["custom_weight_loader"] = [LOADER]
    if pipeline.replays_routing and rank.role == "actor_infer":
        arguments["enable_return_routed_experts"] = True
    if isinstance(config, RewardEngineConfig):
        environment |= VALUE_MODELS
    if platform.name == "cuda" and (why := compiler_problem(environment)):
        raise EngineError(f"{rank.name}: SGLang cannot start on {rank.address}: {why}")
    if arguments.get("device") == "cpu":
        environment |= engine_threads(arguments["tp_size"], rank.nnodes)
    if rank.nnodes > 1:
        arguments |= {"nnodes": rank.nnodes, "node_rank": rank.node_rank}
        environment["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"
    return Engine(rank.name, arguments, environment, log_file(pipeline, rank.process_name))


def engine_arguments(
    worker: EngineRoleConfig, pipeline: WorkerOptions, platform_arguments: dict[str, Any], seed: int
) -> dict[str, Any]:
    """ServerArgs of one engine: from our keys, from the platform, and `strategy_config` unchanged, in rising priority.

    The engine's context is the longest sequence, of a scoring model its own, plus CONTEXT_MARGIN, so that a sequence
    may end at the model's last position. On a CPU the key-value pool is sized for `max_running_requests` sequences of
    that length, because SGLang cannot measure device memory there; `strategy_config.max_total_tokens` overrides it. The
    prefix cache is off on a CPU where prompts are short and no request continues another (see UNSHARED_PROMPT).
    """
    options = worker.strategy_args.strategy_config
    model = worker.model_args.model_name_or_path or pipeline.pretrain
    longest = scoring_length(worker) if isinstance(worker, ScoringEngineConfig) else pipeline.max_sequence_length
    arguments: dict[str, Any] = {
        "model_path": None if model is None else str(local_model(model)),
        "dtype": TORCH_DTYPES[worker.model_args.dtype],
        "tp_size": worker.num_gpus_per_worker,
        "max_running_requests": worker.max_running_requests,
        "random_seed": seed,
        "skip_tokenizer_init": True,
        "weight_version": "0",
        "log_level": "error",
        "context_length": longest + CONTEXT_MARGIN,
        **platform_arguments,
    }
    if isinstance(worker, RewardEngineConfig):
        arguments |= value_model_arguments(arguments["model_path"], pipeline.deterministic)
    if arguments.get("device") == "cpu":
        arguments["max_total_tokens"] = worker.max_running_requests * arguments["context_length"]
        one_turn = pipeline.pipeline == "rlvr" and not isinstance(worker, JudgeConfig)
        short = one_turn and pipeline.prompt_length <= UNSHARED_PROMPT
        arguments["disable_radix_cache"] = short or arguments.get("disable_radix_cache", False)
    return {**arguments, **options}


def scoring_length(worker: ScoringEngineConfig) -> int:
    """Tokens of the longest sequence of a judge, answer included, or of a reward model.

    Raises:
        RunError: it is not given, and the model does not say how many positions it has.
    """
    name = worker.model_args.model_name_or_path or ""
    longest = worker.sequence_length or read_positions(local_model(name))
    if longest is None:
        role = "judge" if isinstance(worker, JudgeConfig) else "reward"
        raise RunError(f"{role}.sequence_length: is not set, and {name} does not say how many positions it has; set it")
    return longest


VALUE_MODELS = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "roll.distributed.infer.sglang_models"}
"""Lets an engine find the classes of `sglang_models/value_models.py`."""


def value_model_arguments(folder: str, deterministic: bool) -> dict[str, Any]:
    """ServerArgs by which an engine gives one value for a sequence, for the model in `folder`.

    The names of the classes are not those of SGLang, which has others for the same folders: a class that could not be
    imported is an error. With `deterministic` a score depends on no cached prefix of another sequence.
    """
    family = known_model_shape(folder, value_head=True).family
    overrides = {"architectures": [family.scorer_name]}
    return {
        "is_embedding": True,
        "json_model_override_args": json.dumps(overrides),
        "disable_radix_cache": deterministic,
    }


def preferred_port(process_id: int) -> int:
    """First port to try for the engine of this process, so that engines of one node rarely try the same one."""
    return FIRST_PORT + process_id * PORT_STRIDE % PORTS


def free_port(first: int, count: int = PORTS) -> int:
    """The first free port among `first` to `first + count - 1`, found by binding it.

    Raises:
        RuntimeError: all of them are in use.
    """
    for port in range(first, first + count):
        if is_free(port):
            return port
    raise RuntimeError(f"ports {first} to {first + count - 1} are all in use; end the processes that hold them")


def is_free(port: int) -> bool:
    """Whether a server could now listen on `port` of all interfaces."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def engine_threads(tensor_parallel: int, nodes: int = 1) -> dict[str, str]:
    """Environment variables that give each of an engine's ranks on this node its share of this process's cores.

    Threads and pinning must agree (two OpenMP threads on one core cost a factor of twenty), so a rank gets as many
    threads as its share of this process's cores, or of OMP_NUM_THREADS where that is smaller.
    """
    topology = read_topology()
    cores = topology.ordered(topology.cores)  # so that two ranks share no physical core
    threads = min(int(os.environ.get("OMP_NUM_THREADS", len(cores))), len(cores))
    ranks = tensor_parallel // nodes
    share = max(1, threads // ranks)
    environment = {"OMP_NUM_THREADS": str(share)}
    if tensor_parallel > 1:
        spans = [cores[rank * share % len(cores) :][:share] for rank in range(ranks)]
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, span)) for span in spans)
    return environment

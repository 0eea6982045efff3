"""Runs a function on every rank of a parallel layout, in spawned processes with a deadline."""

from __future__ import annotations

import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import time
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.configs.parallel_layout import ParallelLayout
from roll.distributed.process_groups import hold_port, open_port

if TYPE_CHECKING:
    import socket

DEADLINE_S = 270.0
STRATEGIES = 40  # most that one scenario builds; each has a port of its own


class RankFailed(AssertionError):
    """A rank raised or ran out of time; the message is its traceback."""


@dataclass
class RankContext:
    """What a scenario gets: who it is, where to write, and strategies, each on a port that rank 0 holds."""

    layout: ParallelLayout
    rank: int
    folder: Path
    arguments: dict[str, Any]
    ports: list[int]
    results: dict[str, Any] = field(default_factory=dict)

    def strategy(
        self,
        model: Path,
        megatron: dict[str, Any] | None = None,
        training: dict[str, Any] | None = None,
        dtype: str = "fp32",
        infer: bool = False,
        **pipeline: Any,
    ) -> Any:
        """An initialised strategy of this rank; shut it down before asking for the next."""
        from roll.configs.pipeline import SFTConfig
        from roll.configs.roles import (
            ActorTrainConfig,
            MegatronTrainArguments,
            MegatronTrainConfig,
            TrainingArguments,
            TrainModelArguments,
        )
        from roll.platforms import get_platform

        get_platform("cpu").prepare_megatron()
        from roll.distributed.strategy.megatron_strategy import MegatronInferStrategy, MegatronTrainStrategy

        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.ports.pop(0)))
        sizes = {
            "tensor_model_parallel_size": self.layout.tensor,
            "pipeline_model_parallel_size": self.layout.pipeline,
        }
        worker = ActorTrainConfig(
            model_args=TrainModelArguments(model_name_or_path=str(model), dtype=dtype),
            training_args=TrainingArguments(**({"learning_rate": 1e-3} | (training or {}))),
            strategy_args=MegatronTrainArguments(strategy_config=MegatronTrainConfig(**sizes | (megatron or {}))),
            device_mapping=list(range(self.layout.world_size)),
        )
        times = {"start_timeout_s": 60.0, "rpc_timeout_s": 60.0}
        config = SFTConfig(**times | {"response_length": 1024, "actor_train": worker} | pipeline)
        kind = MegatronInferStrategy if infer else MegatronTrainStrategy
        strategy = kind(worker, config, self.layout, self.rank, get_platform("cpu"))
        strategy.initialize()
        return strategy


def run_on_ranks(
    scenario: str, layout: ParallelLayout, folder: Path, deadline_s: float = DEADLINE_S, **arguments: Any
) -> list[dict[str, Any]]:
    """Calls `scenario` ("module:function") with a RankContext on every rank; returns each rank's `results`.

    Raises:
        RankFailed: with the first traceback; the other ranks are ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    listeners = [open_port() for _ in range(STRATEGIES)]
    context = multiprocessing.get_context("spawn")
    receivers, processes = [], []
    for rank in range(layout.world_size):
        receiver, sender = context.Pipe(duplex=False)
        job = (scenario, layout, rank, folder, arguments, listeners if rank == 0 else _ports(listeners))
        process = context.Process(target=_main, args=(sender, job), daemon=True)
        process.start()
        sender.close()
        receivers.append(receiver)
        processes.append(process)
    for listener in listeners:
        listener.close()
    try:
        return _collect(receivers, time.monotonic() + deadline_s, deadline_s)
    finally:
        for process in processes:
            process.join(timeout=5.0)
            if process.is_alive():
                process.kill()
                process.join()


def _collect(receivers: list[Any], deadline: float, deadline_s: float) -> list[dict[str, Any]]:
    results: dict[int, dict[str, Any]] = {}
    while len(results) < len(receivers):
        waiting = {rank: receiver for rank, receiver in enumerate(receivers) if rank not in results}
        ready = multiprocessing.connection.wait(list(waiting.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(f"ranks {sorted(waiting)} did not finish within {deadline_s:.0f} s")
        for rank, receiver in waiting.items():
            if receiver in ready:
                results[rank] = _receive(rank, receiver)
    return [results[rank] for rank in sorted(results)]


def _receive(rank: int, receiver: Any) -> dict[str, Any]:
    try:
        error, result = receiver.recv()
    except EOFError:
        raise RankFailed(f"rank {rank} ended without a result") from None
    if error:
        raise RankFailed(f"rank {rank}:\n{error}")
    return pickle.loads(result)


def _main(sender: Any, job: tuple[Any, ...]) -> None:
    scenario, layout, rank, folder, arguments, ports = job
    if rank == 0:
        ports = [hold_port(listener) for listener in ports]
    warnings.filterwarnings("ignore")
    try:
        from roll.platforms import get_platform

        cores = sorted(os.sched_getaffinity(0))
        get_platform("cpu").setup_process([cores[rank % len(cores)]], threads=1)
        context = RankContext(layout, rank, folder, arguments, list(ports))
        module, name = scenario.split(":")
        getattr(importlib.import_module(module), name)(context)
        sender.send((None, pickle.dumps(context.results)))
    except BaseException:
        sender.send((traceback.format_exc(), b""))


def _ports(listeners: list[socket.socket]) -> list[int]:
    return [listener.getsockname()[1] for listener in listeners]

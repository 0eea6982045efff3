"""From this project's configuration to SGLang's ServerArgs; no sglang import, so a plan can check options."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import os
import socket
from pathlib import Path
from typing import Any

from roll.configs.pipeline import BaseConfig
from roll.configs.worker import WorkerConfig

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

DERIVED = {
    "model_path": "model_args.model_name_or_path",
    "dtype": "model_args.dtype",
    "tp_size": "num_gpus_per_worker",
    "tensor_parallel_size": "num_gpus_per_worker",
    "max_running_requests": "max_running_requests",
    "random_seed": "seed",
    "skip_tokenizer_init": "nothing: token ids are all that passes",
}
"""Options of SGLang that this project's own keys decide, and the key to use instead."""

FIRST_PORT = 20000
"""Search for free ports starts here, away from Ray's and from the ephemeral range."""

PORTS = 10000
"""Ports searched."""


def engine_arguments(
    worker: WorkerConfig, pipeline: BaseConfig, platform_arguments: dict[str, Any], seed: int, nccl_port: int
) -> dict[str, Any]:
    """ServerArgs of one engine: what the platform forces, what our keys decide, then `strategy_config` as it is.

    On a CPU the key-value pool is sized for `max_running_requests` sequences of full length, because SGLang has no
    device memory to measure there; `strategy_config.max_total_tokens` overrides it.
    """
    options = worker.strategy_args.strategy_config
    arguments: dict[str, Any] = {
        "model_path": worker.model_args.model_name_or_path or pipeline.pretrain,
        "dtype": DTYPES[worker.model_args.dtype],
        "tp_size": worker.num_gpus_per_worker,
        "max_running_requests": worker.max_running_requests,
        "random_seed": seed,
        "skip_tokenizer_init": True,
        "nccl_port": nccl_port,
        "weight_version": "0",
        "log_level": "error",
        **platform_arguments,
    }
    if arguments.get("device") == "cpu":
        arguments["max_total_tokens"] = worker.max_running_requests * full_length(pipeline)
    elif pipeline.deterministic:
        arguments["enable_deterministic_inference"] = True
    return {**arguments, **options, "nccl_port": nccl_port}


def full_length(pipeline: BaseConfig) -> int:
    """Tokens of the longest sequence of a run, prompt and response.

    Raises:
        ValueError: the configuration gives neither `sequence_length` nor `response_length`.
    """
    if pipeline.sequence_length is not None:
        return pipeline.sequence_length
    if pipeline.response_length is None:
        raise ValueError("response_length: give it or sequence_length")
    return pipeline.prompt_length + pipeline.response_length


def check_engine_options(options: dict[str, Any], path: str) -> list[str]:
    """What is wrong with the `strategy_config` at `path`, one sentence each; empty when SGLang is not installed."""
    known = known_options()
    problems = []
    for name in options:
        if name in DERIVED:
            problems.append(f"{path}.{name}: this is decided by {DERIVED[name]}; set that instead")
        elif known and name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            problems.append(f"{path}.{name}: SGLang has no such option{hint}")
    return problems


def known_options() -> frozenset[str]:
    """Names of SGLang's ServerArgs, read from its source without importing it; empty when it is not installed."""
    package = importlib.util.find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        return frozenset()
    source = Path(package.submodule_search_locations[0]) / "srt" / "arg_groups" / "field_order.py"
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "POSITIONAL_FIELD_ORDER":
            return frozenset(ast.literal_eval(node.value))
    raise RuntimeError(f"{source} does not list SGLang's options; this project is built for the pinned SGLang")


def free_port(first: int = FIRST_PORT, count: int = PORTS) -> int:
    """The first port from `first` on that nothing holds, found by binding it on all interfaces.

    Raises:
        RuntimeError: all `count` ports are in use.
    """
    for port in range(first, first + count):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"ports {first} to {first + count - 1} are all in use; end what holds them")


def thread_environment(tensor_parallel: int) -> dict[str, str]:
    """Environment that gives each of an engine's ranks its share of this process's cores.

    Threads and pinning must agree (two OpenMP threads on one core cost a factor of twenty), so the threads of a rank
    are its share of the cores this process may use, or of OMP_NUM_THREADS when that is smaller.
    """
    cores = sorted(os.sched_getaffinity(0))
    threads = min(int(os.environ.get("OMP_NUM_THREADS", len(cores))), len(cores))
    share = max(1, threads // tensor_parallel)
    environment = {"OMP_NUM_THREADS": str(share)}
    if tensor_parallel > 1:
        spans = [cores[rank * share % len(cores) :][:share] for rank in range(tensor_parallel)]
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, span)) for span in spans)
    return environment

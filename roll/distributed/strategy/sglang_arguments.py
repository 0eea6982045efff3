"""From this project's configuration to SGLang's ServerArgs, ports and threads."""

from __future__ import annotations

import os
import socket
from typing import Any

from roll.configs.pipeline import BaseConfig
from roll.configs.roles import ActorInferConfig

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

CONTEXT_MARGIN = 8
"""SGLang refuses prompts that leave less than 6 tokens of its context, and ends responses 2 before its end. Responses
that go on after a pause, and last turns of a conversation, get there."""

LONGER_CONTEXT = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
"""Allows the margin where the longest sequence is all that the model has positions for; none beyond is ever used."""

FIRST_PORT = 20000
"""Ports are taken from here on: above those of Ray's workers, below those the kernel hands out."""

PORTS = 8000
"""Ports searched."""

PORT_STRIDE = 16
"""Owners of engines with neighbouring process ids start their search this far apart."""


def engine_arguments(
    worker: ActorInferConfig, pipeline: BaseConfig, platform_arguments: dict[str, Any], seed: int
) -> dict[str, Any]:
    """ServerArgs of one engine: what the platform forces, what our keys decide, then `strategy_config` as it is.

    The engine's context is the longest sequence and CONTEXT_MARGIN: it may end at the model's last position.

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
        "weight_version": "0",
        "log_level": "error",
        "context_length": full_length(pipeline) + CONTEXT_MARGIN,
        **platform_arguments,
    }
    if arguments.get("device") == "cpu":
        arguments["max_total_tokens"] = worker.max_running_requests * arguments["context_length"]
    return {**arguments, **options}


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


def preferred_port(process_id: int) -> int:
    """Where the owner of an engine starts to look for a port: owners on one node rarely meet there."""
    return FIRST_PORT + process_id * PORT_STRIDE % PORTS


def free_port(first: int, count: int = PORTS) -> int:
    """The first port from `first` on that nothing holds, found by binding it.

    Raises:
        RuntimeError: all `count` ports are in use.
    """
    for port in range(first, first + count):
        if is_free(port):
            return port
    raise RuntimeError(f"ports {first} to {first + count - 1} are all in use; end what holds them")


def is_free(port: int) -> bool:
    """Whether a server could listen on `port` of any interface now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


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

"""ServerArgs, ports and threads of one engine."""

from __future__ import annotations

import os
import socket

import pytest

from roll.configs.agentic import AgenticConfig
from roll.configs.pipeline import RLVRConfig
from roll.configs.roles import ActorInferConfig
from roll.distributed.strategy.sglang_engine import (
    CONTEXT_MARGIN,
    UNSHARED_PROMPT,
    engine_arguments,
    engine_threads,
    free_port,
)


def test_our_keys_decide_and_engine_options_pass_through():
    worker, pipeline = ActorInferConfig(num_gpus_per_worker=2, max_running_requests=8), RLVRConfig(pretrain="/models/a")
    worker.model_args.dtype = "fp32"
    worker.strategy_args.strategy_config = {"load_format": "dummy", "max_total_tokens": 500}
    pipeline.prompt_length, pipeline.response_length = 100, 50
    arguments = engine_arguments(worker, pipeline, {"device": "cpu"}, seed=3)
    assert arguments["model_path"] == "/models/a"
    assert (arguments["dtype"], arguments["tp_size"], arguments["random_seed"]) == ("float32", 2, 3)
    assert (arguments["load_format"], arguments["max_total_tokens"]) == ("dummy", 500)


def test_the_cache_on_cpu_holds_every_running_request_at_full_length():
    worker, pipeline = ActorInferConfig(max_running_requests=8), RLVRConfig(prompt_length=100, response_length=50)
    arguments = engine_arguments(worker, pipeline, {"device": "cpu"}, 0)
    assert arguments["context_length"] == 150 + CONTEXT_MARGIN
    assert arguments["max_total_tokens"] == 8 * arguments["context_length"]
    assert "max_total_tokens" not in engine_arguments(worker, pipeline, {}, 0)


def test_the_prefix_cache_is_off_on_cpu_where_prompts_are_short_and_stand_alone():
    def off(pipeline, options=None, platform=None):
        worker = ActorInferConfig()
        worker.strategy_args.strategy_config = options or {}
        return engine_arguments(worker, pipeline, platform or {"device": "cpu"}, 0).get("disable_radix_cache")

    short = {"prompt_length": UNSHARED_PROMPT, "response_length": 50}
    assert off(RLVRConfig(**short)) is True
    assert off(RLVRConfig(**short), {"disable_radix_cache": False}) is False
    assert off(RLVRConfig(**short | {"prompt_length": UNSHARED_PROMPT + 1})) is False
    assert off(AgenticConfig(**short)) is False
    assert off(RLVRConfig(**short), platform={"device": "cuda"}) is None


def test_a_configuration_without_lengths_is_refused_with_a_remedy():
    with pytest.raises(ValueError, match="response_length: set it or sequence_length"):
        _ = RLVRConfig().max_sequence_length


def test_a_port_in_use_is_skipped():
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        assert free_port(port) > port
        with pytest.raises(RuntimeError, match=f"ports {port} to {port} are all in use"):
            free_port(port, count=1)


def test_ranks_of_an_engine_share_its_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6, 7})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert engine_threads(1) == {"OMP_NUM_THREADS": "4"}
    assert engine_threads(2) == {"OMP_NUM_THREADS": "2", "SGLANG_CPU_OMP_THREADS_BIND": "4,5|6,7"}
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert engine_threads(1) == {"OMP_NUM_THREADS": "2"}


def test_more_ranks_than_cores_share_them(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert engine_threads(2) == {"OMP_NUM_THREADS": "1", "SGLANG_CPU_OMP_THREADS_BIND": "3|3"}

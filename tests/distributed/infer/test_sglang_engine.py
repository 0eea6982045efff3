"""ServerArgs, ports and threads of one engine."""

from __future__ import annotations

import json
import os
import socket

import pytest

from roll.configs.agentic import AgenticConfig
from roll.configs.pipeline import RLVRConfig
from roll.configs.roles import ActorInferConfig
from roll.configs.scoring.scoring_roles import RewardEngineConfig
from roll.distributed.infer.sglang_engine import (
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


@pytest.mark.parametrize("kind", ["Token", "Sequence"])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_an_engine_of_a_reward_model_gives_one_value(tmp_path, family, kind):
    shape = {"num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    shape |= {"vocab_size": 9, "max_position_embeddings": 64, "architectures": [f"{family}For{kind}Classification"]}
    (tmp_path / "config.json").write_text(json.dumps(shape | {"id2label": {"0": "score"}}))
    worker, pipeline = RewardEngineConfig(max_running_requests=4), RLVRConfig(prompt_length=1000, response_length=9)
    worker.model_args.model_name_or_path = str(tmp_path)
    arguments = engine_arguments(worker, pipeline, {"device": "cpu"}, 0)
    assert arguments["is_embedding"] is True and arguments["disable_radix_cache"] is False
    overrides = json.loads(arguments["json_model_override_args"])
    assert overrides == {"architectures": [f"{family}ValueModel"]}
    assert arguments["context_length"] == 64 + CONTEXT_MARGIN, "its own positions, not those of the policy"
    assert arguments["max_total_tokens"] == 4 * arguments["context_length"]
    pipeline.deterministic = True
    assert engine_arguments(worker, pipeline, {"device": "cpu"}, 0)["disable_radix_cache"] is True


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

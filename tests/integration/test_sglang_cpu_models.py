"""Engines whose decoder layers are one call: parity for each family, and the same bits however a token was computed."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest
import ray
import torch
from sglang_host import EngineHost, RemoteEngine, largest_difference, requests, start_host
from sglang_model_runner import which_models_are_taken

from roll.models.tiny import write_tiny_model
from roll.rollout.types import GenerateRequest, SamplingParams

pytestmark = pytest.mark.integration

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPE = {"max_position_embeddings": 2056, "eos_token_id": None, "vocab_size": 101}
MODELS = {
    "qwen2": {"head_dim": 16},
    "qwen3": {"tie_word_embeddings": True},
    "llama": {"rope_parameters": LLAMA3_ROPE, "attention_bias": True},
}


CORES = (min(os.sched_getaffinity(0)),)
"""Of the engine's processes."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: write_tiny_model(root / family, family, **SHAPE | more) for family, more in MODELS.items()}


def test_which_models_run_as_one_call(folders):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        found = process.submit(which_models_are_taken, [*map(str, folders.values())]).result(timeout=300)
    for taken in found:
        assert {name for name, yes in taken.items() if yes} == {"installed", "nothing"}


@pytest.fixture(scope="module", params=MODELS)
def folder(request, folders):
    return folders[request.param]


@pytest.fixture(scope="module")
def host(on_ray):
    host = start_host(EngineHost)
    yield host
    ray.kill(host)


@pytest.fixture(scope="module")
def engine(host, folder):
    engine = RemoteEngine(folder, actor=host, disable_radix_cache=True, cores=CORES)
    engine.initialize()
    yield engine
    engine.close()


def group(prompt: list[int], samples: int, first_seed: int, tokens: int = 12) -> list[GenerateRequest]:
    sampling = SamplingParams(tokens, 1.0)
    return [GenerateRequest(f"g{first_seed + i}", prompt, sampling, seed=first_seed + i) for i in range(samples)]


def test_log_probs_are_those_of_transformers(engine, folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    asked = [*requests(6, 24), *group(list(range(5, 90)), 3, 50)]
    assert largest_difference(model, asked, engine.generate(asked)) < 1e-4


def test_samples_of_one_prompt_are_computed_once_and_are_the_same_bits_alone(engine):
    asked = [*group([7, 8, 9, 10], 5, 0), *requests(3, 12), *group(list(range(3, 60)), 4, 20)]
    together = engine.generate([asked[i] for i in (5, 0, 8, 1, 9, 2, 6, 3, 10, 4, 11, 7)])
    by_id = {answer.request_id: answer for answer in together}
    for request in asked:
        [alone] = engine.generate([request])
        assert alone.response_ids == by_id[request.request_id].response_ids
        assert alone.log_probs == by_id[request.request_id].log_probs


def test_a_response_that_is_continued_has_the_bits_of_one_that_was_not_stopped(engine):
    [request] = group(list(range(11, 31)), 1, 77, tokens=30)
    [whole] = engine.generate([request])
    beginning = whole.response_ids[:13]
    rest = replace(request, prompt_ids=[*request.prompt_ids, *beginning], sampling=SamplingParams(17, 1.0))
    [continued] = engine.generate([rest])
    assert continued.response_ids == whole.response_ids[13:]
    assert continued.log_probs == whole.log_probs[13:]


def test_greedy_and_truncated_requests_of_a_batch_do_not_change_the_bits_of_others(engine):
    plain = requests(6, 20)
    [greedy] = [
        replace(each, sampling=replace(each.sampling, temperature=0.0)) for each in requests(1, 20, first_seed=60)
    ]
    truncated = [
        replace(each, request_id=f"t{i}", sampling=replace(each.sampling, top_p=0.7, top_k=5))
        for i, each in enumerate(requests(3, 20, first_seed=70))
    ]
    greedy = replace(greedy, request_id="greedy")
    alone = engine.generate(plain)
    mixed = {answer.request_id: answer for answer in engine.generate([greedy, *plain, *truncated])}
    for answer in alone:
        assert answer.response_ids == mixed[answer.request_id].response_ids
        assert answer.log_probs == mixed[answer.request_id].log_probs


def test_the_process_that_handles_requests_leaves_the_cores_to_the_scheduler(engine):
    own, schedulers = engine.affinities()
    assert schedulers == [set(CORES)]
    assert own == os.sched_getaffinity(0), "that of the node's other processes"

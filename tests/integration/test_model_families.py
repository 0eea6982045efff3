"""Families beside llama and qwen against transformers: log-probs, gradients and exports of Megatron, and engines."""

from __future__ import annotations

import pytest
import ray
import torch
from safetensors.torch import load_file
from sglang_host import EngineHost, RemoteEngine, Sender, largest_difference, requests, start_host

from roll.configs.devices.parallel_layout import ParallelLayout
from roll.distributed.infer.sglang_checksums import EngineChecksums
from roll.models.tiny import write_tiny_model
from tests.integration.megatron_scenario import LENGTHS, PROMPT, WIDTH, token_batch
from tests.processes import PATIENCE_S

pytestmark = pytest.mark.integration

SHAPE = {"max_position_embeddings": 2056, "eos_token_id": None, "vocab_size": 101}
MODELS = {"mistral": {}, "phi3": {"rope_parameters": {"rope_theta": 25e4, "rope_type": "default"}}, "glm4": {}}
MODELS["gemma3"] = {
    "tie_word_embeddings": True,
    "sliding_window": 8,
    "query_pre_attn_scalar": 17,
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding")],
}
LAYOUTS = {"tp1": ParallelLayout(), "tp2": ParallelLayout(tensor=2)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: write_tiny_model(root / family, family, **SHAPE | more) for family, more in MODELS.items()}


@pytest.fixture(scope="module")
def run(folders, rank_pool, tmp_path_factory):
    """Results of a layout's ranks, and the folder they wrote."""
    written = {layout: tmp_path_factory.mktemp(layout) for layout in LAYOUTS}
    running = {
        layout: rank_pool.start("tests.integration.gradient_scenario:families", sizes, written[layout], models=folders)
        for layout, sizes in LAYOUTS.items()
    }
    return lambda layout: (running[layout].result(), written[layout])


def load(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def expected(folders):
    """Log-probs, and the gradients of the mean over the tokens of responses, of transformers."""
    batch = token_batch()
    scored = batch["attention_mask"].bool() & (torch.arange(WIDTH) >= PROMPT)
    values = {}
    for family, folder in folders.items():
        model = load(folder)
        log_probs = torch.log_softmax(model(**batch).logits[:, :-1], -1).gather(2, batch["input_ids"][:, 1:, None])
        log_probs = torch.where(scored, torch.nn.functional.pad(log_probs.squeeze(2), (1, 0)), 0.0)
        (-log_probs.sum() / sum(length - PROMPT for length in LENGTHS)).backward()
        values[family] = log_probs.detach(), {name: each.grad for name, each in model.named_parameters()}
    return values


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("packed", [False, True])
def test_log_probs_and_gradients_are_those_of_transformers(run, expected, layout, family, packed):
    ranks, _ = run(layout)
    log_probs, gradients = expected[family]
    for rank in ranks:
        found, ours = rank[family, packed]
        torch.testing.assert_close(found, log_probs, atol=1e-4, rtol=0)
        assert ours.keys() == gradients.keys()
        for name, value in gradients.items():
            difference = (ours[name] - value).abs().max().item()
            assert difference < 2e-6 + 1e-4 * value.abs().max().item(), f"{name}: {difference}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", MODELS)
def test_an_export_is_the_folder_bit_for_bit(run, folders, layout, family):
    _, written = run(layout)
    original = load_file(folders[family] / "model.safetensors")
    exported = {
        key: value for file in (written / family).glob("*.safetensors") for key, value in load_file(file).items()
    }
    assert original.keys() == exported.keys()
    assert all(torch.equal(original[name], exported[name]) for name in original)


@pytest.fixture(scope="module")
def host(on_ray):
    host = start_host(EngineHost)
    yield host
    ray.kill(host)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_agrees_with_transformers_before_and_after_an_update(host, folders, family, ranks, tmp_path):
    engine = RemoteEngine(folders[family], ranks, actor=host)
    engine.initialize()
    sender = ray.remote(num_cpus=0)(Sender).remote()
    try:
        asked = requests(8, 24)
        assert largest_difference(load(folders[family]), asked, engine.generate(asked)) < 1e-4
        other = write_tiny_model(tmp_path / "other", family, seed=1, **SHAPE | MODELS[family])
        tensors = load_file(other / "model.safetensors")
        engine.begin_update(1)
        engine.receive_shared([[ray.get(sender.share.remote(tensors), timeout=PATIENCE_S)] * ranks])
        engine.end_update(1)
        checksums = EngineChecksums.of_model(folders[family], ranks)
        for name, tensor in tensors.items():
            checksums.add(name, tensor)
        assert engine.checksums() == checksums.result()
        engine.commit_update()
        engine.flush_cache()
        assert largest_difference(load(other), asked, engine.generate(asked)) < 1e-4
    finally:
        ray.kill(sender)
        engine.close()

"""Frozen parts: no gradients, no optimizer state, the same bytes after steps; the others train as before."""

from __future__ import annotations

import pytest
import torch

from roll.configs.devices.parallel_layout import ParallelLayout
from roll.models.tiny import write_tiny_model

pytestmark = pytest.mark.integration

EMBEDDING, FIRST = "model.embed_tokens", "model.layers.0."
FULL = {"megatron": {"recompute_granularity": "full"}}
OVERLAPPED = {"megatron": {"overlap_grad_reduce": True, "overlap_param_gather": True}}
VARIANTS = {
    "tp1": {
        "first layers, recomputed": ([EMBEDDING, FIRST], "untied", FULL),
        "head": (["lm_head"], "untied", {"dtype": "bf16"}),
        "by Megatron's names": (["decoder.layers.1.mlp", "embedding"], "tied", {"packed": True}),
    },
    "tp2": {"norms": ([EMBEDDING, "model.norm"], "untied", {"megatron": {"sequence_parallel": True}})},
    "pp2": {"tied, on both stages": ([EMBEDDING], "tied", {"megatron": {"use_distributed_optimizer": False}})},
    "dp2": {"overlapped": (["lm_head", "model.layers.3."], "untied", OVERLAPPED)},
}
LAYOUTS = {
    "tp1": ParallelLayout(),
    "tp2": ParallelLayout(tensor=2),
    "pp2": ParallelLayout(pipeline=2),
    "dp2": ParallelLayout(data=2),
}
ALL = [(layout, name) for layout, names in VARIANTS.items() for name in names]


@pytest.fixture(scope="module")
def run(rank_pool, tmp_path_factory):
    root = tmp_path_factory.mktemp("frozen")
    models = {
        name: write_tiny_model(root / name, "qwen3", tie_word_embeddings=name == "tied") for name in ("tied", "untied")
    }
    running = {
        layout: rank_pool.start(
            "tests.integration.gradient_scenario:frozen",
            LAYOUTS[layout],
            root / layout,
            variants={
                name: (parts, str(models[model]), options) for name, (parts, model, options) in VARIANTS[layout].items()
            },
        )
        for layout in VARIANTS
    }
    return lambda layout: running[layout].result()


@pytest.mark.parametrize("layout, name", ALL)
def test_frozen_weights_keep_their_bytes_and_the_others_have_the_gradients_of_full_training(run, layout, name):
    ranks = [rank[name] for rank in run(layout)]
    of_megatron = {"decoder.layers.1.mlp": "model.layers.1.mlp", "embedding": EMBEDDING}
    names = [of_megatron.get(part, part) for part in VARIANTS[layout][name][0]]
    trained = 0
    for rank in ranks:
        for key, value in rank["after"].items():
            is_norm = name.startswith("by") and key == "model.layers.1.post_attention_layernorm.weight"
            frozen = is_norm or key.startswith(tuple(names))
            assert torch.equal(value, rank["before"][key]) == frozen, key
            assert (key in rank["found"]) != frozen, key
            trained += not frozen
            if not frozen and LAYOUTS[layout].data == 1:  # else a rank has the sums of its own shard alone
                tolerance = 2e-2 if value.dtype == torch.bfloat16 else 1e-5
                torch.testing.assert_close(rank["found"][key], rank["expected"][key], atol=tolerance, rtol=tolerance)
    assert trained > 20


@pytest.mark.parametrize("layout, name", ALL)
def test_a_resumed_run_with_frozen_parts_repeats_the_unbroken_one(run, layout, name):
    for rank in run(layout):
        resumed, unbroken, same = rank[name]["resumed"]
        assert resumed == unbroken and same


def test_frozen_weights_have_neither_gradient_buffers_nor_optimizer_state(run):
    (rank,) = run("tp1")
    found = rank["first layers, recomputed"]
    trained = sum(tensor.nbytes for tensor in found["found"].values())
    memory = found["memory"]
    padded = 11 * 64 * 4  # rows of the head beyond the vocabulary
    assert memory["gradients"] == pytest.approx(trained + padded, rel=0.01)
    assert memory["optimizer"] == pytest.approx(2 * (trained + padded), rel=0.01)
    assert memory["parameters"] > 1.2 * trained

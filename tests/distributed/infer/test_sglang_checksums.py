"""Checksums of tensors arranged as an engine stores them."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
import torch

from roll.distributed.infer.sglang_checksums import (
    TILE_WORDS,
    EngineChecksums,
    checksum,
    cuda_checksum,
    engine_places,
)
from roll.models.families.registry import family_named
from roll.models.families.shape import model_shape

LAYER = "model.layers.0."
MODEL = model_shape(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 1,
        "hidden_size": 6,
        "intermediate_size": 6,
        "num_attention_heads": 4,
        "vocab_size": 70,
    }
)


def digest(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in tensors)).digest()[:8].hex()


def result(tensors: dict[str, torch.Tensor], ranks: int, key_heads: int = 2, tied: bool = False) -> dict[str, str]:
    checksums = EngineChecksums(replace(MODEL, kv_heads=key_heads, tied=tied), ranks)
    for name, tensor in tensors.items():
        checksums.add(name, tensor)
    return checksums.result()


def test_names_of_fused_parameters():
    places = engine_places(replace(MODEL, family=family_named("qwen2")))
    assert places[LAYER + "self_attn.k_proj.bias"].parameter == LAYER + "self_attn.qkv_proj.bias"
    places = engine_places(MODEL)
    assert places[LAYER + "mlp.up_proj.weight"].parameter == LAYER + "mlp.gate_up_proj.weight"
    assert all(places[name].parameter == name for name in (LAYER + "self_attn.q_norm.weight", "lm_head.weight"))


def test_query_key_and_value_are_one_parameter_in_any_order():
    q, k, v = torch.randn(8, 6), torch.randn(4, 6), torch.randn(4, 6)
    parts = {LAYER + f"self_attn.{name}_proj.weight": t for name, t in (("v", v), ("q", q), ("k", k))}
    fused = LAYER + "self_attn.qkv_proj.weight"
    assert result(parts, 1) == {f"{fused}@0": digest(q, k, v)}
    assert result(parts, 2) == {f"{fused}@{rank}": digest(*(t.chunk(2)[rank] for t in (q, k, v))) for rank in (0, 1)}


def test_key_heads_are_repeated_where_there_are_more_ranks_than_heads():
    q, k, v = torch.randn(8, 6), torch.randn(2, 6), torch.randn(2, 6)
    parts = {LAYER + f"self_attn.{name}_proj.weight": t for name, t in (("q", q), ("k", k), ("v", v))}
    fused = result(parts, 4, key_heads=2)
    assert fused[LAYER + "self_attn.qkv_proj.weight@3"] == digest(q[6:], k[1:], v[1:])
    assert fused[LAYER + "self_attn.qkv_proj.weight@1"] == digest(q[2:4], k[:1], v[:1])


def test_output_layers_are_split_by_columns_and_the_vocabulary_is_padded():
    down, embedding = torch.randn(4, 6), torch.randn(70, 3)
    found = result({LAYER + "mlp.down_proj.weight": down, "model.embed_tokens.weight": embedding}, 2)
    assert found[LAYER + "mlp.down_proj.weight@1"] == digest(down[:, 3:])
    assert found["model.embed_tokens.weight@0"] == digest(embedding[:64])
    assert found["model.embed_tokens.weight@1"] == digest(embedding[64:], torch.zeros(58, 3))


@pytest.mark.parametrize(
    "name", [LAYER + "input_layernorm.weight", LAYER + "self_attn.q_norm.weight", "model.norm.weight"]
)
def test_every_rank_has_norms_whole(name):
    norm = torch.randn(6)
    assert result({name: norm}, 2) == {f"{name}@{rank}": digest(norm) for rank in (0, 1)}


def test_a_tensor_that_the_family_does_not_have_is_an_error():
    with pytest.raises(ValueError, match=r"mlp.gate.weight: is not a tensor of a Qwen3ForCausalLM"):
        result({LAYER + "mlp.gate.weight": torch.randn(6)}, 1)


def test_a_tied_head_is_not_a_parameter():
    assert result({"lm_head.weight": torch.ones(64, 2)}, 1, tied=True) == {}


def test_a_missing_part_is_named():
    with pytest.raises(ValueError, match=r"gate_up_proj.weight: \S+up_proj.weight was not sent, only"):
        result({LAYER + "mlp.gate_proj.weight": torch.ones(2, 2)}, 1)


def test_one_altered_element_changes_the_checksum():
    tensor = torch.randn(5, 5)
    altered = tensor.clone()
    altered[3, 2] = torch.nextafter(altered[3, 2], torch.tensor(9e9))
    assert checksum([tensor]) != checksum([altered])
    assert cuda_checksum(tensor) != cuda_checksum(altered)


def reference_cuda_hash(data: bytes) -> int:
    """The GPU's hash word by word, in plain integers."""
    word = 0xFFFFFFFF

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x85EBCA6B & word
        x ^= x >> 13
        x = x * 0xC2B2AE35 & word
        return x ^ x >> 16

    def rotate(x: int, bits: int) -> int:
        return (x << bits | x >> 32 - bits) & word

    seeds = 0x243F6A88, (0x243F6A88 * 0x9E3779B1 ^ 0xDEADBEEF) & word
    data += bytes(-len(data) % 4)
    words = [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]
    total = 0
    for first in range(0, len(words), TILE_WORDS):
        lanes = []
        for seed, factor, bits in zip(seeds, (0x27D4EB2D, 0x165667B1), (15, 13), strict=True):
            indexed = enumerate(words[first : first + TILE_WORDS], first)
            lane = sum(mix(w ^ ((i * factor + seed & word) ^ rotate(i, bits))) for i, w in indexed) & word
            lanes.append(mix(lane ^ len(words) * 4))
        total += lanes[0] << 32 | lanes[1]
    total &= (1 << 64) - 1
    total ^= total >> 30
    total = total * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    total ^= total >> 27
    total = total * 0x94D049BB133111EB & (1 << 64) - 1
    return total ^ total >> 31


@pytest.mark.parametrize("count", [1, 3, TILE_WORDS, 2 * TILE_WORDS + 5])
def test_the_hash_of_a_gpu_in_torch_operators(count):
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(torch.bfloat16)
    assert cuda_checksum(tensor) == f"{reference_cuda_hash(tensor.view(torch.uint8).numpy().tobytes()):016x}"

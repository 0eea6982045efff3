from dataclasses import replace

import pytest
import torch

from roll.models.families.decoder import EMBEDDING, LAYER
from roll.models.families.layouts import GatedPair, GroupedQKV, InputSplit, Replicated, Vocabulary, padded_vocabulary
from roll.models.families.shape import model_shape
from roll.models.families.weights import stage_rules

CONFIG = model_shape(
    {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 4,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 2,
        "vocab_size": 37,
    }
)
CASES = {
    "replicated": (Replicated(), [(8,)]),
    "input split": (InputSplit(), [(8, 16)]),
    "vocabulary": (Vocabulary(), [(37, 8)]),
    "gated pair": (GatedPair(), [(16, 8), (16, 8)]),
    "grouped weight": (GroupedQKV(), [(16, 8), (8, 8), (8, 8)]),
    "grouped bias": (GroupedQKV(), [(16,), (8,), (8,)]),
}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("case", CASES)
def test_merge_and_write_are_inverse_to_shard(case, ranks):
    layout, shapes = CASES[case]
    tensors = [torch.randn(shape) for shape in shapes]
    shards = [layout.shard(tensors, CONFIG, rank, ranks) for rank in range(ranks)]
    if case == "vocabulary":
        height = padded_vocabulary(37, ranks) // ranks
        shards = [torch.cat([shard, torch.zeros(height - len(shard), 8)]) for shard in shards]
    merged = layout.merge(shards, CONFIG)
    assert all(torch.equal(one, other) for one, other in zip(merged, tensors, strict=True))
    written = [torch.full_like(tensor, torch.nan) for tensor in tensors]
    for rank, shard in enumerate(shards):
        for part, target in enumerate(written):
            layout.write(shard, target, part, CONFIG, rank)
    assert all(torch.equal(one, other) for one, other in zip(written, tensors, strict=True))
    assert layout.hf_shapes(shards[0].shape, ranks, CONFIG) == shapes


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(16, 2, 8), (32, 4, 16), (8, 1, 8), (16, 2, 16)])
def test_ranks_may_have_parts_of_heads(heads, kv_heads, ranks):
    config = replace(CONFIG, heads=heads, kv_heads=kv_heads, head_dim=8)
    tensors = [torch.randn(rows * 8, 5) for rows in (heads, kv_heads, kv_heads)]
    written = [torch.full_like(tensor, torch.nan) for tensor in tensors]
    for rank in range(ranks):
        shard = GroupedQKV().shard(tensors, config, rank, ranks)
        assert len(shard) == (heads + 2 * kv_heads) * 8 // ranks
        for part, target in enumerate(written):
            GroupedQKV().write(shard, target, part, config, rank)
    assert all(torch.equal(one, other) for one, other in zip(written, tensors, strict=True))


def test_query_groups_are_interleaved():
    query, key, value = (torch.arange(rows).float()[:, None] + 100 * part for part, rows in enumerate((16, 8, 8)))
    first = GroupedQKV().shard([query, key, value], CONFIG, rank=0, ranks=4).squeeze(1)
    assert first.tolist() == [0, 1, 2, 3, 100, 101, 200, 201]


def test_padded_vocabulary_is_equal_for_power_of_two_ranks():
    assert {padded_vocabulary(37, ranks) for ranks in (1, 2, 4, 8, 16)} == {48}
    assert padded_vocabulary(37, 3) % 3 == 0


def test_pipeline_stages_together_have_all_rules():
    whole = stage_rules(CONFIG, 0, 4, first=True, last=True)
    halves = stage_rules(CONFIG, 0, 2, True, False) + stage_rules(CONFIG, 2, 2, False, True)
    assert [rule.hf for rule in whole] == [rule.hf for rule in halves]
    assert len(whole) == 3 + 4 * len(LAYER)


def test_the_last_stage_has_a_copy_of_tied_embeddings():
    tied = replace(CONFIG, tied=True)
    last = stage_rules(tied, 2, 2, first=False, last=True)
    assert last[-1].is_copy and last[-1].hf == EMBEDDING.hf and last[-1].megatron == "output_layer.weight"
    assert "output_layer.weight" not in [rule.megatron for rule in stage_rules(tied, 0, 4, True, True)]

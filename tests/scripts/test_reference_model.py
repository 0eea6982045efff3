from __future__ import annotations

from pathlib import Path

import torch

from roll.datasets.batch import Batch
from scripts.reference_model import Reference, write_random_model

SHAPE = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 64,
}


def test_the_reference_computes_the_log_probs_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(write_random_model(tmp_path, SHAPE, "fp32"), dtype=torch.float32)
    ids = torch.randint(0, 101, (3, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = Reference(tmp_path).log_probs(Batch({"input_ids": ids}), 0.7)
        expected = torch.log_softmax(model(ids).logits[:, :-1] / 0.7, -1).gather(-1, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(found[:, 1:], expected, atol=1e-4, rtol=0)

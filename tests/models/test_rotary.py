import pytest
import torch

from roll.models.hf_config import decoder_config
from roll.models.rotary import rotary_frequencies

SCALINGS = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_frequencies_are_those_of_transformers(kind):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    hf = LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=32, rope_parameters=SCALINGS[kind])
    ours = decoder_config(hf.to_dict() | {"architectures": ["LlamaForCausalLM"]})
    expected = LlamaRotaryEmbedding(hf).inv_freq
    torch.testing.assert_close(rotary_frequencies(ours.rotary, ours.head_size), expected, rtol=1e-6, atol=0)

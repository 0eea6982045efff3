import json

import pytest

from roll.configs.model_config import UnsupportedModel
from roll.models.hf_config import RotaryConfig, decoder_config, read_hf_config

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 11,
    "tie_word_embeddings": True,
}


def test_shapes_and_family_properties_are_read():
    config = decoder_config(QWEN2)
    assert (config.family, config.heads, config.kv_heads, config.head_size) == ("qwen2", 4, 2, 2)
    assert config.qkv_bias and not config.qk_norm and config.tied_embeddings
    assert decoder_config(QWEN2 | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 5}).qk_norm


def test_rotary_settings_are_read_in_old_and_new_format():
    new = {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}}
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}
    common = {"base": 5e5, "kind": "linear", "factor": 4.0, "original_positions": 8192}
    assert decoder_config(QWEN2 | new).rotary == RotaryConfig(**common)
    assert decoder_config(QWEN2 | old).rotary == RotaryConfig(**common)


def test_errors_name_a_missing_folder_and_an_invalid_file(tmp_path):
    with pytest.raises(UnsupportedModel, match="no such file; give the folder of a HF model"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedModel, match="not JSON"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN2 | {"hidden_act": "gelu"}))
    with pytest.raises(UnsupportedModel, match='config.json: hidden_act: "gelu" is not supported; allowed: "silu"'):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN2))
    assert read_hf_config(tmp_path).layers == 2

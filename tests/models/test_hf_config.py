"""Which config.json of a model is accepted, and the errors for others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from roll.models.families.hf_config import UnsupportedModel, check_model_config
from roll.models.families.layouts import TRAINED_VOCABULARY_MULTIPLE
from roll.models.families.shape import RotaryConfig, known_model_shape, model_shape, read_model_shape
from roll.models.tiny import write_tiny_model
from tests.configs.samples import MODEL, refusal

QWEN = json.loads(Path(MODEL, "config.json").read_text())

REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"architectures": ["Qwen2ForCausalML"]},
        "architectures: Qwen2ForCausalML is not supported; known: ",
    ),
    ({"architectures": ["Qwen2ForCausalML"]}, "nearest is Qwen2ForCausalLM"),
    ({"architectures": None}, "architectures: null is not a list with a name; known: "),
    ({"architectures": "Qwen2ForCausalLM"}, 'architectures: "Qwen2ForCausalLM" is not a list with a name'),
    ({"architectures": 5}, "architectures: 5 is not a list with a name"),
    ({"hidden_act": "gelu"}, 'hidden_act: "gelu" is not supported; allowed: "silu"'),
    ({"use_sliding_window": True}, "use_sliding_window: true is not supported; allowed: false"),
    ({"architectures": ["LlamaForCausalLM"], "attention_bias": True}, "attention_bias: true is not supported"),
    ({"quantization_config": {"bits": 4}}, 'quantization_config: {"bits": 4} is not supported; allowed: null'),
    ({"rope_scaling": {"rope_type": "yarn"}}, 'rope_type: "yarn" is not supported; known: default, linear, llama3'),
    ({"rope_scaling": "linear"}, 'rope_scaling: "linear" is not an object'),
    ({"rope_theta": "1e6"}, 'rope_theta: "1e6" is not a number above 0'),
    ({"rms_norm_eps": None}, "rms_norm_eps: null is not a number above 0"),
    ({"tie_word_embeddings": "false"}, 'tie_word_embeddings: "false" is not true or false'),
    ({"num_hidden_layers": 0}, "num_hidden_layers: 0 is not a whole number above 0"),
    ({"num_attention_heads": "4"}, 'num_attention_heads: "4" is not a whole number above 0'),
    ({"num_attention_heads": 0}, "num_attention_heads: 0 is not a whole number above 0"),
    ({"num_attention_heads": None}, "num_attention_heads: null is not a whole number above 0"),
    ({"num_attention_heads": 27}, "num_attention_heads: 27 does not divide hidden_size 3584; give head_dim"),
    ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide num_attention_heads 28"),
    ({"vocab_size": -1}, "vocab_size: -1 is not a whole number above 0"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers: 1,000,000,000 is more than 10,000"),
    ({"vocab_size": 10**12}, "vocab_size: 1,000,000,000,000 is more than 134,217,728"),
]


def model(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(QWEN | changes))
    return folder


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_a_plan_refuses_a_model_that_cannot_be_trained(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    reported = refusal(tmp_path, f"pretrain={model(tmp_path, **changes)}")
    assert f"pretrain: {tmp_path}/config.json: " in reported and message in reported


def test_optional_model_settings_may_be_missing(tmp_path: Path) -> None:
    off = {"use_sliding_window": False, "quantization_config": None, "num_key_value_heads": None, "rope_scaling": None}
    shape = read_model_shape(model(tmp_path, **off))
    assert shape is not None and shape.kv_heads == shape.heads
    check_model_config(QWEN)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000, "1" * 5000, "\ud800"])
def test_invalid_model_config_is_explained(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogatepass"))
    assert f"{tmp_path}/config.json: is not a model configuration" in refusal(tmp_path, f"pretrain={tmp_path}")


def test_a_git_lfs_pointer_is_no_model_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")
    assert f"{tmp_path}/config.json: is a git-lfs pointer" in refusal(tmp_path, f"pretrain={tmp_path}")


def test_a_model_without_a_size_is_explained(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({key: QWEN[key] for key in QWEN if key != "hidden_size"}))
    assert "config.json: has no hidden_size; give a whole number" in refusal(tmp_path, f"pretrain={tmp_path}")


def test_rotary_settings_are_read_in_old_and_new_format() -> None:
    new = {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}}
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}
    plain = {key: value for key, value in QWEN.items() if key not in ("rope_theta", "max_position_embeddings")}
    expected = RotaryConfig(base=5e5, kind="linear", factor=4.0, original_positions=8192)
    assert [model_shape(plain | settings).rotary for settings in (new, old)] == [expected, expected]


def test_a_folder_that_a_run_needs_has_a_config(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="no such file; give the folder of a HF model"):
        known_model_shape(tmp_path)


def test_at_the_crossover_length_attention_takes_as_many_operations_as_the_matrices(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama", tie_word_embeddings=True, vocab_size=6 * TRAINED_VOCABULARY_MULTIPLE)
    shape = read_model_shape(folder)
    assert shape is not None
    files = load_file(folder / "model.safetensors").values()
    matrices = sum(tensor.numel() for tensor in files if tensor.dim() == 2)  # the tied embedding is the head
    for value_head, parameters in ((False, matrices), (True, matrices - shape.vocabulary * shape.hidden)):
        length = replace(shape, value_head=value_head).crossover_length()
        causal_pairs = length**2 / 2
        products = 2 * shape.layers * shape.heads * shape.head_dim * causal_pairs  # with keys and with values
        assert parameters * length == pytest.approx(products)

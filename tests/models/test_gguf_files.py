"""Models in GGUF files: the folder made from one is the model that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from roll.hub.names import HubError, converted_folder, gguf_file, local_model
from roll.models.families.shape import known_model_shape, read_model_shape
from roll.models.families.weights import gguf_tensors
from roll.models.gguf_files import convert_gguf
from roll.models.tiny import write_tiny_model

SHAPE = {"num_hidden_layers": 2, "head_dim": 32, "hidden_size": 128, "tie_word_embeddings": True}
TOKENS = ["<s>", "</s>", "Ġ", *"abcdefgh", "ab", "cd", *(f"t{number}" for number in range(88))]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)


def write_gguf(path: Path, architecture: str, quantization: GGMLQuantizationType, **extra: Any) -> Path:
    """A tiny model of random weights with a tokenizer of 101 tokens."""
    folder = write_tiny_model(path.parent / "original", architecture, **SHAPE)
    config = json.loads((folder / "config.json").read_text())
    writer = GGUFWriter(path, extra.pop("named", architecture))
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(128)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(32)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(5000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.CONTROL if token == "t7" else TokenType.NORMAL for token in TOKENS])
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in gguf_tensors(known_model_shape(folder)).items():
        weights = tensors[tensor.hf].float().numpy()
        if architecture == "llama" and ("q_proj" in tensor.hf or "k_proj" in tensor.hf):
            weights = weights.reshape(-1, 2, 16, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)
        used = quantization if weights.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(np.ascontiguousarray(weights), used), raw_dtype=used)
    for name in extra:
        writer.add_tensor(name, np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_converted_model_has_the_weights_that_transformers_reads(tmp_path: Path, architecture: str) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", architecture, GGMLQuantizationType.Q8_0)
    convert_gguf(file, weights=True)
    model = AutoModelForCausalLM.from_pretrained(local_model(file), dtype=torch.float32)
    read = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    state = model.state_dict()
    assert set(state) - {"lm_head.weight"} <= set(read)
    assert all(torch.equal(state[name], values) for name, values in read.items())
    shape = read_model_shape(local_model(file))
    assert shape is not None and (shape.layers, shape.kv_heads, shape.head_dim, shape.tied) == (2, 2, 32, True)
    assert model.config.rope_parameters["rope_theta"] == 5000.0 and model.config.eos_token_id == 1


def test_unquantised_weights_are_the_original_bit_for_bit(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", "llama", GGMLQuantizationType.F32)
    convert_gguf(file, weights=True)
    original = load_file(tmp_path / "original" / "model.safetensors")
    converted = load_file(local_model(file) / "model-00001.safetensors")
    assert set(converted) == set(original)
    assert all(torch.equal(converted[name], values) for name, values in original.items())


def test_a_plan_makes_the_config_and_the_tokenizer_but_no_weights(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    file = write_gguf(folder / "tiny.gguf", "qwen2", GGMLQuantizationType.F16)
    convert_gguf(folder, weights=False)
    assert local_model(folder) == converted_folder(file) and not list(local_model(folder).glob("*.safetensors"))
    assert AutoTokenizer.from_pretrained(local_model(folder)).convert_ids_to_tokens([0, 3, 1]) == ["<s>", "a", "</s>"]


def test_the_special_tokens_are_those_of_the_file(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", "llama", GGMLQuantizationType.F16)
    convert_gguf(file, weights=False)
    tokenizer = AutoTokenizer.from_pretrained(local_model(file))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    control = TOKENS.index("t7")
    assert tokenizer("at7b")["input_ids"] == [TOKENS.index("a"), control, TOKENS.index("b")]
    assert tokenizer.decode([1, control], skip_special_tokens=True) == ""


def test_a_changed_file_is_another_model(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", "llama", GGMLQuantizationType.F16)
    before = converted_folder(file)
    file.write_bytes(file.read_bytes() + b"\0")
    assert converted_folder(file) != before


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"named": "gemma3"}, "architecture gemma3 is not supported; known: llama, qwen2, qwen3"),
        ({"rope_freqs.weight": 1}, "rescales its rotary embedding"),
        ({"blk.0.ffn_gate_exps.weight": 1}, "tensor blk.0.ffn_gate_exps.weight is not part of a llama model"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", "llama", GGMLQuantizationType.F32, **extra)
    with pytest.raises(HubError, match=message):
        convert_gguf(file, weights=True)
    assert not (converted_folder(file) / "config.json").exists()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is not a whole GGUF file"),
        (b"GGUF", "is not a whole GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\n" * 4, "is a git-lfs pointer, not the file itself; run git lfs"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "cut.gguf"
    file.write_bytes(content)
    with pytest.raises(HubError, match=f"cut.gguf: {problem}"):
        convert_gguf(file, weights=True)


def test_a_folder_is_a_gguf_model_only_with_one_such_file_and_no_safetensors(tmp_path: Path) -> None:
    assert gguf_file(tmp_path) is None
    (tmp_path / "a.gguf").touch()
    assert gguf_file(tmp_path) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    assert gguf_file(tmp_path) is None
    (tmp_path / "b.gguf").rename(tmp_path / "model.safetensors")
    assert gguf_file(tmp_path) is None

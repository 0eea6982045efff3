"""Folders of the model family in `own_family.py`: Llama whose keys and weights have other names."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

KEYS = {"n_layer": "num_hidden_layers", "n_embd": "hidden_size", "n_head": "num_attention_heads"}
"""Key of the family's config.json -> key of llama's."""

NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.norm": "transformer.ln_f",
    "lm_head": "unembed",
    "model.layers.": "transformer.h.",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.q_proj": "attn.query",
    "self_attn.k_proj": "attn.key",
    "self_attn.v_proj": "attn.value",
    "self_attn.o_proj": "attn.out",
    "mlp.gate_proj": "ffn.gate",
    "mlp.up_proj": "ffn.up",
    "mlp.down_proj": "ffn.down",
}
"""Part of a name in llama's folder -> in the family's."""


def renamed(name: str) -> str:
    for part, other in NAMES.items():
        name = name.replace(part, other)
    return name


def write_renamed(llama: Path, folder: Path) -> Path:
    """The model of a llama folder under the names of this family."""
    own = {other: key for key, other in KEYS.items()}
    config = json.loads((llama / "config.json").read_text())
    config = {own.get(key, key): value for key, value in config.items()} | {"architectures": ["RenamedForCausalLM"]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {renamed(name): tensor for name, tensor in load_file(llama / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder

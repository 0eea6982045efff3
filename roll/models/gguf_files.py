"""Models in GGUF files: read as a Hugging Face folder in the cache, which is made once from the file; no torch.

`pretrain: model.gguf`, or a folder with one GGUF file and no safetensors, names such a model. A plan makes config.json
and the tokenizer; a run adds the weights, dequantised to fp32, which is exact for every type that `gguf` reads.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.base.errors import git_lfs_pointer
from roll.hub.names import CONFIG_NAME, WEIGHT_INDEX, HubError, converted_folder, gguf_file, has_tokenizer
from roll.models.families.registry import families
from roll.models.families.shape import model_shape
from roll.models.families.weights import gguf_tensors

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader

logger = logging.getLogger(__name__)

SIZES = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
"""Key of config.json -> key of a GGUF file, after the architecture."""

SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding"}
"""Special token of config.json -> its name in a GGUF file."""


SHARD_BYTES = 1 << 30
"""A file of weights is closed once it has this size; it is held in memory until then."""

PROGRESS_INTERVAL_S = 5.0
"""Time between two log lines."""


def convert_gguf(text: str | Path, weights: bool) -> None:
    """Makes config.json and the tokenizer of a GGUF file in the cache, and with `weights` its safetensors.

    A text that names no GGUF file, and a model that the cache has, are left alone.

    Raises:
        HubError: no GGUF file of a known architecture, or the cache cannot be written.
    """
    from filelock import FileLock

    file = gguf_file(text)
    if file is None:
        return
    folder = converted_folder(file)
    wanted = WEIGHT_INDEX if weights else CONFIG_NAME
    if (folder / wanted).is_file():
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            if not (folder / wanted).is_file():
                _convert(file, folder, weights)
    except OSError as error:
        raise HubError(f"{folder}: cannot be written: {error.strerror}; set HF_HOME to another folder") from error


def _convert(file: Path, folder: Path, weights: bool) -> None:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
    except (ValueError, IndexError, OSError) as error:
        raise HubError(f"{file}: {git_lfs_pointer(file) or f'is not a whole GGUF file: {error}'}") from error
    config = model_config(reader, file)
    if not has_tokenizer(folder):
        logger.info("reading the tokenizer of %s", file)
        _tokenizer(config, file).save_pretrained(folder)
    if weights:
        _write_weights(reader, config, file, folder)
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2))


def _tokenizer(config: dict[str, Any], file: Path) -> Any:
    """The tokenizer with the special tokens of the file: transformers takes bos for eos, and leaves pad out."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    for name in SPECIAL:
        if (number := config.get(f"{name}_token_id")) is not None:
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(number))
    return tokenizer


def model_config(reader: GGUFReader, file: Path) -> dict[str, Any]:
    """config.json of the model.

    Raises:
        HubError: its architecture or a rescaling of its rotary embedding is not supported.
    """
    architecture = _value(reader, "general.architecture")
    known = {family.gguf.architecture: family for family in families() if family.gguf is not None}
    if architecture not in known:
        raise HubError(f"{file}: architecture {architecture} is not supported; known: {', '.join(known)}")
    names = {tensor.name: tensor for tensor in reader.tensors}
    if "token_embd.weight" not in names:
        raise HubError(f"{file}: has no tensor token_embd.weight, so it is not a whole model")
    scaling = _value(reader, f"{architecture}.rope.scaling.type")
    if "rope_freqs.weight" in names or scaling not in (None, "none"):
        raise HubError(f"{file}: rescales its rotary embedding, which is not read; use the Hugging Face folder")
    config = {key: _value(reader, f"{architecture}.{name}") for key, name in SIZES.items()}
    heads = config["num_attention_heads"]
    head_dim = _value(reader, f"{architecture}.attention.key_length") or config["hidden_size"] // heads
    config |= {f"{key}_token_id": _value(reader, f"tokenizer.ggml.{name}_token_id") for key, name in SPECIAL.items()}
    return {
        "architectures": [known[architecture].architecture],
        "model_type": known[architecture].name,
        **{key: value for key, value in config.items() if value is not None},
        "head_dim": head_dim,
        "vocab_size": int(names["token_embd.weight"].shape[1]),
        "tie_word_embeddings": "output.weight" not in names,
        "hidden_act": "silu",
        "dtype": "float32",
    }


def _value(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _tensors(reader: GGUFReader, config: dict[str, Any], file: Path) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors in fp32 under their names in a Hugging Face folder.

    Raises:
        HubError: a tensor is unknown, or of a type that `gguf` cannot dequantise.
    """
    import numpy as np
    from gguf.quants import dequantize

    tensors = gguf_tensors(model_shape(config))
    for tensor in reader.tensors:
        if tensor.name not in tensors:
            raise HubError(f"{file}: tensor {tensor.name} is not part of a {config['model_type']} model")
        try:
            values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        except NotImplementedError as error:
            raise HubError(f"{file}: tensor {tensor.name} has type {tensor.tensor_type.name}: {error}") from error
        name, rotary_pairs = tensors[tensor.name]
        if rotary_pairs:
            values = _half_rotation(values, config["head_dim"])
        yield name, np.ascontiguousarray(values)


def _half_rotation(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of query or key, whose pairs of one rotation stand side by side in GGUF, in halves of a head."""
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _write_weights(reader: GGUFReader, config: dict[str, Any], file: Path, folder: Path) -> None:
    """Writes the safetensors of the model and their index, which comes last."""
    from safetensors.numpy import save_file

    weight_map: dict[str, str] = {}
    shard: dict[str, np.ndarray] = {}
    logged = time.monotonic()
    logger.info("dequantising %d tensors of %s to %s", len(reader.tensors), file, folder)

    def close() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()

    for number, (name, values) in enumerate(_tensors(reader, config, file), 1):
        shard[name] = values
        if sum(values.nbytes for values in shard.values()) >= SHARD_BYTES:
            close()
        if time.monotonic() - logged >= PROGRESS_INTERVAL_S:
            logged = time.monotonic()
            logger.info("dequantised %d of %d tensors of %s", number, len(reader.tensors), file)
    close()
    (folder / WEIGHT_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2))

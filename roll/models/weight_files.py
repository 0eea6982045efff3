"""The weights of a model folder, as the headers of its safetensors files describe them; needs no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from roll.base.errors import git_lfs_pointer
from roll.hub.names import ADAPTER_CONFIG, CONFIG_NAME, WEIGHT_FILE, WEIGHT_INDEX, WEIGHTS
from roll.models.families.hf_config import UnsupportedModel, read_model_config
from roll.models.families.shape import model_shape
from roll.models.families.weights import model_rules

FLOATS = ("F64", "F32", "F16", "BF16")
"""Types of weights that can be cast to the trained dtype; integers and 8-bit floats need scales."""


class NoWeights(UnsupportedModel):
    """The folder has no weights in any format."""


class Header(NamedTuple):
    """File, shape and safetensors dtype of one tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def check_weights(folder: Path, value_head: bool = False) -> list[str]:
    """Compares the weights in `folder` with its config.json, and returns warnings.

    Raises:
        NoWeights: there are none.
        UnsupportedModel: a file cannot be read; a tensor is missing, has another shape or no float dtype; a tensor of
            the model would not be read; an id of a special token is outside of the vocabulary.
    """
    settings = read_model_config(folder / CONFIG_NAME, value_head)
    headers, model = read_headers(folder), model_shape(settings, value_head)
    family = model.family
    rules = model_rules(model)
    shapes = {name: shape for rule in rules for name, shape in zip(rule.hf, rule.hf_shapes(model), strict=True)}
    optional = {"score.bias"} if model.architecture in family.value_architectures else {"score.weight", "score.bias"}
    missing = [name for name in shapes if name not in headers and name not in optional]
    if missing:
        raise UnsupportedModel(f"{folder}: a {model.architecture} needs {_several(missing)}")
    for name in filter(headers.__contains__, shapes):
        _check_tensor(name, headers[name], shapes[name])
    _check_special_ids(folder, settings, model.vocabulary)
    unread = [name for name in headers if name not in shapes and not name.endswith("rotary_emb.inv_freq")]
    of_layers = [name for name in unread if name.startswith(family.layer_prefix.partition(".")[0] + ".")]
    if of_layers:
        raise UnsupportedModel(
            f"{folder}: {_several(of_layers)} cannot be used by a {model.architecture} with num_hidden_layers "
            f"{model.layers}; correct {CONFIG_NAME}"
        )
    [head] = family.head.hf
    unread = [name for name in unread if not (value_head and name == head)]
    why = f" (tie_word_embeddings is true in {CONFIG_NAME})" if head in unread else ""
    warnings = [f"{folder}: the run does not read {_several(unread)}{why}"] if unread else []
    if (folder / ADAPTER_CONFIG).is_file():
        warnings.append(
            f"{folder / ADAPTER_CONFIG}: is a LoRA adapter, which the run does not read; merge it into its model"
        )
    return warnings


def read_headers(folder: Path) -> dict[str, Header]:
    """The header of every tensor in a folder; raises as `tensor_files` and `open_weights`."""
    file_of = tensor_files(folder)
    headers: dict[str, Header] = {}
    for file in dict.fromkeys(file_of.values()):
        opened = open_weights(folder / file, "np")
        slices = {name: opened.get_slice(name) for name in opened.keys()}
        headers |= {
            name: Header(folder / file, tuple(each.get_shape()), each.get_dtype()) for name, each in slices.items()
        }
    for name, file in file_of.items():
        if name not in headers or headers[name].file != folder / file:
            raise UnsupportedModel(f"{folder / file}: has no tensor {name}, though {WEIGHT_INDEX} names it")
    return headers


def tensor_files(folder: Path) -> dict[str, str]:
    """The name of the file that holds each tensor.

    Raises:
        NoWeights: the folder has no weights.
        UnsupportedModel: its weights are not safetensors, or have no index or one that cannot be read.
    """
    index, single = folder / WEIGHT_INDEX, folder / WEIGHT_FILE
    if os.path.lexists(index):
        return _read_index(index)
    if os.path.lexists(single):
        return {name: WEIGHT_FILE for name in open_weights(single, "np").keys()}
    shards = sorted(each for each in folder.glob(WEIGHTS) if not each.name.startswith("adapter"))
    others = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt*"))
    if (folder / ADAPTER_CONFIG).is_file() and not shards:
        raise UnsupportedModel(f"{folder}: is a LoRA adapter; merge it into its model")
    if shards:
        raise UnsupportedModel(
            f"{index}: is missing, and the weights are in {len(shards)} shards, such as {shards[0].name}; download it"
        )
    if others:
        raise UnsupportedModel(f"{others[0]}: only safetensors are read; save the model with save_pretrained")
    raise NoWeights(f"{folder}: has no weights; put {WEIGHT_FILE}, or shards with {WEIGHT_INDEX}, beside {CONFIG_NAME}")


def open_weights(file: Path, framework: str) -> Any:
    """An open safetensors file.

    Raises:
        UnsupportedModel: it is missing or not a whole safetensors file.
    """
    _check_content(file)
    try:
        return safe_open(file, framework=framework)
    except (OSError, SafetensorError) as error:
        raise UnsupportedModel(
            f"{file}: its {file.stat().st_size:,} bytes are not a whole safetensors file: {error}; download it again"
        ) from None


def _check_content(file: Path) -> None:
    try:
        pointer = git_lfs_pointer(file)
    except OSError as error:
        why = f"its target {file.readlink()} is missing" if file.is_symlink() and not file.exists() else error.strerror
        raise UnsupportedModel(f"{file}: cannot be read: {why}") from None
    if pointer:
        raise UnsupportedModel(f"{file}: {pointer}")


def _read_index(index: Path) -> dict[str, str]:
    _check_content(index)
    try:
        file_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        outside = [file for file in file_of.values() if Path(file).name != file]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnsupportedModel(f"{index}: has no weight_map from tensors to files: {error!r}") from None
    if outside or not file_of:
        raise UnsupportedModel(f"{index}: names {outside[0] if outside else 'no tensor'}; name files of this folder")
    return dict(file_of)


def _check_tensor(name: str, header: Header, expected: tuple[int, ...]) -> None:
    if header.shape != expected:
        shapes = " and ".join(str(list(shape)) for shape in (header.shape, expected))
        raise UnsupportedModel(f"{header.file}: {name} and {CONFIG_NAME} disagree: shapes {shapes}")
    if header.dtype not in FLOATS:
        raise UnsupportedModel(f"{header.file}: {name} has dtype {header.dtype}; use weights in {', '.join(FLOATS)}")


def _check_special_ids(folder: Path, raw: Mapping[str, Any], vocabulary: int) -> None:
    generation = folder / "generation_config.json"
    try:
        generating = json.loads(generation.read_text(encoding="utf-8")) if generation.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        _check_content(generation)
        raise UnsupportedModel(f"{generation}: cannot be read: {error}") from None
    for name, values in ((CONFIG_NAME, raw), (generation.name, generating)):
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            found = values.get(key)
            for number in found if isinstance(found, list) else [found]:
                if isinstance(number, int) and number >= vocabulary:
                    raise UnsupportedModel(f"{folder / name}: {key} is {number}, but vocab_size is {vocabulary}")


def _several(names: Sequence[str]) -> str:
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} (such as {names[0]})"

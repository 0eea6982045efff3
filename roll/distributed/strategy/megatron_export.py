"""A HF folder from the ranks of a Megatron model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import save_file

from roll.distributed.strategy.megatron_weights import hf_weights
from roll.models.factory import HiddenStateModel
from roll.models.hf_config import DecoderConfig
from roll.models.hf_import import INDEX_NAME

FILE_BYTES = 4 * 2**30
"""A safetensors file is closed when the next tensor would take it above this."""


def export_hf(stage: HiddenStateModel, model: DecoderConfig, source: Path, folder: Path) -> None:
    """Writes `folder` for transformers and SGLang: tensors, index, config and tokenizer.

    Every stage writes its own files at the same time; collective over all ranks.

    Args:
        stage: this rank's part of the model.
        model: the whole model.
        source: the HF folder the model came from; its small files are copied.
        folder: where to write; made if absent.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written: dict[str, str] = {}
    size = 0
    if parallel_state.get_data_parallel_rank() == 0:
        writes = parallel_state.get_tensor_model_parallel_rank() == 0
        for name, tensors in _files(stage, model):
            if writes:
                save_file(tensors, folder / name, metadata={"format": "pt"})
                written |= dict.fromkeys(tensors, name)
                size += sum(tensor.nbytes for tensor in tensors.values())
    parts: list[tuple[dict[str, str], int]] = [({}, 0)] * dist.get_world_size()
    dist.all_gather_object(parts, (written, size))
    if dist.get_rank() == 0:
        weight_map = {name: file for names, _ in parts for name, file in names.items()}
        index = {"metadata": {"total_size": sum(size for _, size in parts)}, "weight_map": weight_map}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True))
        _copy_small_files(source, folder, stage.config.params_dtype)
    dist.barrier()


def _files(stage: HiddenStateModel, model: DecoderConfig) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """File names and their tensors, `FILE_BYTES` at a time."""
    number = parallel_state.get_pipeline_model_parallel_rank() + 1
    tensors: dict[str, torch.Tensor] = {}
    count, size = 1, 0
    for name, tensor in hf_weights(stage, model):
        if tensors and size + tensor.nbytes > FILE_BYTES:
            yield f"model-stage{number:02}-{count:03}.safetensors", tensors
            tensors, count, size = {}, count + 1, 0
        tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        size += tensor.nbytes
    yield f"model-stage{number:02}-{count:03}.safetensors", tensors


def _copy_small_files(source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Config (with the dtype now written), generation settings and tokenizer."""
    for path in source.iterdir():
        if path.is_file() and path.suffix in {".json", ".jinja", ".model", ".txt"} and path.name != INDEX_NAME:
            shutil.copyfile(path, folder / path.name)
    config = json.loads((source / "config.json").read_text())
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")

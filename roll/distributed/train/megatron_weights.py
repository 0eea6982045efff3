"""A stage's weights under their HF names, for weight updates and for export."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import save_file

from roll.distributed.train.megatron_model import HiddenStateModel
from roll.distributed.weights.plan import WeightSpec
from roll.hub.names import CONFIG_NAME, WEIGHT_INDEX
from roll.hub.special_tokens import special_token_id
from roll.models.families.shape import ModelShape
from roll.models.families.weights import WeightRule
from roll.models.hf_import import rules_of

FILE_BYTES = 4 * 2**30
"""A safetensors file is closed when the next tensor would make it larger."""


class MegatronWeights:
    """The weights of one pipeline stage, all its virtual stages together, under their HF names.

    Tensors may share memory with the model, which came from `folder`: use them before the next training step.
    """

    def __init__(self, stages: Sequence[HiddenStateModel], model: ModelShape, folder: Path) -> None:
        self._model, self.folder = model, folder
        self._dtype = stages[0].config.params_dtype
        self._weights: list[tuple[WeightRule, torch.nn.Parameter]] = []
        """Tied embeddings are sent and exported once, by the first stage."""
        for stage in stages:
            parameters = dict(stage.named_parameters())
            rules = [rule for rule in rules_of(stage, model) if not rule.is_copy]
            self._weights += [(rule, parameters[rule.megatron]) for rule in rules]

    def specs(self) -> list[WeightSpec]:
        """Names, full shapes and dtypes of the stage's weights, without communication."""
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        specs = []
        for rule, parameter in self._weights:
            shapes = rule.layout.hf_shapes(parameter.shape, ranks, self._model)
            dtype = str(parameter.dtype).removeprefix("torch.")
            specs += [WeightSpec(name, shape, dtype) for name, shape in zip(rule.hf, shapes, strict=True)]
        return specs

    @torch.no_grad()
    def full_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full tensors on every rank; collective over the stage's tensor-parallel ranks."""
        for name, tensor in self.gathered(everywhere=True):
            assert tensor is not None
            yield name, tensor

    @torch.no_grad()
    def gathered(self, everywhere: bool = False) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Full tensors on tensor rank 0, or `everywhere`, and None for every name on ranks that only send their shards.

        The gather of the next parameter runs while one is used.
        """
        started = [self._start_gather(*each, everywhere) for each in self._weights[:1]]
        for index, (rule, _) in enumerate(self._weights):
            if index + 1 < len(self._weights):
                started.append(self._start_gather(*self._weights[index + 1], everywhere))
            work, shards = started.pop(0)
            if work is not None:
                work.wait()
            tensors = [None] * len(rule.hf) if shards is None else rule.layout.merge(shards, self._model)
            yield from zip(rule.hf, tensors, strict=True)

    def slice_writers(self) -> Iterator[tuple[str, Callable[[torch.Tensor], None]]]:
        """For every HF name, a function that copies this rank's slice into the full tensor; no communication."""
        rank = parallel_state.get_tensor_model_parallel_rank()
        for rule, parameter in self._weights:
            shard = parameter.detach()
            for part, name in enumerate(rule.hf):
                yield name, partial(rule.layout.write, shard, part=part, model=self._model, rank=rank)

    def _start_gather(
        self, rule: WeightRule, parameter: torch.nn.Parameter, everywhere: bool
    ) -> tuple[dist.Work | None, list[torch.Tensor] | None]:
        """A started gather, and where it puts the shards; None for those of a rank that only sends."""
        shard = parameter.detach()
        group = parallel_state.get_tensor_model_parallel_group()
        receives = everywhere or group.rank() == 0
        if group.size() == 1 or not rule.layout.is_split:
            return None, [shard] if receives else None
        shards = [torch.empty_like(shard) for _ in range(group.size())] if receives else None
        if everywhere:
            return dist.all_gather(shards, shard.contiguous(), group=group, async_op=True), shards
        return dist.gather(shard.contiguous(), shards, group=group, group_dst=0, async_op=True), shards

    def export_hf(self, folder: Path) -> None:
        """Writes a folder for transformers and SGLang: tensors, index, config and tokenizer; made if absent.

        Every stage writes its own files at the same time; collective over all ranks.
        """
        folder.mkdir(parents=True, exist_ok=True)
        written: dict[str, str] = {}
        size = 0
        if parallel_state.get_data_parallel_rank() == 0:
            writes = parallel_state.get_tensor_model_parallel_rank() == 0
            for name, tensors in self._files():
                if writes:
                    save_file(tensors, folder / name, metadata={"format": "pt"})
                    written |= dict.fromkeys(tensors, name)
                    size += sum(tensor.nbytes for tensor in tensors.values())
        parts: list[tuple[dict[str, str], int]] = [({}, 0)] * dist.get_world_size()
        dist.all_gather_object(parts, (written, size))
        if dist.get_rank() == 0:
            weight_map = {name: file for names, _ in parts for name, file in names.items()}
            index = {"metadata": {"total_size": sum(size for _, size in parts)}, "weight_map": weight_map}
            (folder / WEIGHT_INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
            _copy_small_files(self.folder, folder, self._dtype, self._model)
        dist.barrier()

    def _files(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """File names and their tensors, up to `FILE_BYTES` each."""
        number = parallel_state.get_pipeline_model_parallel_rank() + 1
        tensors: dict[str, torch.Tensor] = {}
        count, size = 1, 0
        for name, tensor in self.full_tensors():
            if tensors and size + tensor.nbytes > FILE_BYTES:
                yield f"model-stage{number:02}-{count:03}.safetensors", tensors
                tensors, count, size = {}, count + 1, 0
            tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            size += tensor.nbytes
        yield f"model-stage{number:02}-{count:03}.safetensors", tensors


def _copy_small_files(source: Path, folder: Path, dtype: torch.dtype, model: ModelShape) -> None:
    """Config (with the dtype now written, and the class of a value model), generation settings and tokenizer."""
    for path in source.iterdir():
        if path.is_file() and path.suffix in {".json", ".jinja", ".model", ".txt"} and path.name != WEIGHT_INDEX:
            shutil.copyfile(path, folder / path.name)
    config = json.loads((source / CONFIG_NAME).read_text())
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = str(dtype).removeprefix("torch.")
    if model.value_head:
        config |= _value_settings(source, model)
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _value_settings(source: Path, model: ModelShape) -> dict[str, Any]:
    """Settings by which transformers loads a value model: of each token with a bias, of the whole sequence without.

    The class for sequences takes the value of the last token that is not `pad_token_id`, so that is the tokenizer's.
    """
    kind, label = ("Token", "value") if model.value_bias else ("Sequence", "reward")
    settings: dict[str, Any] = {
        "architectures": [f"{model.family.stem}For{kind}Classification"],
        "id2label": {"0": label},
        "label2id": {label: 0},
    }
    padding = None if model.value_bias else special_token_id(source, "pad_token")
    return settings if padding is None else settings | {"pad_token_id": padding}

"""A stage's weights under their HF names, for weight updates and for export."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import load, save, save_file

from roll.configs.devices.parallel_layout import ParallelLayout
from roll.configs.learning.lora import LoraArguments, peft_config
from roll.distributed.train.megatron_model import HiddenStateModel
from roll.distributed.weights.plan import WeightSpec
from roll.hub.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG_NAME, WEIGHT_INDEX
from roll.hub.special_tokens import special_token_id
from roll.models.families.shape import ModelShape
from roll.models.families.weights import WeightRule, model_rules, target_rules
from roll.models.hf_import import rules_of
from roll.models.lora import Adapter, Adapters, matrix_names

GENERATION_CONFIG = "generation_config.json"

FILE_BYTES = 4 * 2**30
"""A safetensors file is closed when the next tensor would make it larger."""


@dataclass(frozen=True)
class StageWeight:
    """A parameter of this rank, and the ranks that have it together.

    Attributes:
        parameter: this rank's shard of one of `rules`.
        rules: one, or the same weight of several experts, in the order of the ranks that have these.
        ranks: in the order of the shards: those of the first rule, then those of the next.
        group: of these ranks.
        adapter: what is added to the parameter.
    """

    parameter: torch.nn.Parameter
    rules: tuple[WeightRule, ...]
    ranks: range
    group: dist.ProcessGroup
    adapter: Adapter | None = None

    def shard(self) -> torch.Tensor:
        """This rank's part, with the adapter."""
        weight = self.parameter.detach()
        return weight if self.adapter is None else self.adapter.merged(weight)

    @property
    def is_split(self) -> bool:
        return len(self.ranks) > 1 and (len(self.rules) > 1 or self.rules[0].layout.is_split)

    @property
    def tensor_ranks(self) -> int:
        """Ranks that share one of the rules."""
        return len(self.ranks) // len(self.rules)

    @property
    def names(self) -> list[str]:
        return [name for rule in self.rules for name in rule.hf]

    def merge(self, shards: Sequence[torch.Tensor], model: ModelShape) -> list[torch.Tensor]:
        """The tensors of `names` from the shards of all ranks, or of this one where they are not split."""
        each = len(shards) // len(self.rules)
        parts = (shards[first : first + each] for first in range(0, len(shards), each))
        return [
            tensor for rule, part in zip(self.rules, parts, strict=True) for tensor in rule.layout.merge(part, model)
        ]


class MegatronWeights:
    """The weights of one pipeline stage, all its virtual stages together, under their HF names; those of experts last.

    Adapters are added to the weights, which themselves stay as they are. Tensors may share memory with the model, which
    came from `folder`: use them before the next training step.
    """

    def __init__(
        self,
        stages: Sequence[HiddenStateModel],
        model: ModelShape,
        folder: Path,
        layout: ParallelLayout,
        adapters: Sequence[Adapters] = (),
    ) -> None:
        self._model, self.folder, self._layout = model, folder, layout
        self._dtype, self._rank = stages[0].config.params_dtype, dist.get_rank()
        self._adapters = {id(base): adapter for each in adapters for base, adapter in each.pairs()}
        weights = [weight for stage in stages for weight in self._weights_of(stage)]
        self._weights = sorted(weights, key=lambda weight: weight.rules[0].is_expert)

    def _weights_of(self, stage: HiddenStateModel) -> Iterator[StageWeight]:
        """Tied embeddings are sent and exported once, by the first stage."""
        layout, parameters = self._layout, dict(stage.named_parameters())
        together = layout.whole_experts(self._rank)
        places = [layout.expert_place(rank) for rank in together if layout.expert_place(rank).tensor_rank == 0]
        dense = layout.whole_dense(self._rank), parallel_state.get_tensor_model_parallel_group()
        experts = together, parallel_state.get_expert_tensor_and_model_parallel_group()
        for rules in zip(*(rules_of(stage, self._model, place) for place in places), strict=True):
            rule = rules[0]
            if not rule.is_copy:
                parameter = parameters[rule.megatron]
                yield (
                    StageWeight(parameter, rules, *experts)
                    if rule.is_expert
                    else StageWeight(parameter, (rule,), *dense, self._adapters.get(id(parameter)))
                )

    def frozen(self) -> frozenset[str]:
        """Names of the weights that training does not change."""
        fixed = (each for each in self._weights if each.adapter is None and not each.parameter.requires_grad)
        return frozenset(name for each in fixed for name in each.names)

    @property
    def source(self) -> int:
        """The rank that sends the stage's weights."""
        return self._layout.rank(0, 0, self._layout.coordinates(self._rank).pipeline)

    def takes_part(self, receivers: Collection[int]) -> bool:
        """Whether this rank has a part of what these ranks gather."""
        layout = self._layout
        return any(
            rank in layout.whole_dense(self._rank) or rank in layout.whole_experts(self._rank) for rank in receivers
        )

    def specs(self) -> list[WeightSpec]:
        """Names, full shapes and dtypes of the stage's weights, without communication."""
        specs = []
        for weight in self._weights:
            shape, dtype = weight.parameter.shape, str(weight.parameter.dtype).removeprefix("torch.")
            first = weight.rules[0]
            unit = first.hf[0].rsplit(".", 2)[0] if first.is_expert else ""
            for rule in weight.rules:
                shapes = rule.layout.hf_shapes(shape, weight.tensor_ranks, self._model)
                specs += [WeightSpec(name, each, dtype, unit) for name, each in zip(rule.hf, shapes, strict=True)]
        return specs

    def names_of_model(self) -> frozenset[str]:
        """Names of the weights of all stages."""
        return frozenset(name for rule in model_rules(self._model) for name in rule.hf)

    @torch.no_grad()
    def full_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full tensors on every rank; collective over the stage's ranks."""
        for name, tensor in self.gathered(range(self._layout.world_size)):
            assert tensor is not None
            yield name, tensor

    def adapter_tensors(self, receivers: Collection[int] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """The adapters' tensors by their names in a PEFT folder, on these ranks or all; collective as `gathered`."""
        receivers = range(self._layout.world_size) if receivers is None else receivers
        weights = [
            StageWeight(parameter, (rule,), each.ranks, each.group)
            for each in self._weights
            if each.adapter is not None
            for rule, parameter in each.adapter.weights
        ]
        targets = {name for adapter in self._adapters.values() for name in adapter.targets}
        for name, tensor in self._gather(weights, receivers):
            if tensor is not None and name in targets:
                yield name, tensor

    def absent_adapters(self) -> dict[str, torch.Tensor]:
        """Adapters of zeros, of tensors without one that engines compute at once with tensors that have one."""
        zeros = {}
        for each in self._weights:
            if each.adapter is None:
                continue
            (a, down), (b, up) = each.adapter.weights
            narrow = a.layout.hf_shapes(down.shape, each.tensor_ranks, self._model)[0]
            for name, shape in zip(b.hf, b.layout.hf_shapes(up.shape, each.tensor_ranks, self._model), strict=True):
                if name not in each.adapter.targets:
                    zeros[name] = torch.zeros(shape, dtype=up.dtype)
                    zeros[name.replace(".lora_B.", ".lora_A.")] = torch.zeros(narrow, dtype=down.dtype)
        return zeros

    def names_of_adapters(self, targets: Sequence[str]) -> frozenset[str]:
        """Names of the adapters of all stages, those of `absent_adapters` among them."""
        rules = target_rules(model_rules(self._model), targets)
        return frozenset(matrix_names(name for rule, _ in rules for name in rule.hf))

    def gathered(
        self, receivers: Collection[int], without: Collection[str] = ()
    ) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Full tensors on the ranks `receivers`, and None for every name on ranks that only send their shards.

        Collective over the ranks that take part. Names in `without`, all of a parameter or none, are left out.
        """
        return self._gather(self._others(without), receivers)

    def _others(self, without: Collection[str]) -> list[StageWeight]:
        return [each for each in self._weights if each.names[0] not in without]

    @torch.no_grad()
    def _gather(
        self, weights: Sequence[StageWeight], receivers: Collection[int]
    ) -> Iterator[tuple[str, torch.Tensor | None]]:
        """The gather of the next parameter runs while one is used."""
        started = [self._start_gather(each, receivers) for each in weights[:1]]
        for index, weight in enumerate(weights):
            if index + 1 < len(weights):
                started.append(self._start_gather(weights[index + 1], receivers))
            work, shards = started.pop(0)
            if work is not None:
                work.wait()
            names = weight.names
            yield from zip(
                names, [None] * len(names) if shards is None else weight.merge(shards, self._model), strict=True
            )

    def slice_writers(self, without: Collection[str] = ()) -> Iterator[tuple[str, Callable[[torch.Tensor], None]]]:
        """For every HF name, a function that copies what this rank has of it into the full tensor; no communication.

        The functions of other ranks' experts do nothing, as those of ranks whose copy of a weight is not the sent one.
        """
        for weight in self._others(without):
            shard, place = weight.shard(), divmod(self._rank - weight.ranks.start, weight.tensor_ranks)
            for number, rule in enumerate(weight.rules):
                writes = number == place[0] and self.source in weight.ranks
                for part, name in enumerate(rule.hf):
                    write = partial(rule.layout.write, shard, part=part, model=self._model, rank=place[1])
                    yield name, write if writes else _leave

    def _start_gather(
        self, weight: StageWeight, receivers: Collection[int]
    ) -> tuple[dist.Work | None, list[torch.Tensor] | None]:
        """A started gather, and where it puts the shards; None for those of a rank that only sends."""
        shard, group = weight.shard(), weight.group
        receiving = [index for index, rank in enumerate(weight.ranks) if rank in receivers]
        receives = self._rank in receivers
        if not receiving or not weight.is_split:
            return None, [shard] if receives else None
        shards = [torch.empty_like(shard) for _ in weight.ranks] if receives or len(receiving) > 1 else None
        if len(receiving) > 1:
            work = dist.all_gather(shards, shard.contiguous(), group=group, async_op=True)
            return work, shards if receives else None
        return dist.gather(shard.contiguous(), shards, group=group, group_dst=receiving[0], async_op=True), shards

    def export_hf(self, folder: Path) -> None:
        """Writes a folder for transformers and SGLang: tensors, index, config and tokenizer; made if absent.

        Every stage writes its own files at the same time; collective over all ranks.
        """
        folder.mkdir(parents=True, exist_ok=True)
        written: dict[str, str] = {}
        size = 0
        if self.takes_part([self.source]):
            for name, tensors in self._files():
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

    def export_adapter(self, folder: Path, model: LoraArguments) -> None:
        """Writes a PEFT folder: the adapters of all stages, their configuration and the tokenizer; collective."""
        own = {name: tensor.cpu().contiguous() for name, tensor in self.adapter_tensors()}
        parts = [b""] * dist.get_world_size()  # pickled, each tensor would bring the whole buffer that it is in
        dist.all_gather_object(parts, save(own if self._rank == self.source else {}))
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            tensors = {name: tensor for part in parts for name, tensor in load(part).items()}
            save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
            config = peft_config(model, {name.split(".")[-3] for name in tensors}, str(self.folder))
            (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
            for path in _small_files(self.folder):
                if path.name not in (CONFIG_NAME, GENERATION_CONFIG):
                    shutil.copyfile(path, folder / path.name)
        dist.barrier()

    def _files(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """File names and their tensors, up to `FILE_BYTES` each, on the stage's source rank."""
        number = parallel_state.get_pipeline_model_parallel_rank() + 1
        tensors: dict[str, torch.Tensor] = {}
        count, size = 1, 0
        for name, tensor in self.gathered([self.source]):
            if tensor is None:
                continue
            if tensors and size + tensor.nbytes > FILE_BYTES:
                yield f"model-stage{number:02}-{count:03}.safetensors", tensors
                tensors, count, size = {}, count + 1, 0
            tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            size += tensor.nbytes
        if tensors:
            yield f"model-stage{number:02}-{count:03}.safetensors", tensors


def _leave(target: torch.Tensor) -> None:
    """Writes nothing."""


def _copy_small_files(source: Path, folder: Path, dtype: torch.dtype, model: ModelShape) -> None:
    """Config (with the dtype now written, and the class of a value model), generation settings and tokenizer."""
    for path in _small_files(source):
        shutil.copyfile(path, folder / path.name)
    config = json.loads((source / CONFIG_NAME).read_text())
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = str(dtype).removeprefix("torch.")
    if model.value_head:
        config |= _value_settings(source, model)
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _small_files(source: Path) -> list[Path]:
    suffixes = {".json", ".jinja", ".model", ".txt"}
    files = (path for path in source.iterdir() if path.is_file() and path.suffix in suffixes)
    return [path for path in files if path.name != WEIGHT_INDEX]


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

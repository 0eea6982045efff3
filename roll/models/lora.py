"""LoRA: adapters of low rank beside the frozen linear layers of a Megatron stage.

A layer with weights W gets y = W x + alpha / r B A x (Hu et al. 2021, arXiv:2106.09685), with A [r, in] and B [out, r]
for every linear layer of the Hugging Face model, also where Megatron computes several of them at once: then the A are
stacked, and B has the rows of the fused matrix. Under tensor parallelism the matrix on the side of the split is split
as W is and the other is on every rank; what is communicated has r columns.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint

from roll.hub.names import ADAPTER_WEIGHTS
from roll.models.families.hf_config import UnsupportedModel
from roll.models.families.layouts import GatedPair, InputSplit, Layout, Replicated, Stacked
from roll.models.families.mixture import ExpertPlace
from roll.models.families.shape import ModelShape
from roll.models.families.weights import WeightRule, model_rules, target_rules
from roll.models.hf_import import rules_of
from roll.models.operators import rms_norm
from roll.models.weight_files import open_weights

PREFIX = "base_model.model."
"""Before the names of a model's parts in a PEFT folder."""

Source = Callable[[str, tuple[int, ...]], torch.Tensor]
"""The tensor of a name and shape in a PEFT folder."""


@dataclass(frozen=True)
class StackedReplicas(Replicated):
    """Tensors of one shape on top of each other; every rank holds all of them."""

    is_split: ClassVar[bool] = False
    parts: int = 1

    def shard(self, sources: Sequence[Any], model: ModelShape, rank: int, ranks: int) -> torch.Tensor:
        return torch.cat([source[:] for source in sources])

    def merge(self, shards: Sequence[torch.Tensor], model: ModelShape) -> list[torch.Tensor]:
        """The tensors, from the shard of any rank."""
        return list(shards[0].chunk(self.parts))

    def hf_shapes(self, shape: Sequence[int], ranks: int, model: ModelShape) -> list[tuple[int, ...]]:
        return [(shape[0] // self.parts, *shape[1:])] * self.parts


@dataclass(frozen=True)
class AdapterOptions:
    """Which layers get adapters, and of what kind."""

    targets: Sequence[str]
    rank: int
    scale: float


@dataclass
class Switch:
    """Whether adapters take part in forward passes."""

    on: bool = True


class Adapter(torch.nn.Module):
    """What is added to the output of one linear layer of Megatron; `a` [n r, in] and `b` [out, r] on one rank.

    Attributes:
        weights: both parameters, with their names, layouts and shapes in a PEFT folder.
        targets: names of the tensors that have an adapter; those of other rows of the layer are left out of a folder.
    """

    def __init__(
        self, base: Any, rule: WeightRule, parts: Sequence[int], options: AdapterOptions, switch: Switch
    ) -> None:
        super().__init__()
        self.by_columns, self._scale, self._switch = isinstance(rule.layout, InputSplit), options.scale, switch
        self._sequence_parallel = base.config.sequence_parallel
        rows, columns = base.weight.shape
        place: dict[str, Any] = {"dtype": base.weight.dtype, "device": base.weight.device}
        self.a = torch.nn.Parameter(torch.zeros(len(parts) * options.rank, columns, **place))
        self.b = torch.nn.Parameter(torch.zeros(rows, options.rank, **place))
        split, whole = (self.a, self.b) if self.by_columns else (self.b, self.a)
        set_tensor_model_parallel_attributes(split, True, 1 if self.by_columns else 0, 1)
        # then Megatron sums its gradient, of which every rank has a part
        whole.sequence_parallel = self._sequence_parallel  # type: ignore[attr-defined]
        stems = [PREFIX + name.removesuffix(".weight") for name in rule.hf]
        self.targets = {f"{stems[part]}.lora_{matrix}.weight" for part in parts for matrix in "AB"}
        of_a: Layout = rule.layout if self.by_columns else StackedReplicas(parts=len(parts))
        of_b: Layout = Replicated() if self.by_columns else rule.layout
        self.weights = (
            (WeightRule("a", tuple(f"{stems[part]}.lora_A.weight" for part in parts), of_a, ()), self.a),
            (WeightRule("b", tuple(f"{stem}.lora_B.weight" for stem in stems), of_b, ()), self.b),
        )
        self.register_buffer("_owners", None, persistent=False)

    def set_owners(self, rule: WeightRule, parts: Sequence[int], model: ModelShape, rank: int, ranks: int) -> None:
        """Notes which of the stacked A each row of B multiplies, where the layer has several."""
        if len(rule.hf) == 1:
            return
        numbers = [torch.full((shape[0], 1), part) for part, shape in enumerate(rule.hf_shapes(model))]
        owner = rule.layout.shard(numbers, model, rank, ranks)
        self._owners = (owner == torch.tensor([parts])).to(self.b)

    def forward(self, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """`result` [S, b, out] of the layer with what the adapter makes of its input [S, b, in]."""
        if not self._switch.on:
            return result
        narrow = x @ self.a.t()
        if self._sequence_parallel:
            across = "reduce_scatter_to" if self.by_columns else "gather_from"
            narrow = getattr(mappings, f"{across}_sequence_parallel_region")(narrow)
        elif self.by_columns:
            narrow = mappings.reduce_from_tensor_model_parallel_region(narrow)
        else:
            narrow = mappings.copy_to_tensor_model_parallel_region(narrow)
        added: torch.Tensor = (self._scale * narrow) @ self._up().t()
        return result + added

    def _up(self) -> torch.Tensor:
        """B as a matrix [out, n r] that multiplies all stacked A."""
        if self._owners is None:
            return self.b
        return (self.b[:, None] * self._owners[:, :, None]).flatten(1)

    @torch.no_grad()
    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """This rank's W + alpha / r B A in the dtype of W, computed in fp32 from the frozen W: nothing accumulates."""
        return torch.addmm(weight.float(), self._up().float(), self.a.float(), alpha=self._scale).to(weight.dtype)

    @torch.no_grad()
    def squares(self, weight: torch.Tensor) -> torch.Tensor:
        """Sums of squares of A, B, alpha / r B A and W [4] of which those over all ranks are the whole ones."""
        up, down = self._up().float(), self.a.float()
        product = self._scale**2 * ((up.t() @ up) * (down @ down.t())).sum()
        once = 1 / parallel_state.get_tensor_model_parallel_world_size()
        in_a, in_b = (1, once) if self.by_columns else (once, 1)
        sums = [
            in_a * down.square().sum(),
            in_b * self.b.float().square().sum(),
            product,
            weight.float().square().sum(),
        ]
        return torch.stack(sums)

    @torch.no_grad()
    def fill(self, source: Source, model: ModelShape, rank: int, ranks: int) -> None:
        """Sets this rank's part of both matrices; `source` gives whole tensors."""
        for rule, parameter in self.weights:
            shapes = rule.layout.hf_shapes(parameter.shape, ranks, model)
            tensors = [
                source(name, shape) if name in self.targets else torch.zeros(shape)
                for name, shape in zip(rule.hf, shapes, strict=True)
            ]
            parameter.copy_(rule.layout.shard(tensors, model, rank, ranks))


def _sharded(rule: WeightRule, parameter: torch.Tensor) -> ShardedTensor | ShardedTensorFactory:
    key, layout = rule.hf[0].removeprefix(PREFIX), rule.layout
    if not layout.is_split:
        return make_sharded_tensor_for_checkpoint(parameter, key)
    whole = make_tp_sharded_tensor_for_checkpoint(parameter, key, 1 if isinstance(layout, InputSplit) else 0)
    parts = layout.parts if isinstance(layout, Stacked) else layout
    return apply_swiglu_sharded_factory(whole, ()) if isinstance(parts, GatedPair) else whole


class Adapters(torch.nn.ModuleList):
    """The adapters of one stage, of one policy."""

    def __init__(self, switch: Switch, adapters: list[Adapter], linears: list[Any]) -> None:
        super().__init__(adapters)
        self.switch, self._adapters, self._linears = switch, adapters, (*linears,)

    def pairs(self) -> list[tuple[torch.nn.Parameter, Adapter]]:
        """Each frozen weight with its adapter."""
        return [(linear.weight, adapter) for linear, adapter in zip(self._linears, self._adapters, strict=True)]

    def place(self, stage: Any) -> None:
        """Makes these the adapters of the stage and of its layers, in place of those of another policy."""
        stage.adapters = self
        for linear, adapter in zip(self._linears, self._adapters, strict=True):
            _add(adapter, linear)

    def sharded_state_dict(self, prefix: str = "", *_: Any, **__: Any) -> dict[str, Any]:
        """All matrices for a checkpoint that any layout can read, under names that no stage changes."""
        return {
            f"{prefix}{number}.{rule.megatron}": _sharded(rule, parameter)
            for number, adapter in enumerate(self._adapters)
            for rule, parameter in adapter.weights
        }

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Inside, forward passes of all stages are those of the frozen model."""
        self.switch.on = False
        try:
            yield
        finally:
            self.switch.on = True


def attach_adapters(
    stages: Sequence[Any], model: ModelShape, options: AdapterOptions, rank: int, ranks: int, source: Source
) -> list[Adapters]:
    """Freezes the stages of a rank and gives their target layers adapters, whose A and B are from `source`.

    They take the place of those of another policy, which stay as they are.
    """
    switch = Switch()
    for stage in stages:
        if not hasattr(stage, "adapters"):
            stage.requires_grad_(False)
            if stage.pre_process and stage.config.recompute_granularity is not None:
                stage.embedding.register_forward_hook(_with_gradient)
        layers, adapters, linears = dict(stage.named_modules()), [], []
        for rule, parts in target_rules(rules_of(stage, model, ExpertPlace()), options.targets):
            linear = layers[rule.megatron.removesuffix(".weight")]
            adapter = Adapter(linear, rule, parts, options, switch)
            adapter.set_owners(rule, parts, model, rank, ranks)
            adapter.fill(source, model, rank, ranks)
            adapters.append(adapter)
            linears.append(linear)
        Adapters(switch, adapters, linears).place(stage)
    return [stage.adapters for stage in stages]


def _add(adapter: Adapter, linear: Any) -> None:
    """Adds what the adapter computes to the results of a layer, whose norm in front of it is part of some modules."""
    known = "adapter" in linear.__dict__
    linear.__dict__["adapter"] = adapter  # not as a part of it, which Megatron would store with it
    if known:
        return

    def add(module: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        x = inputs[0]
        if (norm := getattr(module, "layer_norm_weight", None)) is not None:
            x = rms_norm(x, norm, module.eps)
        return module.__dict__["adapter"](x, output[0]), output[1]

    linear.register_forward_hook(add)


def _with_gradient(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Makes the first layer's input need a gradient: recomputed layers without such an input would have none."""
    return output.requires_grad_() if torch.is_grad_enabled() else output


def adapter_norms(adapters: Sequence[Adapters]) -> dict[str, float]:
    """`lora/...` of the whole model, the same on all ranks; collective over tensor and pipeline ranks.

    `update_norm` is the norm of alpha / r B A over that of W, of the layer where it is largest.
    """
    sums = torch.stack([adapter.squares(base.data) for each in adapters for base, adapter in each.pairs()])
    dist.all_reduce(sums, group=parallel_state.get_tensor_model_parallel_group())
    (a, b), largest = sums[:, :2].sum(0), (sums[:, 2] / sums[:, 3]).max()
    for value, operation in ((a, dist.ReduceOp.SUM), (b, dist.ReduceOp.SUM), (largest, dist.ReduceOp.MAX)):
        dist.all_reduce(value, operation, group=parallel_state.get_pipeline_model_parallel_group())
    names = ("norm_a", "norm_b", "update_norm")
    return {f"lora/{name}": math.sqrt(float(each)) for name, each in zip(names, (a, b, largest), strict=True)}


def matrix_names(layers: Iterable[str]) -> set[str]:
    """Names of A and B in a PEFT folder, from the names of the weights that they are added to."""
    return {f"{PREFIX}{name.removesuffix('.weight')}.lora_{matrix}.weight" for name in layers for matrix in "AB"}


def first_adapter(seed: Callable[[str], int]) -> Source:
    """A is drawn as peft does, evenly within 1 / sqrt(in), the same at every layout; B is 0, so nothing changes yet."""

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith(".lora_B.weight"):
            return torch.zeros(shape)
        drawn = torch.rand(shape, generator=torch.Generator().manual_seed(seed(name)))
        return (2 * drawn - 1) / math.sqrt(shape[1])

    return draw


def saved_adapter(folder: Path, model: ModelShape, targets: Sequence[str]) -> Source:
    """The matrices of a PEFT folder.

    Raises:
        UnsupportedModel: it has others than those of `targets`; when read, another shape or a value that is not finite.
    """
    file = folder / ADAPTER_WEIGHTS
    opened = open_weights(file, "pt")
    layers = [rule.hf[part] for rule, parts in target_rules(model_rules(model), targets) for part in parts]
    wanted = matrix_names(layers)
    for names, problem in ((wanted - {*opened.keys()}, "lacks"), ({*opened.keys()} - wanted, "has beyond lora_target")):
        if names:
            raise UnsupportedModel(f"{file}: {problem} {len(names)} tensors, such as {min(names)}")

    def read(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor: torch.Tensor = opened.get_tensor(name)
        if tuple(tensor.shape) != shape or not bool(torch.isfinite(tensor).all()):
            raise UnsupportedModel(f"{file}: {name} is {tuple(tensor.shape)}, or not finite; the model needs {shape}")
        return tensor

    return read

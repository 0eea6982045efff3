"""What a rank keeps for its backward pass and what its states take, for test_memory_plan.py."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from roll.datasets.batch import Batch
from roll.models.families.shape import read_model_shape
from roll.plan.memory import memory_plans
from tests.integration.rank_pool import RankContext

SAMPLES, WIDTH = 2, 256


class KeptStorages:
    """Counts the bytes that autograd keeps, each storage once and those of parameters not at all."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._left_out = {each.untyped_storage().data_ptr() for each in parameters}
        self._uses: dict[int, int] = {}
        self._now = self.most = 0

    def pack(self, tensor: torch.Tensor) -> KeptTensor:
        """The pack hook of `torch.autograd.graph.saved_tensors_hooks`."""
        kept, storage = KeptTensor(tensor), tensor.untyped_storage()
        pointer = storage.data_ptr()
        if pointer not in self._left_out:
            self._add(pointer, 1, storage.nbytes())
            weakref.finalize(kept, self._add, pointer, -1, storage.nbytes())
        return kept

    def _add(self, pointer: int, uses: int, size: int) -> None:
        before = self._uses.get(pointer, 0)
        self._uses[pointer] = before + uses
        self._now += size * ((before + uses > 0) - (before > 0))
        self.most = max(self.most, self._now)


class KeptTensor:
    """A saved tensor, which tells when it is dropped."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def run(context: RankContext) -> None:
    """Two steps of each variant; the result has the plan's bytes, those kept in the second step, and of its states."""
    ids = torch.randint(0, 100, (SAMPLES, WIDTH), generator=torch.Generator().manual_seed(1))
    data = Batch({"input_ids": ids, "attention_mask": torch.ones_like(ids), "response_mask": ids >= 0})
    plan = {"micro_batches": [[*range(SAMPLES)]], "tokens": float(ids.numel()), "sequences": float(SAMPLES)}
    data.meta_info = {"loss": "sft", "loss_config": None, "temperature": 1.0, "optimizer_steps": [plan]}
    folder = Path(context.arguments["model"])
    shape = read_model_shape(folder)
    assert shape is not None
    for name, (options, dtype) in context.arguments["variants"].items():
        sizes: dict[str, Any] = {"training": {"per_device_train_batch_size": SAMPLES}, "sequence_length": WIDTH}
        strategy = context.strategy(folder, megatron=options, dtype=dtype, **sizes)
        strategy.train_step(data)
        kept = KeptStorages(strategy.wrapped[0].parameters())
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda packed: packed.tensor):
            strategy.train_step(data)
        (planned,) = memory_plans(strategy.pipeline_config, {"actor_train": shape}, "cpu")
        context.results[name] = {
            "planned": {line.name: line.bytes for line in planned.lines},
            "found": {"activations": kept.most, **strategy.memory()},
        }
        strategy.shutdown()

"""Routers that send tokens to experts which an engine or an earlier pass recorded: the gradient flows through these.

Each router of a model has a `LayerReplay` in place of Megatron's `RouterReplay`, of which a process has one list for
all models. It has the experts of one micro-batch at a time; with recomputation also those of earlier ones, until their
backward passes have read them, first in, first out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from roll.distributed.train.megatron_model import HiddenStateModel
from roll.distributed.train.micro_batch import MicroBatch


class LayerReplay:
    """The experts of the tokens that one router reads next; without any it chooses them itself.

    Attributes:
        agreement: tokens whose own experts would be the recorded ones, and tokens with recorded ones; [2] float64.
        chosen: experts [tokens, k] that it has chosen in each micro-batch of a pass that records; None in others.
    """

    def __init__(self) -> None:
        self._next: torch.Tensor | None = None
        self._routed: torch.Tensor | None = None
        self._recomputed: deque[torch.Tensor] = deque()
        self._replays = False
        self.agreement = torch.zeros(2, dtype=torch.float64)
        self.chosen: list[torch.Tensor] | None = None

    def set(self, rows: torch.Tensor, routed: torch.Tensor, recomputes: bool) -> None:
        """Experts [tokens, k] of the next micro-batch, and which tokens have recorded ones."""
        self._next, self._routed, self._replays = rows.long(), routed, True
        if recomputes:
            self._recomputed.append(self._next)

    def clear(self) -> None:
        """Forgets the experts of all micro-batches."""
        self._next, self._replays = None, False
        self._recomputed.clear()

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and ids [tokens, k] of the experts; Megatron's router calls it by this name.

        The second call for a micro-batch is the recomputation in its backward pass.
        """
        own = default_compute_topk(scores, topk, num_groups, group_topk)
        if not self._replays:
            if self.chosen is not None:
                self.chosen.append(own[1].detach())
            return own[0], own[1]
        rows, self._next = self._next, None
        if rows is None:
            rows = self._recomputed.popleft()
        else:
            self._count(own[1].detach(), rows)
        return scores.gather(1, rows), rows

    def _count(self, own: torch.Tensor, rows: torch.Tensor) -> None:
        assert self._routed is not None
        same = (own.sort(-1).values == rows.sort(-1).values).all(-1) & self._routed
        self.agreement += torch.stack([same.sum(), self._routed.sum()]).double().cpu()


class RoutingReplay:
    """The routers of a rank's virtual stages."""

    def __init__(self, stages: Sequence[HiddenStateModel], recomputes: bool) -> None:
        """`recomputes`: layers are computed once more in a training pass."""
        self._recomputes = recomputes
        self._recorded: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        self._layers: list[list[tuple[int, LayerReplay]]] = []
        for stage in stages:
            found = []
            for layer in stage.decoder.layers:
                if layer.is_moe_layer:
                    replay = layer.mlp.router.router_replay = LayerReplay()
                    found.append((layer.layer_number - 1, replay))
            self._layers.append(found)
        config = stages[0].config
        self._shape, self._experts = (config.num_layers, config.moe_router_topk), config.num_moe_experts
        self._ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1

    def set(self, stage: int, micro: MicroBatch, rank: int, trains: bool) -> None:
        """The experts of a micro-batch that virtual stage number `stage` computes next, on tensor-parallel `rank`."""
        if micro.routing is None or micro.routed is None:
            return
        if self._recorded is not None:
            self._recorded += [(micro.routing.flatten(), micro.routed)] * (stage == 0)
            return
        part = rank if self._ranks > 1 else 0
        rows, routed = (each.chunk(self._ranks)[part] for each in (micro.routing, micro.routed))
        for layer, replay in self._layers[stage]:
            replay.set(rows[:, layer], routed, trains and self._recomputes)

    def clear(self) -> None:
        """After a pass."""
        for _, replay in self._all():
            replay.clear()

    def record(self) -> None:
        """Begins a pass that records; each token of its micro-batches has its number as `routing` [tokens, 1, 1]."""
        self._recorded = []
        for _, replay in self._all():
            replay.chosen = []

    def recorded(self, lengths: Sequence[int], micro_batches: int) -> list[np.ndarray]:
        """Ends it, collective over a pipeline and its tensor-parallel ranks.

        Args:
            lengths: tokens of each sample that have numbers; they are counted from the first sample on.
            micro_batches: that count; the pass may have had more.

        Returns:
            The experts of each sample [tokens, layers, k], 0 in layers without experts.
        """
        assert self._recorded is not None
        found = torch.zeros((sum(lengths), *self._shape), dtype=torch.int32, device=self._recorded[0][0].device)
        for layer, replay in self._all():
            assert replay.chosen is not None
            for (numbers, routed), chosen in zip(self._recorded[:micro_batches], replay.chosen, strict=False):
                found[numbers[routed], layer] = _of_all_ranks(chosen.int(), self._ranks)[routed]
            replay.chosen = None
        self._recorded = None
        dist.all_reduce(found, group=parallel_state.get_pipeline_model_parallel_group())
        rows = found.cpu().numpy().astype(np.uint8 if self._experts <= 256 else np.int16)
        return np.split(rows, np.cumsum(lengths)[:-1])

    def agreement(self) -> dict[str, float]:
        """`moe/routing_agreement` since the last call, over all ranks; nothing where nothing was replayed."""
        total = sum((replay.agreement for _, replay in self._all()), torch.zeros(2, dtype=torch.float64))
        for _, replay in self._all():
            replay.agreement = torch.zeros(2, dtype=torch.float64)
        device = torch.cuda.current_device() if dist.get_backend() == "nccl" else "cpu"
        same, routed = _summed(total.to(device)).tolist()
        return {"moe/routing_agreement": same / routed} if routed else {}

    def _all(self) -> list[tuple[int, LayerReplay]]:
        return [each for stage in self._layers for each in stage]


def _of_all_ranks(rows: torch.Tensor, ranks: int) -> torch.Tensor:
    """The rows of the tokens that sequence parallelism splits over tensor-parallel ranks."""
    if ranks == 1:
        return rows
    parts = [torch.empty_like(rows) for _ in range(ranks)]
    dist.all_gather(parts, rows.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts)


def _summed(values: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(values)
    return values

"""Megatron's allgather dispatcher of tokens to experts, for ranks that have different numbers of tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher


class UnevenGatherDispatcher(MoEAllGatherTokenDispatcher):  # type: ignore[misc]  # Megatron is not typed
    """Adds tokens without experts up to the number of the rank with most, and drops them afterwards.

    The copies that padding makes also keep gradients out of Megatron's buffer of gathered tensors, which the next
    gather overwrites.
    """

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [n, H] and weights [n, experts], of n tokens on every rank."""
        hidden, weights = super().dispatch_preprocess(hidden_states, routing_map, probs)
        self._count = len(hidden)
        most = torch.tensor(self._count, device=hidden.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.tp_ep_group)
        more = (0, 0, 0, int(most) - self._count)
        self.routing_map = F.pad(routing_map, more)
        return F.pad(hidden, more), F.pad(weights, more)

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[n, H] to the shape of this rank's hidden states."""
        return super().combine_postprocess(hidden_states[: self._count])  # type: ignore[no-any-return]


def gather_uneven_tokens(stage: torch.nn.Module) -> None:
    """Replaces the allgather dispatchers of a stage's layers, which expect as many tokens on every rank."""
    for layer in stage.modules():
        if isinstance(layer, MoELayer) and isinstance(layer.token_dispatcher, MoEAllGatherTokenDispatcher):
            options: dict[str, Any] = {"config": layer.config, "pg_collection": get_default_pg_collection()}
            experts = layer.num_local_experts, layer.local_expert_indices
            layer.token_dispatcher = UnevenGatherDispatcher(*experts, **options)

"""How evenly experts are used while a mixture trains: the losses of its routers, and the tokens of each expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker, get_moe_layer_wise_logging_tracker
from megatron.core.transformer.moe.router import TopKRouter

from roll.configs.devices.megatron import MegatronTrainConfig
from roll.distributed.train.megatron_model import HiddenStateModel


class ExpertBalance:
    """The routers of a rank: coefficients of their losses in an optimizer step, and the tokens that they have routed.

    With T tokens in a micro-batch, f_e the share of their k T choices that expert e has and P_e the mean probability
    that its router gives it, the auxiliary loss of a layer is E sum_e f_e P_e (Fedus et al. 2021, Switch Transformers,
    equation 4), and the z loss is the mean of log(sum_e exp(logit_e))^2 (Zoph et al. 2022, ST-MoE, equation 5). An
    optimizer step adds those of its micro-batches, weighted by T and divided by the tokens of all of them, padding
    included. Megatron multiplies by the tokens of a rank and divides by nothing, so that the division is done here.
    """

    def __init__(self, stages: Sequence[HiddenStateModel], options: MegatronTrainConfig) -> None:
        modules = (module for stage in stages for module in stage.modules())
        self._routers = [module for module in modules if isinstance(module, TopKRouter)]
        self._options, self._tokens, self._losses = options, [torch.zeros(0)] * len(self._routers), 0
        for index, router in enumerate(self._routers):
            router.register_forward_hook(self._counter(index))

    def begin(self, tokens: Callable[[], int], device: torch.device) -> None:
        """Begins an optimizer step; `tokens` counts those of this data rank's micro-batches."""
        experts = self._routers[0].num_experts if self._routers else 0
        self._tokens, self._losses = [torch.zeros(experts, device=device) for _ in self._routers], 0
        aux, z = self._options.moe_aux_loss_coeff, self._options.moe_z_loss_coeff
        if not aux and not z:
            return
        clear_aux_losses_tracker()
        total = torch.tensor(float(tokens()), device=device)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        share = self._options.tensor_model_parallel_size / float(total)  # of what a tensor-parallel rank has counted
        for router in self._routers:
            router.config.moe_aux_loss_coeff = aux * share
            router.config.moe_z_loss_coeff = z and z * share

    def metrics(self, device: torch.device) -> dict[str, float]:
        """Of the optimizer step that ends, the same on every rank."""
        stage = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        loads = torch.full((2,), -torch.inf, device=device)
        if self._tokens:
            tokens = torch.stack(self._tokens)
            dist.all_reduce(tokens, group=stage)
            relative = tokens / tokens.mean(1, keepdim=True)
            loads = torch.stack([relative.max(), -relative.min()])
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        dist.all_reduce(loads, op=dist.ReduceOp.MAX, group=pipeline)
        found = {"moe/max_load": float(loads[0]), "moe/min_load": -float(loads[1])}
        if not self._options.moe_aux_loss_coeff:
            return found
        values = get_moe_layer_wise_logging_tracker().get("load_balancing_loss", {}).get("values")
        ranks = self._options.tensor_model_parallel_size
        own = [0.0 if values is None else float(values.sum()), self._losses / ranks]
        summed = torch.tensor(own, device=device)
        for group in (stage, pipeline):
            dist.all_reduce(summed, group=group)
        return found | {"moe/aux_loss": float(summed[0] / summed[1].clamp(min=1))}

    def _counter(self, index: int) -> Callable[..., None]:
        def count(module: torch.nn.Module, inputs: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
            if len(self._tokens[index]):
                self._tokens[index] += output[1].sum(0)
                self._losses += torch.is_grad_enabled()

        return count

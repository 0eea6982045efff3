"""Forward and backward passes of a Megatron stage: micro-batches, log-probs at the end of the pipeline, and metrics.

Log-probs with and without a loss are computed by the same code on the same shapes, so that the ratio of a first
optimizer step is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from tensordict import TensorDict

from roll.algorithms.distillation import POLICY_TOP_LOG_PROBS, TEACHER_TOP_IDS
from roll.distributed.train.experts.router_replay import RoutingReplay
from roll.distributed.train.megatron_model import HiddenStateModel
from roll.distributed.train.micro_batch import MicroBatch, make_micro_batch
from roll.models.context_attention import ContextSplit
from roll.models.families.shape import ModelShape
from roll.models.fused_linear_logprobs import HeadSpec, fused_linear_logprobs, top_log_probs
from roll.models.local_spec import PackedSamples
from roll.models.operators import take_rows

LossFunction = Callable[[torch.Tensor, torch.Tensor | None, TensorDict], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""(log_probs [b, T], entropy [b, T], samples) -> (loss, metrics) of one micro-batch; values and None of a critic."""

Scores = tuple[torch.Tensor, ...]
"""Log-probs and entropies of tokens; sums of squared probabilities, or ids and log-probs of the most likely tokens, if
asked for; log-probs of chosen tokens, if a micro-batch has such; or the values of a critic."""


@dataclass
class ForwardPass:
    """Runs micro-batches through this rank's stage of the pipeline.

    `stages` are the virtual stages of this rank, one where there are none; `wrapped` is what Megatron's schedule calls,
    each stage or its data-parallel wrapper.
    """

    wrapped: Sequence[torch.nn.Module]
    stages: Sequence[HiddenStateModel]
    model: ModelShape
    device: torch.device
    packed: bool = False
    """Micro-batches are computed without padding, see `MicroBatch`."""
    shared: bool = False
    """Prefixes that samples of a packed micro-batch have in common are computed once; needs `local_spec`."""
    replay: RoutingReplay | None = None
    """Replays `routing`, where there is any."""
    routing: Sequence[np.ndarray] | np.ndarray = ()
    """The experts of each sample of the next batch; see `Routing`."""

    def scores(
        self,
        batch: TensorDict,
        micro_batches: Sequence[Sequence[int]],
        temperature: float,
        sum_pi_squared: bool = False,
        top_k: int = 0,
    ) -> Scores | None:
        """Scores [B, T] float32 in the order of `batch`; None on all but the last stage.

        With `top_k` also the ids [B, T, K] int32 and log-probs [B, T, K] of the most likely tokens, at most all.
        """

        def scores(hidden: torch.Tensor, micro: MicroBatch, **_: Any) -> Scores:
            found = self._scores(hidden, micro, temperature, False, sum_pi_squared, top_k)
            return tuple(_whole_rows(micro, each) for each in found)

        with torch.no_grad():
            rows = self._schedule(batch, micro_batches, scores, forward_only=True)
        if not parallel_state.is_pipeline_last_stage():
            return None
        shape = batch["input_ids"].shape
        outputs = tuple(
            torch.zeros((*shape, *part.shape[2:]), dtype=torch.float32 if part.is_floating_point() else part.dtype)
            for part in rows[0]
        )
        for indices, parts in zip(micro_batches, rows, strict=True):
            for output, part in zip(outputs, parts, strict=True):
                output[torch.as_tensor(list(indices)), : part.shape[1]] = part.cpu()
        return outputs

    def recorded(
        self, batch: TensorDict, micro_batches: Sequence[Sequence[int]], *options: Any
    ) -> tuple[Scores | None, list[np.ndarray]]:
        """`scores`, and the experts [tokens, layers, k] of all tokens of each sample but its last."""
        assert self.replay is not None
        lengths = (batch["attention_mask"].sum(-1) - 1).tolist()
        numbers = np.split(np.arange(sum(lengths)).reshape(-1, 1, 1), np.cumsum(lengths)[:-1])
        self.routing = numbers
        self.replay.record()
        scores = self.scores(batch, micro_batches, *options)
        return scores, self.replay.recorded(lengths, len(micro_batches))

    def backward(
        self,
        batch: TensorDict,
        micro_batches: Sequence[Sequence[int]],
        temperature: float,
        loss: LossFunction,
        entropy_gradient: bool,
    ) -> list[dict[str, torch.Tensor]]:
        """Accumulates the gradient of the sum of `loss` over micro-batches and data ranks.

        Returns:
            Each micro-batch's metrics with `loss` among them; empty on all but the last stage.
        """

        def loss_of(hidden: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            if micro.chosen is not None:
                self._leave_out_unknown(micro)
            found = self._scores(hidden, micro, temperature, entropy_gradient)
            scored, *entropy = (_whole_rows(micro, each) for each in found)
            if micro.chosen is not None:
                micro.batch[POLICY_TOP_LOG_PROBS] = entropy.pop()
            value, metrics = loss(scored, entropy[0] if entropy else None, micro.batch)
            reported = {"loss": value.detach().clone(), **{name: each.detach() for name, each in metrics.items()}}
            no_tokens = torch.zeros((), dtype=torch.int, device=value.device)
            return value, no_tokens, reported

        return self._schedule(batch, micro_batches, loss_of, forward_only=False)

    def _schedule(
        self,
        batch: TensorDict,
        micro_batches: Sequence[Sequence[int]],
        on_last_stage: Callable[..., Any],
        forward_only: bool,
    ) -> list[Any]:
        """Megatron's schedule over the micro-batches; `on_last_stage` is given the hidden states of the last stage."""
        scheduled, interleaved = self._scheduled(micro_batches), len(self.stages) > 1

        def prepared() -> Iterator[tuple[bool, MicroBatch]]:
            for number, indices in enumerate(scheduled):
                yield number < len(micro_batches), self._micro_batch(batch, indices, self.device)

        def step(
            iterator: Iterator[tuple[bool, MicroBatch]], module: torch.nn.Module
        ) -> tuple[torch.Tensor, Callable[..., Any]]:
            counts, micro = next(iterator)

            def at_the_end(output: torch.Tensor, **options: Any) -> Any:
                result = on_last_stage(output, micro, **options)
                return result if counts or forward_only else (result[0] * 0.0, *result[1:])

            self._replay(module, micro, trains=not forward_only)
            packed = packed_parameters(micro)
            inputs = {"input_ids": micro.input_ids, "position_ids": None, "attention_mask": None}
            return module(**inputs, packed_seq_params=packed), at_the_end

        results: list[Any] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[prepared() for _ in self.stages] if interleaved else prepared(),
            model=list(self.wrapped),
            num_microbatches=len(scheduled),
            seq_length=batch["input_ids"].shape[1],
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        if self.replay is not None:
            self.replay.clear()
        return results[: len(micro_batches)]

    def computed_tokens(self, batch: TensorDict, micro_batches: Sequence[Sequence[int]]) -> int:
        """Tokens that a pass over these micro-batches computes, with padding."""
        micro = (self._micro_batch(batch, indices, "cpu") for indices in self._scheduled(micro_batches))
        return sum(each.input_ids.numel() for each in micro)

    def _micro_batch(self, batch: TensorDict, indices: Sequence[int], device: torch.device | str) -> MicroBatch:
        config = self.stages[0].config
        multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1
        context = parallel_state.get_context_parallel_rank(), config.context_parallel_size
        routing = [self.routing[index] for index in indices] if len(self.routing) else ()
        return make_micro_batch(batch, indices, multiple, device, self.packed, self.shared, context, routing)

    def _scheduled(self, micro_batches: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """The micro-batches, and more of one sample where the schedule or other ranks need them."""
        scheduled, stages = [*micro_batches], self.stages[0].config.pipeline_model_parallel_size
        if len(self.stages) > 1:  # this schedule needs a multiple of the pipeline's size
            scheduled += [micro_batches[0][:1]] * (-len(micro_batches) % stages)
        return scheduled + [micro_batches[0][:1]] * (self._most(len(scheduled)) - len(scheduled))

    def _replay(self, module: torch.nn.Module, micro: MicroBatch, trains: bool) -> None:
        """Sets the experts of the micro-batch that the virtual stage `module` computes next."""
        if self.replay is not None:
            stage = next(number for number, each in enumerate(self.wrapped) if each is module)
            self.replay.set(stage, micro, parallel_state.get_tensor_model_parallel_rank(), trains)

    def _most(self, micro_batches: int) -> int:
        """The most micro-batches of a data rank, where data ranks share experts: they exchange tokens in each."""
        config = self.stages[0].config
        if self.model.mixture is None or config.expert_model_parallel_size * config.expert_tensor_parallel_size <= (
            config.tensor_model_parallel_size
        ):
            return micro_batches
        count = torch.tensor(micro_batches, device=self.device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
        return int(count)

    def _leave_out_unknown(self, micro: MicroBatch) -> None:
        """Sets ids of a teacher that are beyond this model's vocabulary, such as padding of its head, to -1."""
        assert micro.chosen is not None
        micro.chosen, micro.batch[TEACHER_TOP_IDS] = (
            ids.masked_fill(ids >= self.model.vocabulary, -1) for ids in (micro.chosen, micro.batch[TEACHER_TOP_IDS])
        )

    def _scores(
        self,
        hidden: torch.Tensor,
        micro: MicroBatch,
        temperature: float,
        entropy_gradient: bool,
        sum_pi_squared: bool = False,
        top_k: int = 0,
    ) -> Scores:
        """Scores [N] each of the micro-batch's scored tokens from the last hidden states."""
        sequence_parallel = self.stages[-1].config.sequence_parallel
        group = parallel_state.get_tensor_model_parallel_group()
        if sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, group=group)
        weight = self.stages[-1].head_weight()
        _wait_for_gather(self.wrapped[-1], weight)
        first = parallel_state.get_tensor_model_parallel_rank() * weight.shape[0]
        spec = HeadSpec(
            first_token=first,
            tokens=min(weight.shape[0], self.model.vocabulary - first),
            temperature=temperature,
            group=group if group.size() > 1 else None,
            reduce_hidden_gradient=not sequence_parallel,
        )
        rows = _scored_rows(hidden, micro)
        if top_k:
            count = min(top_k, self.model.vocabulary)
            return top_log_probs(rows, weight, micro.targets, spec, count, micro.kept)
        return fused_linear_logprobs(
            rows, weight, micro.targets, spec, entropy_gradient, sum_pi_squared, micro.kept, micro.chosen
        )


class ValuePass(ForwardPass):
    """The forward pass of a critic: one value for each scored token, of the tokens before it."""

    def _scores(
        self,
        hidden: torch.Tensor,
        micro: MicroBatch,
        temperature: float,
        entropy_gradient: bool,
        sum_pi_squared: bool = False,
        top_k: int = 0,
    ) -> Scores:
        """Values [N] of the micro-batch's scored tokens; there are no logits for the temperature to divide.

        Every tensor-parallel rank computes all values, so gradients are already equal and are not summed.
        """
        if self.stages[-1].config.sequence_parallel:
            group = parallel_state.get_tensor_model_parallel_group()
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=group
            )
        head = self.stages[-1].value_head
        for parameter in head.parameters():
            _wait_for_gather(self.wrapped[-1], parameter)
        return (head(_scored_rows(hidden, micro)),)


def _scored_rows(hidden: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """The hidden states [N, H] before the scored tokens, of [S, b, H]; several tokens share one behind a prefix."""
    flat = hidden.flatten(0, 1)
    return flat.index_select(0, micro.hidden_rows) if micro.expand is None else take_rows(flat, micro.hidden_rows)


def _whole_rows(micro: MicroBatch, values: torch.Tensor) -> torch.Tensor:
    """Values [N, ...] of this rank's tokens as [b, T, ...] with those of all context ranks.

    Each context rank computes the same loss from them, and its gradient flows into the tokens of the rank alone.
    """
    rows = micro.to_columns(values)
    if micro.split is None:
        return rows
    group = parallel_state.get_context_parallel_group()
    whole: torch.Tensor = tensor_parallel.reduce_from_tensor_model_parallel_region(rows, group=group)
    return whole


def _wait_for_gather(wrapped: torch.nn.Module, weight: torch.Tensor) -> None:
    """With `overlap_param_gather`, waits for a weight that no module's forward pass reads: Megatron's hooks do not."""
    if not isinstance(wrapped, DistributedDataParallel) or not weight.requires_grad:
        return
    if wrapped.ddp_config.overlap_param_gather:
        wrapped.param_to_bucket_group[weight].finish_param_sync()


def packed_parameters(micro: MicroBatch) -> PackedSamples | None:
    """Megatron's description of a packed micro-batch; None for one with padding."""
    if micro.bounds is None:
        return None
    bounds, longest = micro.bounds, max(micro.lengths)
    context: dict[str, Any] = {}
    if micro.whole is not None and micro.split is not None:
        group = parallel_state.get_context_parallel_group()
        split = ContextSplit(group, micro.lengths, micro.whole, micro.split)
        context = {"context": split, "cu_seqlens_q_padded": bounds, "cu_seqlens_kv_padded": bounds}
    return PackedSamples(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=micro.lengths,
        positions=micro.positions,
        expand=micro.expand,
        collapse=micro.collapse,
        **context,
    )


def is_maximum(name: str) -> bool:
    """A name ending in `_max` is reduced by max; every other by sum, its terms being shares of the global batch."""
    return name.endswith("_max")


def reduce_micro_batches(rows: Sequence[Mapping[str, torch.Tensor]], device: torch.device) -> dict[str, float]:
    """Reduces over this rank's micro-batches and over data ranks, and sends the result to every pipeline stage.

    Args:
        rows: one mapping per micro-batch on the last stage, nothing on the others.
        device: where the collectives run.
    """
    reduced: dict[str, float] = {}
    if parallel_state.is_pipeline_last_stage():
        names = sorted(rows[0])
        for kind in (False, True):
            chosen = [name for name in names if is_maximum(name) == kind]
            if chosen:
                reduced |= _reduce(rows, chosen, kind, device)
    return _from_last_stage(reduced)


def over_optimizer_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean over optimizer steps; the largest for names ending in `_max`."""
    values = {name: [step[name] for step in steps] for name in steps[0]}
    return {name: max(each) if is_maximum(name) else sum(each) / len(each) for name, each in values.items()}


def _reduce(
    rows: Sequence[Mapping[str, torch.Tensor]], names: Sequence[str], maximum: bool, device: torch.device
) -> dict[str, float]:
    table = torch.stack([torch.stack([row[name].double().to(device) for name in names]) for row in rows])
    values = table.amax(dim=0) if maximum else table.sum(dim=0)
    group = parallel_state.get_data_parallel_group()
    dist.all_reduce(values, op=dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group=group)
    return dict(zip(names, values.tolist(), strict=True))


def _from_last_stage(reduced: dict[str, float]) -> dict[str, float]:
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return reduced
    shared = [reduced]
    source = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast_object_list(shared, src=source, group=parallel_state.get_pipeline_model_parallel_group())
    return shared[0]

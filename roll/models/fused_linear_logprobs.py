"""Log-probs and entropies of target tokens from hidden states, fused with the head, for a vocabulary split over ranks.

The matrix product with the head is part of the operator, so that logits exist only for the selected tokens and one
chunk at a time. Logits, and the sum of the weights' gradient over chunks, are fp32 in half precision too: in bf16,
logits of 16 to 32 have steps of 0.125, and a sum of many chunks loses digits.

What follows the product is bound by memory. On a CPU a chunk is computed in slices of the vocabulary that stay in the
cache; on a GPU torch compiles it into kernels that read the logits once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from roll.models.families.shape import HEAD_CHUNK_BYTES, HEAD_KEPT_BYTES

logger = logging.getLogger(__name__)

PRODUCT_ROWS = 16_384
"""Tokens of the vocabulary whose weight gradient is computed at once on a GPU."""

LEAST_LOG_PROB = math.log(torch.finfo(torch.float32).tiny)
"""Of a token whose probability is 0 in fp32."""

CPU_SLICE = 512
"""Tokens of the vocabulary that are computed at once on a CPU: the logits of a chunk fit into the cache of a core."""


@dataclass(frozen=True)
class HeadSpec:
    """This rank's part of the vocabulary, and the scaling of logits.

    Attributes:
        first_token: token id of the rank's first row.
        tokens: rows of the rank without padding rows, which are ignored.
        temperature: divisor of the logits.
        group: tensor-parallel group; None for one rank.
        reduce_hidden_gradient: whether this operator sums the gradient of the hidden states over the group; under
            sequence parallel the preceding gather does that.
    """

    first_token: int
    tokens: int
    temperature: float = 1.0
    group: dist.ProcessGroup | None = None
    reduce_hidden_gradient: bool = True


def fused_linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    spec: HeadSpec,
    entropy_gradient: bool = False,
    sum_pi_squared: bool = False,
    kept: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Log-prob log softmax(hidden W^T / temperature)[target], and the entropy of the same distribution.

    Args:
        hidden: [N, H], the same on every rank of the group.
        weight: this rank's rows of the head, [padded vocabulary / T, H].
        targets: token ids [N].
        spec: the rank's part of the vocabulary.
        entropy_gradient: whether the entropy is differentiable.
        sum_pi_squared: whether the sum of the squared probabilities of all tokens is computed too, without gradient.
        kept: [N, K] ids of the tokens that the softmax is over, filled with -1; rows of -1 alone, and None, mean all
            tokens. The target is always among them.
        chosen: [N, K] ids of more tokens whose log-probs are wanted, different ones in a row; -1 for none.

    Returns:
        Log-probs and entropies in nats, and with `sum_pi_squared` that sum, [N] float32 each; with `chosen` also the
        log-probs of these tokens [N, K], differentiable; values at -1 mean nothing.
    """
    keep = torch.is_grad_enabled() and hidden.shape[0] * weight.shape[0] * 4 <= HEAD_KEPT_BYTES
    results = _FusedLinearLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, spec, entropy_gradient, sum_pi_squared, keep, kept, chosen
    )
    return tuple(result for result in results if result is not None)


@torch.no_grad()
def top_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    spec: HeadSpec,
    count: int,
    kept: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Log-probs and entropies as `fused_linear_logprobs`, and the most likely tokens with theirs; without gradient.

    Args:
        hidden: see `fused_linear_logprobs`, as `weight`, `targets`, `spec` and `kept`.
        weight: see there.
        targets: see there.
        spec: see there.
        count: of the most likely tokens, K; at most the vocabulary of all ranks.
        kept: see there; tokens that the softmax leaves out are not among the most likely.

    Returns:
        Log-probs and entropies [N]; ids of the K most likely tokens [N, K] int32, the most likely first, -1 where there
        are fewer; and their log-probs [N, K] float32, 0 at -1.
    """
    parts: list[tuple[torch.Tensor, ...]] = []
    for rows in _chunks(hidden, weight):
        of_rows = None if kept is None else kept[rows]
        part = _forward_chunk(hidden[rows], weight, targets[rows], spec, kept=of_rows, top=count)
        assert part.most_likely is not None
        parts.append((part.log_probs, part.entropy, *part.most_likely))
        del part  # with the logits, before the next chunk needs that memory
    return tuple(map(torch.cat, zip(*parts, strict=True)))


class _FusedLinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        spec: HeadSpec,
        entropy_gradient: bool,
        sum_pi_squared: bool,
        keep: bool,
        kept: torch.Tensor | None,
        chosen: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        parts = []
        for rows in _chunks(hidden, weight):
            of_rows = None if kept is None else kept[rows]
            more = None if chosen is None else chosen[rows]
            part = _forward_chunk(hidden[rows], weight, targets[rows], spec, sum_pi_squared, of_rows, more)
            parts.append(part if keep else replace(part, logits=None))
            del part  # with the logits, before the next chunk needs that memory
        log_probs, entropy, log_normalizers = (
            torch.cat([getattr(part, name) for part in parts]) for name in ("log_probs", "entropy", "log_normalizer")
        )
        ctx.spec, ctx.entropy_gradient, ctx.kept, ctx.chosen = spec, entropy_gradient, kept, chosen
        ctx.logits = [part.logits for part in parts]
        ctx.save_for_backward(hidden, weight, targets, entropy, log_normalizers)
        squares = torch.cat([part.squares for part in parts if part.squares is not None]) if sum_pi_squared else None
        without_gradient = [] if entropy_gradient else [entropy]
        ctx.mark_non_differentiable(*without_gradient, *([] if squares is None else [squares]))
        of_chosen = (
            torch.cat([part.chosen for part in parts if part.chosen is not None]) if chosen is not None else None
        )
        return log_probs, entropy, squares, of_chosen

    @staticmethod
    def backward(
        ctx: Any,
        log_prob_gradient: torch.Tensor,
        entropy_gradient: torch.Tensor | None,
        _: Any,
        chosen_gradient: torch.Tensor | None,
    ) -> Any:
        hidden, weight, targets, entropy, log_normalizers = ctx.saved_tensors
        spec: HeadSpec = ctx.spec
        hidden_gradient = torch.zeros_like(_multiplied(hidden))
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for rows in _chunks(hidden, weight):
            logits = ctx.logits.pop(0)
            if logits is None:
                of_rows = None if ctx.kept is None else ctx.kept[rows]
                logits = _logits(hidden[rows], weight, targets[rows], spec, of_rows)
            of_entropy = entropy_gradient[rows] if ctx.entropy_gradient and entropy_gradient is not None else None
            of_chosen = None if chosen_gradient is None else (ctx.chosen[rows], chosen_gradient[rows])
            of = log_normalizers[rows], targets[rows], entropy[rows], log_prob_gradient[rows], of_entropy, of_chosen
            for columns in _slices(logits):
                part = replace(spec, first_token=spec.first_token + columns.start, tokens=columns.stop - columns.start)
                gradient = _logit_gradient(logits[:, columns], *of, part, hidden.dtype)
                hidden_gradient[rows] += _gradient_product(gradient, weight[columns])
                if weight_gradient is not None:
                    _add_product(weight_gradient[columns], gradient.t(), hidden[rows])
            del logits, gradient  # before the next chunk needs that memory
        if spec.group is not None and spec.reduce_hidden_gradient:
            dist.all_reduce(hidden_gradient, group=spec.group)
        of_weight = None if weight_gradient is None else weight_gradient.to(weight.dtype)
        return hidden_gradient.to(hidden.dtype), of_weight, *[None] * 7


@dataclass
class _ChunkResult:
    """Results for n tokens, [n] each, and `logits` [n, tokens] of this rank's vocabulary.

    `chosen` are the log-probs [n, K] of chosen tokens, `most_likely` ids and log-probs [n, K] of the most likely ones.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor
    log_normalizer: torch.Tensor
    logits: torch.Tensor | None
    squares: torch.Tensor | None
    chosen: torch.Tensor | None = None
    most_likely: tuple[torch.Tensor, torch.Tensor] | None = None


def _logits(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, spec: HeadSpec, kept: torch.Tensor | None
) -> torch.Tensor:
    """Logits of n tokens over this rank's part of the vocabulary, [n, tokens] float32."""
    multiplied = _multiplied(hidden)
    logits = hidden.new_empty(len(hidden), spec.tokens, dtype=torch.float32)
    for columns in _slices(logits):
        _product(multiplied, _multiplied(weight[columns]).t(), hidden.dtype, out=logits[:, columns])
    if spec.temperature != 1.0:
        logits.mul_(1.0 / spec.temperature)
    if kept is not None:
        logits.masked_fill_(_left_out(kept, targets, spec), torch.finfo(logits.dtype).min)
    return logits


def _forward_chunk(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    spec: HeadSpec,
    sum_pi_squared: bool = False,
    kept: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
    top: int = 0,
) -> _ChunkResult:
    logits = _logits(hidden, weight, targets, spec, kept)
    highest = logits.amax(dim=-1)
    if spec.group is not None:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=spec.group)
    local, own = _own_targets(targets, spec)
    target_logits = (logits.gather(1, local[:, None]).squeeze(1) - highest) * own
    chosen_logits = None if chosen is None else _chosen_logits(logits, highest, chosen, spec)
    most_likely = _top_logits(logits, weight.shape[0], spec, top) if top else None
    parts = [_fused(_softmax_sums, logits[:, columns], highest, sum_pi_squared) for columns in _slices(logits)]
    sums = torch.cat([torch.stack(parts).sum(0), target_logits[None]])
    if spec.group is not None:
        dist.all_reduce(sums, group=spec.group)
    total, weighted, *squares, target_logits = sums
    log_total = total.log()
    log_normalizer = log_total + highest
    return _ChunkResult(
        log_probs=target_logits - log_total,
        entropy=log_total - weighted / total,
        log_normalizer=log_normalizer,
        logits=logits,
        squares=squares[0] / total.square() if sum_pi_squared else None,
        chosen=None if chosen_logits is None else chosen_logits - log_total[:, None],
        most_likely=None if most_likely is None else _normalized(*most_likely, log_normalizer),
    )


def _softmax_sums(logits: torch.Tensor, highest: torch.Tensor, squares: bool) -> torch.Tensor:
    """Sums of e^x, of x e^x and, with `squares`, of e^2x, where x are logits minus the highest; [2 or 3, n]."""
    shifted = logits - highest[:, None]
    exponentials = shifted.exp()
    sums = [exponentials.sum(-1), (shifted * exponentials).sum(-1)]
    return torch.stack([*sums, exponentials.square().sum(-1)] if squares else sums)


def _chosen_logits(logits: torch.Tensor, highest: torch.Tensor, chosen: torch.Tensor, spec: HeadSpec) -> torch.Tensor:
    """Logits minus the highest [n, K] of the chosen tokens of all ranks; 0 at -1."""
    local, own = _own_targets(chosen.long(), spec)
    found = (logits.gather(1, local) - highest[:, None]) * own
    if spec.group is not None:
        dist.all_reduce(found, group=spec.group)
    return found


def _top_logits(logits: torch.Tensor, rows: int, spec: HeadSpec, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [n, K] int32 and logits [n, K] of the largest logits of all ranks; -1 for tokens that are left out.

    Every rank offers its own, with padding where its part of the vocabulary, of `rows` rows, has fewer tokens.
    """
    lowest, offered = torch.finfo(logits.dtype).min, min(count, rows)
    values, ids = logits.topk(min(offered, spec.tokens), dim=-1)
    ids = torch.where(values > lowest / 2, ids + spec.first_token, -1)
    missing = (0, offered - values.shape[1])
    values, ids = (
        torch.nn.functional.pad(values, missing, value=lowest),
        torch.nn.functional.pad(ids, missing, value=-1),
    )
    if spec.group is not None:
        values, ids = (_gathered(each, spec.group) for each in (values, ids))
    values, places = values.topk(min(count, values.shape[1]), dim=-1)
    return ids.gather(1, places).int(), values


def _normalized(
    ids: torch.Tensor, logits: torch.Tensor, log_normalizer: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids, and their log-probs [n, K], 0 at -1."""
    return ids, torch.where(ids < 0, 0.0, logits - log_normalizer[:, None])


def _gathered(own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The columns of all ranks, [n, ranks K]."""
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own.contiguous(), group=group)
    return torch.cat(parts, dim=1)


def _logit_gradient(
    logits: torch.Tensor,
    log_normalizer: torch.Tensor,
    targets: torch.Tensor,
    entropy: torch.Tensor,
    of_log_prob: torch.Tensor,
    of_entropy: torch.Tensor | None,
    of_chosen: tuple[torch.Tensor, torch.Tensor] | None,
    spec: HeadSpec,
    dtype: torch.dtype,
) -> torch.Tensor:
    """d/dz of g log p_target + h H: g (1[target] - p) - h p (log p + H), divided by the temperature.

    `of_chosen` has ids [n, K] of more tokens k and the gradients g_k of their log-probs: g_k (1[k] - p) is added for
    each. log p is `logits` [n, tokens] minus `log_normalizer` [n]. The result has `dtype`.
    """
    of_log_prob = of_log_prob / spec.temperature
    of_all = of_log_prob
    if of_chosen is not None:
        chosen = of_chosen[0].long()
        of_each = of_chosen[1] * (chosen >= 0) / spec.temperature
        of_all = of_log_prob + of_each.sum(-1)
    of_entropy = None if of_entropy is None else of_entropy / spec.temperature
    softmax = log_normalizer, entropy, of_all, of_entropy
    gradient = _fused(_softmax_gradient, logits, *softmax, dtype if of_chosen is None else torch.float32)
    local, own = _own_targets(targets, spec)
    column = local[:, None]  # one of each row, so nothing is added twice, in whatever order
    of_target = _softmax_gradient(logits.gather(1, column), *softmax, torch.float32) + (of_log_prob * own)[:, None]
    gradient.scatter_(1, column, of_target.to(gradient.dtype))
    if of_chosen is not None:
        local, own = _own_targets(chosen, spec)
        gradient.scatter_add_(1, local, of_each * own)  # what is added to a column more than once is 0
    return gradient.to(dtype)


def _softmax_gradient(
    logits: torch.Tensor,
    log_normalizer: torch.Tensor,
    entropy: torch.Tensor,
    of_all: torch.Tensor,
    of_entropy: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """-p (g + h (log p + H)) [n, tokens]; `of_all` is g [n] and `of_entropy` h [n]."""
    log_p = logits - log_normalizer[:, None]
    if of_entropy is None:
        return log_p.exp_().mul_(-of_all[:, None]).to(dtype)
    log_p.clamp_(min=LEAST_LOG_PROB)
    surprise = (log_p + entropy[:, None]).mul_(-of_entropy[:, None]).sub_(of_all[:, None])
    return log_p.exp_().mul_(surprise).to(dtype)


def _left_out(kept: torch.Tensor, targets: torch.Tensor, spec: HeadSpec) -> torch.Tensor:
    """Which tokens of this rank the softmax leaves out, [n, tokens]."""
    local = torch.cat([kept.long(), targets[:, None]], dim=1) - spec.first_token
    own = (local >= 0) & (local < spec.tokens)
    left_out = torch.ones(len(kept), spec.tokens + 1, dtype=torch.bool, device=kept.device)
    left_out.scatter_(1, torch.where(own, local, spec.tokens), False)
    return left_out[:, : spec.tokens] & (kept >= 0).any(-1)[:, None]


def _own_targets(targets: torch.Tensor, spec: HeadSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Column of each target on this rank, 0 for targets of other ranks; and 1.0 for own targets, 0.0 for others."""
    local = targets - spec.first_token
    own = (local >= 0) & (local < spec.tokens)
    return torch.where(own, local, 0), own.float()


def _chunks(hidden: torch.Tensor, weight: torch.Tensor) -> list[slice]:
    """Row slices of at most HEAD_CHUNK_BYTES of logits; padding rows of the head count, so that all ranks agree."""
    rows, columns = hidden.shape[0], weight.shape[0]
    size = max(1, HEAD_CHUNK_BYTES[hidden.device.type] // (4 * columns))
    return [slice(start, min(start + size, rows)) for start in range(0, max(rows, 1), size)]


def _slices(logits: torch.Tensor) -> list[slice]:
    """Column slices of logits [n, tokens] that are computed at once: all of them on a GPU."""
    tokens = logits.shape[1]
    size = CPU_SLICE if logits.device.type == "cpu" else max(tokens, 1)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _fused(function: Callable[..., torch.Tensor], logits: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """The function of these arguments; on a GPU compiled by torch, or as it is where torch cannot compile it."""
    if logits.device.type != "cpu" and function not in _NOT_COMPILED:
        from torch._dynamo.exc import TorchDynamoException  # its import takes a second

        try:
            return _compiled(function)(logits, *arguments)
        except TorchDynamoException as error:
            _NOT_COMPILED.add(function)
            logger.warning("the output head is slower: torch does not compile %s: %s", function.__name__, error)
    return function(logits, *arguments)


_NOT_COMPILED: set[Callable[..., torch.Tensor]] = set()


@cache
def _compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return torch.compile(function, dynamic=True)


def _multiplied(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix in a precision that torch multiplies into fp32: on a CPU, half precision is none."""
    return matrix if matrix.device.type == "cuda" else matrix.float()


def _product(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype, out: torch.Tensor) -> torch.Tensor:
    """The product in fp32 of matrices as `_multiplied` returns them; `dtype` is that of the model.

    A CPU with AMX multiplies bf16 several times faster than fp32: oneDNN does so with fp32 matrices.
    """
    if one.dtype != torch.float32:
        return torch.mm(one, other, out_dtype=torch.float32, out=out)
    if dtype == torch.bfloat16 and _has_amx():
        with _bf16_products():
            return torch.mm(one, other, out=out)
    return torch.matmul(one, other, out=out)


def _gradient_product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The product of a gradient in the model's precision: in fp32 on a GPU, in that precision on a CPU."""
    if one.device.type == "cuda" and one.dtype != torch.float32:
        return torch.mm(one, other, out_dtype=torch.float32)
    return torch.matmul(one, other)


def _add_product(total: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> None:
    """Adds the product of a gradient to `total` in fp32; by slices where the product is a matrix of its own.

    That is so in half precision, and on a CPU, where `torch.matmul` may be faster than torch's `addmm_`.
    """
    if one.dtype == torch.float32 and one.device.type != "cpu":
        total.addmm_(one, other)
        return
    for rows in range(0, len(total), PRODUCT_ROWS):
        total[rows : rows + PRODUCT_ROWS] += _gradient_product(one[rows : rows + PRODUCT_ROWS], other)


@cache
def _has_amx() -> bool:
    return bool(torch.cpu.get_capabilities().get("amx_bf16", False))


@contextmanager
def _bf16_products() -> Iterator[None]:
    """Lets oneDNN round fp32 matrices to bf16 in this block; sums and results are fp32."""
    mkldnn: Any = torch.backends.mkldnn  # whose stub lacks this setting
    before, mkldnn.matmul.fp32_precision = mkldnn.matmul.fp32_precision, "bf16"
    try:
        yield
    finally:
        mkldnn.matmul.fp32_precision = before

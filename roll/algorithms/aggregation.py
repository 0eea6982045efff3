"""How the losses of tokens become one number (`loss_agg_mode`), with denominators over the whole global batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from roll.algorithms.masking import masked_mean, masked_sum
from roll.algorithms.registry import Registry


@dataclass(frozen=True)
class LossScale:
    """Counts over the global batch of one optimizer step: all micro-batches of all data-parallel ranks.

    Because every term is divided by them, the sum of the losses of the micro-batches is the loss of the batch,
    however it was split.

    Attributes:
        tokens: response tokens (N_tok).
        sequences: samples with at least one response token (N_seq).
        sequence_length: the configured length that `seq-mean-token-sum-norm` divides by.
    """

    tokens: float
    sequences: float
    sequence_length: int

    @classmethod
    def of(cls, response_mask: Tensor, sequence_length: int) -> LossScale:
        """The counts of a whole global batch, from its response_mask [B, T]."""
        lengths = response_mask.sum(-1)
        return cls(float(lengths.sum()), float((lengths > 0).sum()), sequence_length)


Aggregation = Callable[[Tensor, Tensor, LossScale], Tensor]
LOSS_AGG_MODES: Registry[Aggregation] = Registry("loss_agg_mode")
"""S_i = sum_t l_t and T_i the token count of sample i, over its response mask."""


@LOSS_AGG_MODES.register("token-mean")
def token_mean(values: Tensor, mask: Tensor, scale: LossScale) -> Tensor:
    """sum_i S_i / N_tok: every token of the batch weighs the same."""
    return masked_sum(values, mask) / max(scale.tokens, 1.0)


@LOSS_AGG_MODES.register("seq-mean-token-sum")
def seq_mean_token_sum(values: Tensor, mask: Tensor, scale: LossScale) -> Tensor:
    """sum_i S_i / N_seq: a long sample weighs more."""
    return masked_sum(values, mask) / max(scale.sequences, 1.0)


@LOSS_AGG_MODES.register("seq-mean-token-mean")
def seq_mean_token_mean(values: Tensor, mask: Tensor, scale: LossScale) -> Tensor:
    """sum_i (S_i / T_i) / N_seq: every sample weighs the same."""
    return masked_mean(values, mask, dim=-1).sum() / max(scale.sequences, 1.0)


@LOSS_AGG_MODES.register("seq-mean-token-sum-norm")
def seq_mean_token_sum_norm(values: Tensor, mask: Tensor, scale: LossScale) -> Tensor:
    """sum_i S_i / (N_seq * sequence_length): a token weighs the same in every batch (Dr. GRPO, arXiv 2503.20783)."""
    return masked_sum(values, mask) / (max(scale.sequences, 1.0) * scale.sequence_length)


def aggregate(values: Tensor, mask: Tensor, mode: str, scale: LossScale) -> Tensor:
    """This micro-batch's share of the batch's loss.

    Args:
        values: [b, T] per token; what stands outside the mask has no influence.
        mask: [b, T] response mask.
        mode: a name of LOSS_AGG_MODES.
        scale: counts over the global batch.

    Returns:
        0-d tensor.
    """
    return LOSS_AGG_MODES[mode](values, mask, scale)

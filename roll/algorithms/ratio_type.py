"""Whose ratio a token has (`ratio_type`): its own, or that of the mean over its turn or over its sample."""

from __future__ import annotations

import torch
from torch import Tensor

from roll.algorithms.kl import LOG_RATIO_CLAMP
from roll.algorithms.masking import masked


def tied_base(
    log_probs: Tensor, base_log_probs: Tensor, response_mask: Tensor, ratio_type: str, turn_index: Tensor | None = None
) -> Tensor:
    """What to take the ratio against, so that it is of `ratio_type`.

    For segment and sequence it is sg[log pi_t] - m, where m is the mean of sg[log pi - log base] over the response
    tokens of the token's turn or sample, clamped to +-LOG_RATIO_CLAMP. The log ratio is then m, the same for all of
    them, and its gradient is that of the token's own log pi_t. Source: GSPO (arXiv 2507.18071), its token-level form.

    Args:
        log_probs: log pi [b, T].
        base_log_probs: log base [b, T].
        response_mask: [b, T].
        ratio_type: token, segment or sequence.
        turn_index: [b, T] the turn of each response token; needed for segment.

    Returns:
        [b, T]: `base_log_probs` itself for token; else float64 without gradient, so that the difference to log pi is
        m to more digits than float32 leaves of it.

    Raises:
        ValueError: segment without `turn_index`.
    """
    if ratio_type == "token":
        return base_log_probs
    if ratio_type == "sequence":
        units = torch.zeros_like(response_mask, dtype=torch.int64)
    elif turn_index is not None:
        units = turn_index.clamp(min=0)
    else:
        raise ValueError("ratio_type: segment needs the tensor turn_index [b, T] of the batch; got none")
    current = log_probs.detach().double()
    mean = _mean_of_unit(masked(current - base_log_probs, response_mask), response_mask, units)
    return current - mean.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


def _mean_of_unit(values: Tensor, mask: Tensor, units: Tensor) -> Tensor:
    """[b, T] mean of values over the tokens of the mask that share a token's row and unit; values are 0 elsewhere."""
    sums = values.new_zeros(values.shape[0], int(units.max()) + 1 if units.numel() else 1)
    counts = sums.clone().scatter_add_(1, units, mask.to(values.dtype))
    sums.scatter_add_(1, units, values)
    return (sums / counts.clamp(min=1)).gather(1, units)

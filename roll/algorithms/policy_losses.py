"""Policy-gradient losses per token, by name (`pg_variant`).

A variant is one function registered in PG_VARIANTS. It sees whole samples (b of them, T padded tokens), so that
sequence-level ratios are as easy as token-level ones, and returns values per token; the `policy` loss of
`roll.algorithms.losses` weights, masks and aggregates them. What stands outside the response mask is never read.
"""

from __future__ import annotations

from roll.algorithms import clipped_losses, weighted_losses
from roll.algorithms.variant import PG_VARIANTS, TokenLosses

__all__ = ["PG_VARIANTS", "TokenLosses", "clipped_losses", "weighted_losses"]

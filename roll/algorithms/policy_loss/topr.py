"""TOPR: right responses keep their weight, wrong ones lose it as the policy becomes less likely to give them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from roll.algorithms.aggregation import masked, masked_sum
from roll.algorithms.lazy_torch import torch
from roll.algorithms.policy_loss.base import PolicyTokens, TokenLosses, clamped_exp, policy_loss
from roll.base.errors import Finding, error
from roll.base.schema import option


@dataclass
class TOPROptions:
    """The keys of TOPR."""

    topr_positive_weight: float = option(1.0, "Weight of responses with a score above 0.", ge=0, usual=(0.0, 1000.0))
    topr_negative_weight: float = option(1.0, "Weight of the other responses.", ge=0, usual=(0.0, 1000.0))
    topr_level: Literal["token", "sequence"] = option(
        "token", "The ratio of a token, or of the whole response (the paper's form)."
    )


def _check(options: TOPROptions, _: object) -> Iterator[Finding]:
    if options.topr_positive_weight == options.topr_negative_weight == 0:
        yield error("topr_positive_weight", "0, and topr_negative_weight 0 too: nothing is learned; give one a weight")


@policy_loss("topr", options=TOPROptions, check=_check, ratio_base="behavior")
def topr(tokens: PolicyTokens, options: TOPROptions) -> TokenLosses:
    """-w_pos A log pi for responses with score s > 0, -w_neg sg(clip(r, 0, 1)) A log pi for the others.

    Responses with a negative score lose weight as the policy becomes less likely to produce them. `topr_level:
    sequence` takes r from the summed log ratio of the response, as in the paper. Source: Le Roux et al. 2025 (arXiv
    2503.14286).

    Raises:
        ValueError: `scores` is None.
    """
    if tokens.scores is None:
        raise ValueError("pg_variant topr needs the raw scores [b] of the samples; got None")
    log_ratio = tokens.log_ratio.detach()
    if options.topr_level == "sequence":
        log_ratio = masked_sum(log_ratio, tokens.mask, dim=-1)[:, None].expand_as(log_ratio)
    ratio = clamped_exp(masked(log_ratio, tokens.mask))
    positive = (tokens.scores > 0)[:, None]
    negative_weight = options.topr_negative_weight * ratio.clamp(max=1.0)
    weight = torch.where(positive, torch.full_like(ratio, options.topr_positive_weight), negative_weight)
    return TokenLosses(-weight * tokens.advantages * tokens.log_probs, ratio, ~positive & (ratio > 1))

"""CISPO: the clipped ratio is a weight without gradient, so every token keeps one."""

from __future__ import annotations

from dataclasses import dataclass

from roll.algorithms.policy_loss.base import PolicyTokens, TokenLosses, policy_loss
from roll.base.schema import option


@dataclass
class CISPOOptions:
    """The keys of CISPO."""

    cispo_epsilon_low: float = option(
        0.1, "The weight is at least 1 minus this; 1 or more leaves it unbounded below.", gt=0, usual=(1e-6, 1000.0)
    )
    cispo_epsilon_high: float = option(0.1, "The weight is at most 1 plus this.", gt=0, usual=(1e-6, 1000.0))
    cispo_use_unified_mask: bool = option(
        False, "Leave out tokens that ppo would clip: ratio too high with A > 0, too low with A < 0."
    )


@policy_loss("cispo", options=CISPOOptions, ratio_base="behavior")
def cispo(tokens: PolicyTokens, options: CISPOOptions) -> TokenLosses:
    """-sg(clip(r, 1 - eps_low, 1 + eps_high)) A log pi: clips the weight, so every token keeps a gradient.

    With `cispo_use_unified_mask` tokens with (A > 0 and r > 1 + eps_high) or (A < 0 and r < 1 - eps_low) have no loss,
    as in PPO. Source: MiniMax-M1 (arXiv 2506.13585) eq. 4-5, and its unified formulation for the mask.
    """
    low, high = 1 - options.cispo_epsilon_low, 1 + options.cispo_epsilon_high
    ratio = tokens.ratio.detach()
    weight = ratio.clamp(low, high)
    clipped = weight != ratio
    if options.cispo_use_unified_mask:
        dropped = ((tokens.advantages > 0) & (ratio > high)) | ((tokens.advantages < 0) & (ratio < low))
        weight = weight.masked_fill(dropped, 0.0)
    return TokenLosses(-weight * tokens.advantages * tokens.log_probs, ratio, clipped)

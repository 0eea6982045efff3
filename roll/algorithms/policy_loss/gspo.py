"""GSPO: PPO with one ratio for all tokens of a response."""

from __future__ import annotations

from dataclasses import dataclass

from roll.algorithms.policy_loss.base import Clip, PolicyTokens, TokenLosses, clipped_surrogate, policy_loss
from roll.base.schema import option


@dataclass
class GSPOOptions:
    """The keys of GSPO."""

    gspo_clip_low: float = option(3e-4, "Clip below 1 of the response's mean ratio.", gt=0, le=1, usual=(1e-8, 1.0))
    gspo_clip_high: float = option(4e-4, "Clip above 1 of the response's mean ratio.", gt=0, usual=(1e-8, 100.0))


@policy_loss("gspo", options=GSPOOptions, reads_ratio_type=False)
def gspo(tokens: PolicyTokens, options: GSPOOptions) -> TokenLosses:
    """`ppo` with r_t = sg[s] pi_t / sg[pi_t], where s = exp(mean_t(log pi - log base)) is the sequence ratio.

    All tokens of a response have the same ratio and are clipped together; the gradient flows through each token's own
    log-prob. Source: GSPO (arXiv 2507.18071) section 4.3, GSPO-token.
    """
    ratio = tokens.with_ratio_of("sequence").ratio.to(tokens.log_probs.dtype)
    return clipped_surrogate(ratio, tokens.advantages, Clip(options.gspo_clip_low, options.gspo_clip_high))

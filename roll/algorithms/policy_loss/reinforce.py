"""Losses that differentiate log pi, without a weight: REINFORCE, and its form with a squared penalty."""

from __future__ import annotations

from dataclasses import dataclass

from roll.algorithms.policy_loss.base import PolicyTokens, TokenLosses, clamped_exp, none_of, policy_loss
from roll.base.schema import option


@policy_loss("vanilla", multiplies_ratio=False, reads_ratio=False, reads_ratio_type=False)
def vanilla(tokens: PolicyTokens, options: object) -> TokenLosses:
    """-A log pi; uses no ratio, so it does not correct for stale samples.

    The `loss_mode: vanilla` of verl is `ppo` here. Source: Williams 1992, REINFORCE.
    """
    ratio = tokens.ratio.detach()
    return TokenLosses(-tokens.advantages * tokens.log_probs, ratio, none_of(ratio))


@dataclass
class Kimi15Options:
    """The key of Kimi k1.5."""

    kimi15_tau: float = option(0.1, "Weight of half the squared log ratio.", gt=0, usual=(1e-6, 1000.0))


@policy_loss("kimi15", options=Kimi15Options, ratio_base="behavior", multiplies_ratio=False)
def kimi15(tokens: PolicyTokens, options: Kimi15Options) -> TokenLosses:
    """-A log pi + (tau / 2) (log pi - log base)^2: no weights; a squared penalty keeps the policy near its base.

    Source: Kimi k1.5 (arXiv 2501.12599) section 2.3.2, per token.
    """
    log_ratio = tokens.log_ratio
    loss = -tokens.advantages * tokens.log_probs + 0.5 * options.kimi15_tau * log_ratio**2
    return TokenLosses(loss, clamped_exp(log_ratio).detach(), none_of(loss))

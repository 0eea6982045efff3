"""SAPO: a soft gate on the ratio instead of a clip."""

from __future__ import annotations

from dataclasses import dataclass

from roll.algorithms.lazy_torch import torch
from roll.algorithms.policy_loss.base import PolicyTokens, TokenLosses, none_of, policy_loss
from roll.base.schema import option


@dataclass
class SAPOOptions:
    """The keys of SAPO."""

    sapo_tau_positive: float = option(
        1.0,
        "How fast the gradient falls with the distance of the ratio from 1 where A > 0.",
        gt=0,
        usual=(0.001, 1000.0),
    )
    sapo_tau_negative: float = option(1.05, "As sapo_tau_positive, where A <= 0.", gt=0, usual=(0.001, 1000.0))


@policy_loss("sapo", options=SAPOOptions)
def sapo(tokens: PolicyTokens, options: SAPOOptions) -> TokenLosses:
    """-A (4 / tau) sigmoid(tau (r - 1)): a soft gate instead of a clip; at r = 1 its gradient is that of -r A.

    tau is `sapo_tau_positive` where A > 0, else `sapo_tau_negative`. Source: SAPO (arXiv 2511.20347) eq. 5-6.
    """
    ratio = tokens.ratio
    tau = torch.where(tokens.advantages > 0, options.sapo_tau_positive, options.sapo_tau_negative).to(ratio.dtype)
    gate = 4 / tau * torch.sigmoid(tau * (ratio - 1))
    return TokenLosses(-gate * tokens.advantages, ratio.detach(), none_of(ratio))

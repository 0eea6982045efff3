"""TIS: REINFORCE with a truncated importance weight for each token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from roll.algorithms.policy_loss.base import PolicyTokens, TokenLosses, policy_loss
from roll.base.errors import Finding
from roll.base.schema import check_order, option


@dataclass
class TISOptions:
    """The keys of TIS."""

    tis_lower_bound: float = option(0.0, "Smallest weight.", ge=0)
    tis_upper_bound: float = option(1.0, "Largest weight.", gt=0, usual=(0.001, 1e4))


def _check(options: TISOptions, _: object) -> Iterator[Finding]:
    yield from check_order("tis_lower_bound", options.tis_lower_bound, options.tis_upper_bound)


@policy_loss("tis", options=TISOptions, check=_check, ratio_base="behavior")
def tis(tokens: PolicyTokens, options: TISOptions) -> TokenLosses:
    """-sg(clip(r, lower, upper)) A log pi: truncated importance sampling (Ionides 2008), per token.

    r is against the policy that sampled, the default of `pg_ratio_base` for this variant. Between the bounds the
    gradient is that of -r A; the upper bound trades variance for bias. A truncated weight on top of another loss
    (`rollout_is` of verl, `use_tis` of slime, the importance sampling correction for vLLM of TRL) is
    `correction.weights` here. Source: IMPALA (arXiv 1802.01561) section 4, the form for policy gradients.
    """
    ratio = tokens.ratio.detach()
    weight = ratio.clamp(options.tis_lower_bound, options.tis_upper_bound)
    return TokenLosses(-weight * tokens.advantages * tokens.log_probs, ratio, weight != ratio)

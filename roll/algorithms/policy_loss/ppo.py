"""PPO, and its form against the proximal policy: the ratio is clipped, which bounds the size of an update."""

from __future__ import annotations

from dataclasses import dataclass

from roll.algorithms.policy_loss.base import Clip, PolicyTokens, TokenLosses, clipped_surrogate, policy_loss
from roll.base.schema import needs, option


@dataclass
class PPOOptions:
    """The keys of PPO, and of losses that are PPO but for some tokens."""

    pg_clip_low: float = option(0.2, "Ratio clip below 1.", gt=0, le=1, usual=(1e-6, 1.0))
    pg_clip_high: float = option(0.2, "Ratio clip above 1.", gt=0, usual=(1e-6, 100.0))
    dual_clip_loss: bool = option(False, "Bound the loss of negative advantages.")
    dual_clip_c: float = option(
        3.0,
        "Bound of dual_clip_loss in multiples of |A|.",
        gt=1,
        usual=(1.0, 1000.0),
        only_for=needs("dual_clip_loss", "dual_clip_loss is false"),
    )


@policy_loss("ppo", options=PPOOptions)
def ppo(tokens: PolicyTokens, options: PPOOptions) -> TokenLosses:
    """max(-r A, -clip(r, 1 - `pg_clip_low`, 1 + `pg_clip_high`) A), and with dual clip min(that, -c A) where A < 0.

    Source: Schulman et al. 2017 (arXiv 1707.06347) eq. 7; separate bounds, DAPO (arXiv 2503.14476); dual clip, Ye et
    al. 2020 (arXiv 1912.09729) eq. 5.
    """
    dual = options.dual_clip_c if options.dual_clip_loss else None
    return clipped_surrogate(tokens.ratio, tokens.advantages, Clip(options.pg_clip_low, options.pg_clip_high, dual))


@policy_loss("decoupled_ppo", options=PPOOptions, ratio_base="proximal", needs_weights=True)
def decoupled_ppo(tokens: PolicyTokens, options: PPOOptions) -> TokenLosses:
    """`ppo` against the proximal policy p, times the weight p / mu of `correction`, which is for stale samples.

    The configuration turns on these weights for this loss, and the `policy` loss multiplies them in, so the formula
    here is that of `ppo`. Source: Hilton et al. 2021 (arXiv 2110.00641); AReaL (arXiv 2505.24298).
    """
    return ppo(tokens, options)

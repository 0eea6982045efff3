"""Policy losses, the values of `pg_variant`: one file for each, or for a few that share a formula.

A file has the options of its loss with their checks, its formula with the source, and its traits. `base` has what they
share. No file but these names a loss; all are found here.
"""

from __future__ import annotations

from roll.algorithms.policy_loss.base import POLICY_LOSSES, PolicyLoss, PolicyTokens, TokenLosses, policy_loss
from roll.algorithms.registry import import_all

import_all(__name__, __path__)

__all__ = ["POLICY_LOSSES", "PolicyLoss", "PolicyTokens", "TokenLosses", "policy_loss"]

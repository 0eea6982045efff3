"""Policy losses, the values of `pg_variant`: one file for each, or for a few that share a formula.

A file has the options of its loss with their checks, its formula with the source, and its traits. `base` has what they
share. No file but these names a loss; all are found here.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from roll.algorithms.policy_loss.base import POLICY_LOSSES, PolicyLoss, PolicyTokens, TokenLosses, policy_loss

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    import_module(_module.name)

__all__ = ["POLICY_LOSSES", "PolicyLoss", "PolicyTokens", "TokenLosses", "policy_loss"]

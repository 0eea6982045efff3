"""Advantage estimators, the values of `adv_estimator`: one file for each, or for a few that share a formula.

A file has the options of its estimators with their checks, their formulas with the source, and their traits. In the
formulas, R is the score of a response or trajectory minus the KL penalty of its tokens.
"""

from __future__ import annotations

from roll.algorithms.estimators.base import ADV_ESTIMATORS, Estimator, RewardBatch, estimator
from roll.algorithms.registry import import_all

import_all(__name__, __path__)

__all__ = ["ADV_ESTIMATORS", "Estimator", "RewardBatch", "estimator"]

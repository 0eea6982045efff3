from __future__ import annotations

import pytest

from roll.algorithms.aggregation import LOSS_AGG_MODES
from roll.algorithms.kl import KL_ESTIMATORS
from roll.algorithms.losses import LOSSES
from roll.algorithms.policy_loss import POLICY_LOSSES
from roll.algorithms.registry import Registry


def test_all_allowed_values_are_registered():
    assert set(LOSS_AGG_MODES) == {
        "token-mean",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
    }
    assert set(KL_ESTIMATORS) == {"k1", "k2", "k3", "abs"}
    assert set(LOSSES) == {"sft", "gradient", "policy", "value", "dpo", "bradley_terry"}


def test_an_unknown_name_error_lists_the_known_names_and_the_closest():
    with pytest.raises(KeyError, match="pg_variant: 'pppo' is none of cispo, .*; did you mean 'ppo'"):
        POLICY_LOSSES["pppo"]


def test_a_name_is_registered_once():
    registry: Registry = Registry("thing")
    registry.register("one")(lambda: 1)
    with pytest.raises(ValueError, match="'one' is registered twice"):
        registry.register("one")

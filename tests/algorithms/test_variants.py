"""What is declared of every `pg_variant` is true of its function; a step forgotten when adding one fails here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from roll.algorithms import policy_losses
from roll.algorithms.policy_losses import PolicyLossConfig, PolicyTokens
from roll.configs.policy import VARIANT_KEYS, VARIANT_TRAITS

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("\n## Policy loss\n")[2].partition("\n## ")[0]

BOTH = [name for name in policy_losses.PG_VARIANTS if name in VARIANT_TRAITS]
"""Variants with a function and a declaration."""

LINE = 'its entry in VARIANT_TRAITS of roll/configs/policy.py: "NAME": VariantTraits(...)'


def gradient(variant: str, log_ratio: float) -> float:
    """D loss / d log pi of one token over -A, for an A so large that terms without A vanish, and a score below 0."""
    log_probs = torch.full((1, 1), log_ratio - 1.0, dtype=torch.float64, requires_grad=True)
    base, advantage = torch.full((1, 1), -1.0, dtype=torch.float64), 1e9
    mask = torch.ones_like(base, dtype=torch.bool)
    tokens = PolicyTokens(log_probs, base, torch.full_like(base, advantage), mask, torch.tensor([-1.0]))
    terms = policy_losses.PG_VARIANTS[variant](tokens, PolicyLossConfig(pg_variant=variant))
    (slope,) = torch.autograd.grad(terms.loss.sum(), log_probs)
    return slope.item() / -advantage


def test_every_declared_variant_has_a_function() -> None:
    missing = VARIANT_TRAITS.keys() - policy_losses.PG_VARIANTS.keys()
    steps = [
        f'write its function in roll/algorithms/policy_losses.py: @PG_VARIANTS.register("{name}")' for name in missing
    ]
    assert not missing, "; ".join(steps)


def test_every_function_is_declared() -> None:
    missing = policy_losses.PG_VARIANTS.keys() - VARIANT_TRAITS.keys()
    assert not missing, "; ".join(f"write {LINE}".replace("NAME", name) for name in missing)


@pytest.mark.parametrize("variant", BOTH)
def test_no_weight_can_count_a_ratio_twice(variant: str) -> None:
    multiplies = gradient(variant, -0.05) == pytest.approx(2.718281828**-0.05, rel=1e-3)
    assert VARIANT_TRAITS[variant].multiplies_ratio == multiplies, (
        f"the gradient of {variant} is {'' if multiplies else 'not '}a multiple of its ratio, so multiplies_ratio must "
        f"be {multiplies} in {LINE.replace('NAME', variant)}; otherwise correction.weights with a ratio against "
        "the sampling policy corrects twice, or is refused for nothing"
    )


@pytest.mark.parametrize("variant", BOTH)
def test_a_variant_that_corrects_nothing_is_known_as_one(variant: str) -> None:
    def loss(base: float) -> float:
        one = torch.ones(1, 2, dtype=torch.float64)
        config = PolicyLossConfig(pg_variant=variant)
        function = policy_losses.PG_VARIANTS[variant]
        tokens = PolicyTokens(-one, base * one, one, one.bool(), torch.tensor([-1.0]))
        return function(tokens, config).loss.sum().item()

    reads = loss(-1.1) != loss(-0.8)
    assert VARIANT_TRAITS[variant].reads_ratio == reads, (
        f"the loss of {variant} {'depends' if reads else 'does not depend'} on its ratio, so reads_ratio must be "
        f"{reads} in {LINE.replace('NAME', variant)}; otherwise stale samples are trained on uncorrected without a word"
    )


@pytest.mark.parametrize("variant", VARIANT_TRAITS)
def test_every_variant_and_its_keys_have_a_row_in_the_documentation(variant: str) -> None:
    rows = re.findall(rf"^\| `{variant}` \|.*$", SECTION, re.MULTILINE)
    assert len(rows) == 1, (
        f"write one row | `{variant}` | loss | keys | in the table of docs/algorithms.md, Policy loss"
    )
    own = [key for key, variants in VARIANT_KEYS.items() if variants == (variant,)]
    missing = [key for key in own if f"`{key}`" not in rows[0]]
    assert not missing, f"name the keys {', '.join(missing)} in the row of {variant} in docs/algorithms.md, Policy loss"

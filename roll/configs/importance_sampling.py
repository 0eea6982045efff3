"""`importance_sampling: true` with `is_clip_range: [lower, upper]`: another spelling of token weights."""

from __future__ import annotations

from typing import Any

from roll.configs.aliases import Tree
from roll.configs.errors import Problem

SWITCH, RANGE = "importance_sampling", "is_clip_range"


def expand_importance_sampling(tree: Tree) -> tuple[Tree, list[Problem], list[Problem]]:
    """The tree with the switch and its range as `correction.weights`, a note that shows them, and problems.

    Without a range the bounds are those of `correction.weights`.
    """
    rest = {key: value for key, value in tree.items() if key not in (SWITCH, RANGE)}
    if SWITCH not in tree and RANGE not in tree:
        return rest, [], []
    switch = tree.get(SWITCH, False)
    problem = _problem(tree, switch)
    if problem is not None:
        return rest, [], [problem]
    if not switch:
        return rest, [Problem(SWITCH, "false is the default; correction.weights stays as it is without it")], []
    correction = tree.get("correction") or {}
    if not isinstance(correction, dict):
        return rest, [], []  # the section itself is told to be none
    weights: Tree = {"level": "token", "mode": "clamp"}
    if RANGE in tree:
        weights["lower"], weights["upper"] = tree[RANGE]
    shown = ", ".join(f"{key}: {value}" for key, value in weights.items())
    rest["correction"] = {**correction, "weights": weights}
    return rest, [Problem(SWITCH, f"true is read as correction.weights {{{shown}}}")], []


def _problem(tree: Tree, switch: Any) -> Problem | None:
    """What is wrong with the two keys, if anything."""
    if not isinstance(switch, bool):
        ratio = {"seq": "write actor_train.pg_variant: gspo", "token": "leave it out; ratios are those of tokens"}
        return Problem(SWITCH, f"{switch!r} is not true or false; {ratio.get(str(switch), 'use true')}")
    correction = tree.get("correction")
    if isinstance(correction, dict) and "weights" in correction and SWITCH in tree:
        return Problem(SWITCH, "is the other spelling of correction.weights, which is given too; keep one")
    if not switch:
        return Problem(RANGE, f"has no effect without {SWITCH}: true") if RANGE in tree else None
    bounds = tree.get(RANGE, [0, 1])
    numbers = isinstance(bounds, list) and all(
        isinstance(item, int | float) and not isinstance(item, bool) for item in bounds
    )
    if not numbers or len(bounds) != 2:
        return Problem(RANGE, f"{bounds!r} is not a lower and an upper bound; write [0.5, 2.0]")
    return None

"""Reads verl's `rollout_correction` as `correction`."""

from __future__ import annotations

from typing import Any

from roll.base.schema import Tree
from roll.compat.recipe import Recipe, shown
from roll.compat.systems.verl import CORRECTION

KEYS = """rollout_is rollout_is_threshold rollout_is_batch_normalize
    rollout_rs rollout_rs_threshold rollout_rs_threshold_lower""".split()

VERL_REJECTION_LEVELS = {
    "token": "token",
    "seq_mean": "sequence-mean",
    "seq_sum": "sequence-sum",
    "seq_max": "sequence-max",
}
"""First part of an option of `rollout_rs` -> `correction.rejection.level`; the last part is the statistic."""

EARLIER_REJECTION = {"token": "token", "sequence": "sequence-sum", "geometric": "sequence-mean"}
"""`rollout_rs` of verl before it had statistics -> level, with k1; its bounds are those of the ratio."""


def read_rollout_correction(recipe: Recipe) -> None:
    """Reads `algorithm.rollout_correction` as `correction`.

    Its k1 is the negative log ratio, so its bounds `a_b` are those of 1 / ratio; the bounds of the ratio
    are 1 / b and 1 / a. A single bound u of k1 means 1 / u to u in verl.
    """
    sections = (f"{CORRECTION}.", "rollout_correction.", "")
    paths = {name: section + name for name in KEYS for section in sections if recipe.has(section + name)}
    loss = recipe.take(f"{CORRECTION}.loss_type", "ppo_clip")
    if loss != "ppo_clip":
        advice = "for reinforce write actor_train.pg_variant: tis"
        recipe.error(f"{CORRECTION}.loss_type", f"{loss} is not available: {advice}")
    given = {name: recipe.take(path) for name, path in paths.items()}
    level, option = given.get("rollout_is"), given.get("rollout_rs")
    if level is None and option is None:
        for path in paths.values():
            recipe.note(path, "has no effect: rollout_is and rollout_rs are null")
        return
    where = paths["rollout_rs" if level is None else "rollout_is"]
    if any(recipe.get(f"correction.{name}") is not None for name in ("weights", "rejection", "rejections")):
        recipe.two_spellings(where, "correction")
        return
    try:
        if level is not None:
            recipe.put("correction.weights", _weights(level, given))
        if option is not None:
            first, *further = _rejections(option, given)
            recipe.put("correction.rejection", first)
            if further:
                named = {str(number): each for number, each in enumerate(further, start=2)}
                recipe.put("correction.rejections", named)
            _read_denominator(recipe, where)
    except ValueError as error:
        recipe.error(where, str(error))
        return
    recipe.note(where, f"is read as correction: {_shown(recipe.get('correction'))}")


def _read_denominator(recipe: Recipe, where: str) -> None:
    """The counts by which verl divides the loss after a rejection depend on `loss_agg_mode`."""
    mode = recipe.get("loss_agg_mode", "seq-mean-token-mean")
    if mode == "token-mean" and recipe.get("old_log_probs_source") != "behavior":
        recipe.put_new("correction.renormalize", True)
    if mode == "seq-mean-token-mean":
        recipe.note(where, "verl divides the loss of a response by its kept tokens, and this project by all its tokens")


def _weights(level: Any, given: Tree) -> Tree:
    if level not in ("token", "sequence"):
        raise ValueError(f"rollout_is {level!r} is not token, sequence or null")
    threshold = given.get("rollout_is_threshold")
    upper = 2.0 if threshold is None else _positive(threshold, "rollout_is_threshold")
    normalize = {"normalize": True} if given.get("rollout_is_batch_normalize") else {}
    return {"level": level, "upper": upper, **normalize}


def _rejections(option: Any, given: Tree) -> list[Tree]:
    """The rejections of an option, which may list several with commas, with a threshold for each or one for all."""
    threshold, lower = given.get("rollout_rs_threshold"), given.get("rollout_rs_threshold_lower")
    if threshold is None:
        raise ValueError(f"rollout_rs {option} needs rollout_rs_threshold")
    if not isinstance(option, str):
        raise ValueError(f"rollout_rs {option!r} is not text, such as token_k1")
    options, thresholds = option.split(","), threshold.split(",") if isinstance(threshold, str) else [threshold]
    if len(thresholds) not in (1, len(options)):
        raise ValueError(
            f"rollout_rs {option!r} has {len(options)} options, but rollout_rs_threshold {threshold!r} has "
            f"{len(thresholds)} values; give one for each, or one for all"
        )
    thresholds *= len(options) // len(thresholds)
    return [_rejection(name.strip(), bound, lower) for name, bound in zip(options, thresholds, strict=True)]


def _rejection(option: str, threshold: Any, lower: Any) -> Tree:
    if option in EARLIER_REJECTION:
        upper = _positive(threshold, "rollout_rs_threshold")
        least = 1 / upper if lower is None else _positive(lower, "rollout_rs_threshold_lower")
        return {"statistic": "k1", "level": EARLIER_REJECTION[option], "lower": least, "upper": upper}
    level, _, statistic = option.rpartition("_")
    if level not in VERL_REJECTION_LEVELS or statistic not in ("k1", "k2", "k3"):
        known = ", ".join(f"{name}_k1" for name in VERL_REJECTION_LEVELS)
        raise ValueError(f"rollout_rs {option!r} is unknown; use {known}, or the same with k2 or k3")
    rejection: Tree = {"statistic": statistic, "level": VERL_REJECTION_LEVELS[level]}
    if statistic != "k1":
        return rejection | {"upper": _positive(threshold, "rollout_rs_threshold")}
    first, found, second = str(threshold).partition("_")
    high = _positive(second if found else first, "rollout_rs_threshold")
    low = _positive(first, "rollout_rs_threshold") if found else 1 / high
    return rejection | {"lower": 1 / high, "upper": 1 / low}


def _positive(value: Any, name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if isinstance(value, bool) or not number > 0:
        raise ValueError(f"{name} {value!r} is not a number above 0, or two of them such as 0.5_2.0 for k1")
    return number


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_shown(item)}" for key, item in value.items()) + "}"
    return f"{value:.4g}" if isinstance(value, float) else shown(value)

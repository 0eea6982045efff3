"""Reads what recipes of ROLL write differently about the policy loss: ratio, clipping, KL, correction, advantages.

As in `roll.compat.systems.roll_recipes`, a function takes the keys it reads, puts ours, and leaves a remark.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.algorithms.estimators.turn_returns import METHODS
from roll.algorithms.options.policy_options import traits_of
from roll.base.schema import SECTION
from roll.compat.recipe import Recipe, shown

PG_CLIP = 0.2
"""`pg_clip` where a recipe does not set it."""

INIT_KL_COEF = 0.2
"""`init_kl_coef` where a recipe does not set it."""


# The policy loss


def read_old_log_probs(recipe: Recipe) -> None:
    """Two switches choose whether the trainer computes old log-probs; with stale samples the engine's are used."""
    recompute = recipe.take_switch("enable_old_logprobs_recompute")
    keep = recipe.take_switch("force_disable_old_logprobs_recompute")
    if not recompute and not keep:
        return
    path, source = (
        ("force_disable_old_logprobs_recompute", "behavior") if keep else ("enable_old_logprobs_recompute", "recompute")
    )
    stale = recipe.get("async_generation_ratio", 0)
    corrected = recipe.get("train_infer_correction.is_weight.enabled") or recipe.has("correction.weights")
    variant = recipe.get("actor_train.pg_variant", "ppo")
    if source == "recompute" and stale and not corrected and traits_of(str(variant)).ratio_base != "behavior":
        recipe.note(path, "has no effect: with stale samples the ratio is taken against the policy that sampled them")
    elif recipe.put_new("old_log_probs_source", source):
        recipe.note(path, f"is read as old_log_probs_source: {source}")


TOPR_WEIGHTS = {
    "postive_loss_coef": "topr_positive_weight",
    "positive_loss_coef": "topr_positive_weight",
    "use_topr_neg_loss_coef": "topr_negative_weight",
}
"""Coefficients that older versions of ROLL add to the policy loss -> weights of pg_variant topr."""


def read_topr(recipe: Recipe) -> None:
    """The terms of TOPR are the whole loss where the policy loss has weight 0."""
    given = {ours: recipe.get(key) for key, ours in TOPR_WEIGHTS.items() if recipe.get(key)}
    if recipe.get("rl_loss_coef", 1) != 0 or not given or recipe.get("actor_train.pg_variant", "topr") != "topr":
        return
    read = {"actor_train.pg_variant": "topr", **dict.fromkeys(TOPR_WEIGHTS.values(), 0), **given}
    for key, value in read.items():
        recipe.put_new(key, value if key not in given or isinstance(value, int | float) else 1)
    terms = ", ".join(f"{key}: {recipe.get(key)}" for key in read)
    lost = [str(value) for value in given.values() if not isinstance(value, int | float)]
    instead = f"; 1 instead of {', '.join(lost)}, which is not a number" if lost else ""
    recipe.note("rl_loss_coef", f"0 with the coefficients of TOPR is read as {terms}{instead}")
    for key in ("rl_loss_coef", *TOPR_WEIGHTS):
        recipe.take(key)


def read_kl(recipe: Recipe) -> None:
    """In ROLL a KL term without a weight is off; the KL in the reward has the weight 0.2 by default."""
    if recipe.get("use_kl_loss") and not recipe.get("kl_loss_coef"):
        recipe.drop("use_kl_loss", "kl_loss_coef is 0")
    if recipe.get("add_token_level_kl"):
        weight = recipe.get("init_kl_coef", INIT_KL_COEF)
        if weight == 0:
            recipe.drop("add_token_level_kl", "init_kl_coef is 0")
        elif recipe.put_new("init_kl_coef", weight):
            recipe.note("add_token_level_kl", f"has the weight {weight:g} in ROLL: init_kl_coef is {weight:g}")


def read_clipping(recipe: Recipe) -> None:
    """`pg_clip` is both bounds, unless `use_pg_clip_range` chooses `pg_clip_low` and `pg_clip_high`."""
    ranges, given = recipe.take_switch("use_pg_clip_range"), recipe.take("pg_clip")
    clip = given if isinstance(given, int | float) else PG_CLIP
    bounds = [key for key in ("pg_clip_low", "pg_clip_high") if key not in recipe.overridden]
    if ranges and given is not None:
        recipe.note("pg_clip", "is not a bound of the ratio: use_pg_clip_range takes pg_clip_low and pg_clip_high")
    elif given is not None:
        lost = [f"{key} {recipe.get(key)}" for key in bounds if recipe.get(key) not in (None, given)]
        for key in bounds:
            recipe.put(key, given)
        instead = f", instead of {' and '.join(lost)}; use_pg_clip_range: true would take those" if lost else ""
        read = f"is read as {' and '.join(bounds)}: {given}{instead}"
        recipe.note("pg_clip", read if bounds else "has no effect: pg_clip_low and pg_clip_high are given")
    elif ranges is False:
        for key in bounds:
            recipe.drop(key, f"use_pg_clip_range is false, so the bound is pg_clip, {PG_CLIP} by default")
    if recipe.get("importance_sampling") in ("seq", "token"):
        _read_sequence_ratio(recipe, clip)
    if given is not None:
        read_dual_clip(recipe, clip)


def read_dual_clip(recipe: Recipe, clip: float = PG_CLIP) -> None:
    """In ROLL the bound of `dual_clip_loss` follows from `pg_clip`, whatever the bounds of the ratio are."""
    variant = recipe.get("actor_train.pg_variant", "ppo")
    if recipe.get("dual_clip_loss") is True and variant in ("ppo", "decoupled_ppo"):
        bound = round(1 + 2 * clip, 6)
        if recipe.put_new("dual_clip_c", bound):
            recipe.note(
                "dual_clip_loss", f"has the bound 1 + 2 pg_clip in ROLL: dual_clip_c is {bound:g}, not the default 3"
            )


def _read_sequence_ratio(recipe: Recipe, clip: float) -> None:
    """`seq` is gspo, with the clip bounds that ppo has in ROLL."""
    if recipe.take("importance_sampling") == "token":
        recipe.note("importance_sampling", "token is the default")
        return
    if recipe.put_new("actor_train.pg_variant", "gspo"):
        for key in ("gspo_clip_low", "gspo_clip_high"):
            recipe.put_new(key, clip)
        recipe.note(
            "importance_sampling",
            f"seq is read as actor_train.pg_variant: gspo, with pg_clip {clip:g} as gspo_clip_low and gspo_clip_high",
        )
    else:
        recipe.note("importance_sampling", "has no effect: actor_train.pg_variant is given")


WEIGHT_LEVELS = {name: name for name in ("token", "sequence", "geometric", "segment")}
FILTER_LEVELS = {
    "token": "token",
    "sequence": "sequence-sum",
    "geometric": "sequence-mean",
    "segment": "segment-mean",
}
"""Types of weights and filters of `train_infer_correction` -> levels of `correction`."""


def read_correction(recipe: Recipe) -> None:
    """`train_infer_correction`: weights and filters by the ratio of the trainer's old log-probs to the engine's."""
    path = "train_infer_correction"
    given = recipe.take(path)
    if not isinstance(given, dict):
        if given not in (None, False):
            recipe.refuse(path, given, SECTION)
        return
    if recipe.has("correction"):
        recipe.note(path, "has no effect: correction is given")
        return
    read = []
    weight, filters = given.get("is_weight"), given.get("filters")
    if isinstance(weight, dict) and weight.get("enabled"):
        level = _level(recipe, f"{path}.is_weight.weight_type", weight.get("weight_type", "token"), WEIGHT_LEVELS)
        upper = weight.get("upper_bound", 1.2)
        recipe.put("correction.weights", {"level": level, "mode": "clamp", "lower": 0.0, "upper": upper})
        recipe.put_new("old_log_probs_source", "recompute")
        recipe.put_new("pg_ratio_base", "proximal")
        read.append(f"is_weight as correction.weights (level {level}, upper {upper})")
    listed = filters if isinstance(filters, list) else []
    enabled = [item for item in listed if isinstance(item, dict) and item.get("enabled")]
    for number, item in enumerate([item for item in enabled if item.get("ratio_enabled", True)], start=1):
        level, low, high = _filter_level(recipe, item), item.get("ratio_low", 0.8), item.get("ratio_high", 1.2)
        key = "correction.rejection" if number == 1 else f"correction.rejections.{number}"
        recipe.put(key, {"statistic": "k1", "level": level, "lower": low, "upper": high})
        read.append(f"the ratio of a filter as {key} (level {level}, {low} to {high})")
    by_difference = [item for item in enabled if item.get("diff_enabled")]
    for item in by_difference[:1]:
        level, low, high = _filter_level(recipe, item), item.get("diff_low"), item.get("diff_high")
        recipe.put("correction.difference", {"level": level, "lower": low, "upper": high})
        read.append(f"its difference as correction.difference (level {level}, {low} to {high})")
    if read:
        rest = "; not available: further differences" if len(by_difference) > 1 else ""
        recipe.note(path, f"is read: {', '.join(read)}{rest}")


def _filter_level(recipe: Recipe, item: Mapping[str, Any]) -> str:
    path = "train_infer_correction.filters.agg_type"
    return _level(recipe, path, item.get("agg_type", "token"), FILTER_LEVELS)


def _level(recipe: Recipe, path: str, kind: Any, levels: Mapping[str, str]) -> str:
    if isinstance(kind, str) and kind in levels:
        return levels[kind]
    recipe.refuse(path, kind, f"one of {', '.join(levels)}")
    return "token"


# Rewards and advantages


def read_reward_norm(recipe: Recipe) -> None:
    """`reward_norm`, `reward_shift` and `reward_scale` of older recipes."""
    kind = recipe.take("reward_norm")
    shift, scale = recipe.take_switch("reward_shift"), recipe.take_switch("reward_scale")
    if kind in (None, "None", "none", False):
        return
    if not isinstance(kind, str):
        recipe.refuse("reward_norm", kind, "batch, group, running or null")
        return
    types = {
        "norm_mean_type": None if scale and not shift else kind,
        "norm_std_type": None if shift and not scale else kind,
    }
    for key, value in types.items():
        recipe.put_new(key, value)
    recipe.note(
        "reward_norm", f"is read as norm_mean_type: {types['norm_mean_type']}, norm_std_type: {types['norm_std_type']}"
    )


def read_reward_normalization(recipe: Recipe) -> None:
    """With grpo and reinforce it replaces the estimator's own normalization of scores."""
    path, estimator = "reward_normalization", recipe.get("adv_estimator", "grpo")
    if recipe.get(f"{path}.method") == "asym_clip":
        recipe.put(f"{path}.method", "mean_std")
        recipe.note(
            f"{path}.method", "asym_clip is read as mean_std, without its bounds; advantage_clip bounds the result"
        )
    given = recipe.get(path)
    if estimator not in ("grpo", "reinforce") or not isinstance(given, dict):
        return
    types = METHODS.get(given.get("method", ""), given) if isinstance(given.get("method", ""), str) else given
    mean, std = types.get("norm_mean_type"), types.get("norm_std_type")
    if any(kind not in (None, "batch", "group") for kind in (mean, std)):
        return  # conversion reports it
    recipe.take(path)
    grouping = given.get("grouping", "batch")
    if estimator == "grpo" and grouping == "traj_group_id" and mean == "group" and std in ("group", None):
        recipe.put_new("grpo_norm_by_std", std == "group")
        recipe.note(path, f"describes grpo, with grpo_norm_by_std: {shown(std == 'group')}")
        return
    if grouping != "traj_group_id":
        group = "tag" if grouping == "tags" else "batch"
        mean, std = (group if kind == "group" else kind for kind in (mean, std))
    recipe.put("adv_estimator", "reinforce")
    recipe.put_new("norm_mean_type", mean)
    recipe.put_new("norm_std_type", std)
    name = f"{estimator} with these keys" if estimator == "grpo" else "it"
    recipe.note(path, f"{name} is read as adv_estimator: reinforce, norm_mean_type: {mean}, norm_std_type: {std}")


SAMPLE_WEIGHTS = {
    "difficulty_loss_weight": "weights a prompt by the mean score of its samples, not by the column difficulty of the "
    "data",
    "length_loss_weight": "compares the lengths of the whole batch, not those of a micro-batch",
}
"""Weight of samples -> what it does differently in ROLL."""


def read_sample_weights(recipe: Recipe) -> None:
    for key, difference in SAMPLE_WEIGHTS.items():
        if recipe.get(key) is True:
            recipe.note(key, difference)

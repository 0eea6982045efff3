"""Keys of asynchronous systems: the block `async_training` of one, and the buffer of an off-policy trainer."""

from __future__ import annotations

from collections.abc import Sequence

from roll.base.errors import Problem
from roll.base.schema import Tree
from roll.compat.recipe import Recipe, shown
from roll.compat.rules import Table

RATIO, MAX_STALENESS = "async_generation_ratio", "async_training.max_staleness_allowed"

WEIGHT_SWITCH, WEIGHT_RANGE = "importance_sampling", "is_clip_range"
"""`importance_sampling: true` with `is_clip_range: [lower, upper]` is read as clamped token weights."""

BLOCK, KIND = "trainer.async", "trainer.type"
"""The section that may hold the keys of the buffer, and the key that turns it on."""

BUFFER_KEYS = {
    "rollout_gpu_ids": "actor_infer.device_mapping",
    "train_gpu_ids": "actor_train.device_mapping",
    "buffer_size": RATIO,
    "max_staleness": MAX_STALENESS,
}
"""Keys of the buffer, at the top level or in the section."""

TIMES = "sync_timeout sync_retry_delay generation_timeout batch_timeout batch_deadline batch_generation_interval"
"""Keys whose names here end with their unit."""

ASYNC = Table(
    rename={name: f"{name}_s" for name in TIMES.split()},
    move={
        "async_training.generation_timeout": "actor_infer.generation_timeout_s",
        "async_training.max_sync_retries": "max_sync_retries",
        "async_training.sync_timeout": "sync_timeout_s",
        "async_training.sync_retry_delay": "sync_retry_delay_s",
        **BUFFER_KEYS,
        **{f"{BLOCK}.{name}": ours for name, ours in BUFFER_KEYS.items()},
        **{f"{BLOCK}.{name}": name for name in (WEIGHT_SWITCH, WEIGHT_RANGE)},
    },
)


def read_trainer_type(layer: Recipe) -> None:
    """In one file or all overrides, `trainer.type: sync` turns off the section `trainer.async`."""
    kind = layer.get(KIND)
    if kind not in (None, "async", "sync"):
        layer.refuse(KIND, kind, "async or sync")
    elif kind == "sync" and layer.has(RATIO):
        layer.two_spellings(KIND, RATIO)
    elif kind == "sync":
        layer.note(KIND, f"sync is read as {RATIO}: 0")
        if layer.get(BLOCK) is not None:
            layer.drop(BLOCK, f"{KIND} is sync")
        layer.put(RATIO, 0)


def read_buffer_size(recipe: Recipe, notes: Sequence[Problem]) -> None:
    """Takes `trainer.type`; the smaller of `buffer_size` and `max_staleness` bounds generation.

    In those frameworks the buffer may admit samples that are too stale to use. In this project admission obeys the
    staleness limit, so no sample is. `notes` are remarks on the keys that were read so far.
    """
    kind, ratio, allowed = recipe.take(KIND), recipe.get(RATIO), recipe.get(MAX_STALENESS)
    spelling = next((note.path for note in notes if ASYNC.move.get(note.path) == MAX_STALENESS), None)
    if kind == "async" and ratio is None:
        recipe.error(KIND, f"async needs the batches that generation may run ahead: set {BLOCK}.buffer_size, such as 1")
    elif kind == "async" and ratio == 0:
        recipe.note(KIND, f"async has no effect: {RATIO} is 0, so training is synchronous")
    elif kind == "async":
        recipe.note(KIND, f"async is read as {RATIO}: {ratio}")
    if spelling is not None and _is_number(ratio) and _is_number(allowed) and ratio > allowed:
        recipe.put(RATIO, allowed)
        smaller = f"the smaller applies: {RATIO}: {allowed}"
        recipe.note(spelling, f"{allowed} is less than the {ratio} batches of buffer_size; {smaller}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_importance_sampling(recipe: Recipe) -> None:
    """Reads `importance_sampling` and its range as `correction.weights`, whose default bounds apply without a range."""
    given = recipe.has(WEIGHT_SWITCH), recipe.has(WEIGHT_RANGE)
    switch, bounds = recipe.take(WEIGHT_SWITCH, False), recipe.take(WEIGHT_RANGE, [0, 1])
    if not any(given):
        return
    numbers = isinstance(bounds, list) and all(type(item) in (int, float) for item in bounds)
    if not isinstance(switch, bool):
        recipe.error(WEIGHT_SWITCH, f"{switch!r} is not true or false; use true")
    elif given[0] and "weights" in recipe.section("correction"):
        recipe.two_spellings(WEIGHT_SWITCH, "correction.weights")
    elif not switch and given[1]:
        recipe.error(WEIGHT_RANGE, f"has no effect without {WEIGHT_SWITCH}: true")
    elif not switch:
        recipe.note(WEIGHT_SWITCH, "false is the default and does not change correction.weights")
    elif not numbers or len(bounds) != 2:
        recipe.refuse(WEIGHT_RANGE, bounds, "a lower and an upper bound; write [0.5, 2.0]")
    else:
        weights: Tree = {"level": "token", "mode": "clamp"}
        if given[1]:
            weights["lower"], weights["upper"] = bounds
        recipe.put("correction.weights", weights)
        for key in (WEIGHT_SWITCH, WEIGHT_RANGE)[: 1 + given[1]]:
            recipe.note(key, f"is read as correction.weights {shown(weights)}")

"""Keys of asynchronous systems: the block `async_training` of one, and the buffer of an off-policy trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from roll.base.errors import ConfigError, Problem
from roll.base.schema import value_at
from roll.configs.compat import Tree, set_at, two_spellings, without
from roll.configs.compat.recipe import Recipe

RENAMED_KEYS = {
    "sync_timeout": "sync_timeout_s",
    "sync_retry_delay": "sync_retry_delay_s",
    "generation_timeout": "generation_timeout_s",
    "batch_timeout": "batch_timeout_s",
    "batch_deadline": "batch_deadline_s",
    "batch_generation_interval": "batch_generation_interval_s",
}

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

MOVED_KEYS = {
    "async_training.generation_timeout": "actor_infer.generation_timeout_s",
    "async_training.max_sync_retries": "max_sync_retries",
    "async_training.sync_timeout": "sync_timeout_s",
    "async_training.sync_retry_delay": "sync_retry_delay_s",
    **BUFFER_KEYS,
    **{f"{BLOCK}.{name}": ours for name, ours in BUFFER_KEYS.items()},
    **{f"{BLOCK}.{name}": name for name in (WEIGHT_SWITCH, WEIGHT_RANGE)},
}


def read_trainer_type(tree: Mapping[str, object], source: str, notes: list[Problem]) -> Tree:
    """One file or all overrides, where `trainer.type: sync` turns off the section `trainer.async`.

    Raises:
        ConfigError: the type is neither async nor sync, or the ratio is given too.
    """
    read, kind = dict(tree), value_at(dict(tree), KIND)
    if kind not in (None, "async", "sync"):
        raise ConfigError([Problem(KIND, f"{kind!r} is not async or sync")], source)
    if kind != "sync":
        return read
    if RATIO in read:
        raise ConfigError([two_spellings(KIND, RATIO)], source)
    notes.append(Problem(KIND, f"sync is read as {RATIO}: 0"))
    if value_at(read, BLOCK) is not None:
        notes.append(Problem(BLOCK, f"has no effect: {KIND} is sync"))
        read = without(read, BLOCK)
    return set_at(read, RATIO, 0)


def read_buffer_size(recipe: Recipe, notes: Sequence[Problem]) -> None:
    """Takes `trainer.type`; the smaller of `buffer_size` and `max_staleness` bounds generation.

    In those frameworks the buffer may admit samples that are too stale to use. In this project admission obeys the
    staleness limit, so no sample is. `notes` are remarks on the keys that were read so far.
    """
    kind, ratio, allowed = recipe.take(KIND), recipe.get(RATIO), recipe.get(MAX_STALENESS)
    spelling = next((note.path for note in notes if MOVED_KEYS.get(note.path) == MAX_STALENESS), None)
    if kind == "async" and ratio is None:
        message = f"async needs the batches that generation may run ahead: set {BLOCK}.buffer_size, such as 1"
        recipe.problems.append(Problem(KIND, message))
    elif kind == "async" and ratio == 0:
        recipe.note(KIND, f"async has no effect: {RATIO} is 0, so training is synchronous")
    elif spelling is not None and _is_number(ratio) and _is_number(allowed) and ratio > allowed:
        recipe.put(RATIO, allowed)
        message = f"{allowed} is less than the {ratio} batches of buffer_size; the smaller applies: {RATIO}: {allowed}"
        recipe.note(spelling, message)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

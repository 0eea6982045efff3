"""Reads files of verl: the devices of its pools, its numbers of prompts, and its switches."""

from __future__ import annotations

from math import prod
from pathlib import PurePath
from typing import Any

from roll.compat.recipe import NO_COUNT, Recipe, is_count, shown
from roll.compat.systems.fsdp import read_ulysses
from roll.compat.systems.verl import ACTOR, ROLLOUT
from roll.configs.devices.parallel_layout import parse_device_mapping, spans
from roll.configs.user_code import names_code

POOLS = {"trainer": "actor_train", "rollout": "actor_infer"}
"""Section with `nnodes` and `n_gpus_per_node` -> the role that owns these devices."""

COUNTS = {"nnodes": 1, "n_gpus_per_node": 8}
"""Keys of a pool and verl's defaults."""

DEVICES_PER_NODE = 8
"""Devices of a node that two pools may share, where `num_devices_per_node` does not say it."""

INTERVALS = ("save_steps", "eval_steps", "actor_train.training_args.warmup_steps", "critic.training_args.warmup_steps")
"""Keys whose negative values mean never, or none, in verl."""

OF_ACTOR = ("ulysses_sequence_parallel_size", "ppo_mini_batch_size", "ppo_max_token_len_per_gpu")
"""Keys of verl's actor, and of its critic, in the order in which they are read."""

REWARD_FUNCTIONS = ("custom_reward_function", "reward.custom_reward_function")

OVERLONG_BUFFERS = (
    "reward_model.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward.reward_kwargs.overlong_buffer_cfg",
)


def place_pools(recipe: Recipe, pipeline: str) -> None:
    """Reads the numbers of nodes and devices of the pools as device mappings.

    Training has the first devices of its nodes. Generation has the next ones of the same nodes if a node holds both
    pools, else nodes of its own. Without `rollout`, both roles share the devices of `trainer`. `pipeline: sft` has no
    generation. A device mapping of the command line replaces the numbers of its pool.
    """
    node = recipe.get("num_devices_per_node")
    sizes = _pool_sizes(recipe, node)
    if not sizes:
        return
    (nodes, devices), (other_nodes, others) = sizes["trainer"], sizes.get("rollout", (0, 0))
    together = devices + others <= (node or DEVICES_PER_NODE)
    per_node = node or (devices + others if together else max(devices, others))
    start = devices if together else nodes * per_node
    training = [n * per_node + device for n in range(nodes) for device in range(devices)]
    generation = [start + n * per_node + device for n in range(other_nodes) for device in range(others)]
    scored = recipe.get("use_kl_loss") or recipe.get("add_token_level_kl")
    used = {"actor_infer": pipeline != "sft", "reference": scored, "critic": recipe.get("adv_estimator") == "gae"}
    for role in ("actor_train", *(role for role, is_used in used.items() if is_used)):
        pool = "rollout" if role == "actor_infer" and generation else "trainer"
        path, where = f"{role}.device_mapping", f"{pool}.n_gpus_per_node"
        numbers, mapping = f"{sizes[pool][0]} x {sizes[pool][1]} devices", generation if pool == "rollout" else training
        if recipe.get(path) is None:
            recipe.put(path, mapping)
            recipe.note(where, f"{numbers} are read as {path}: {spans(mapping)}")
        elif path in recipe.overridden:
            recipe.note(where, f"{numbers} have no effect: {path} is given")
        elif POOLS[pool] == role:
            recipe.two_spellings(where, path)
    if node is None:
        recipe.put("num_devices_per_node", per_node)
        hint = "" if together or not others else "; if one node holds both pools, set it to its number of devices"
        recipe.note("num_devices_per_node", f"is not given: {per_node} is assumed{hint}")


def _pool_sizes(recipe: Recipe, node: int | None) -> dict[str, tuple[int, int]]:
    """Takes the nodes of each pool and its devices on a node; none where there are none, or they are refused."""
    paths = [f"{pool}.{key}" for pool in POOLS for key in COUNTS]
    values = {path: value for path in paths if (value := recipe.take(path)) is not None}
    if values.get("rollout.nnodes") == 0:  # colocated
        recipe.note("rollout.nnodes", "has no effect: there is no pool of its own")
        values = {path: value for path, value in values.items() if path.startswith("trainer.")}
    wrong = [path for path, value in values.items() if not is_count(value)]
    for path in wrong:
        recipe.refuse(path, values[path], NO_COUNT)
    if not values or wrong or not is_count(node or 1):  # conversion reports the latter
        return {}
    sizes = {
        pool: (values.get(f"{pool}.nnodes", COUNTS["nnodes"]), values.get(f"{pool}.n_gpus_per_node", DEVICES_PER_NODE))
        for pool in POOLS
        if any(path.startswith(f"{pool}.") for path in values)
    }
    if "trainer" not in sizes:
        missing = "needs trainer.nnodes and trainer.n_gpus_per_node too; or write actor_infer.device_mapping"
        recipe.error(next(iter(values)), missing)
        return {}
    for pool, (_, devices) in sizes.items():
        if node is not None and devices > node:
            message = f"{devices} devices are more than num_devices_per_node {node}; use at most that"
            recipe.error(f"{pool}.n_gpus_per_node", message)
            return {}
    return sizes


def read_verl_file(recipe: Recipe) -> None:
    """Converts the keys of verl that need other keys of the file: its switches, and its numbers of prompts."""
    _read_switches(recipe)
    _read_overlong_buffer(recipe)
    _read_reward_function(recipe)
    ulysses, actor, limit = (_given(recipe, name, f"{ACTOR}.", "actor.", "") for name in OF_ACTOR)
    for role, path in (("actor_train", ulysses), ("critic", f"critic.{OF_ACTOR[0]}")):
        read_ulysses(recipe, role, path)  # first: the data-parallel ranks of a mini-batch depend on it
    _read_updates(recipe, actor)
    for role, path in (("actor_train", actor), ("critic", f"critic.{OF_ACTOR[1]}")):
        prompts = recipe.take_count(path)
        if prompts is not None:
            _read_mini_batch(recipe, role, path, prompts)
    for role, path in (("actor_train", limit), ("critic", f"critic.{OF_ACTOR[2]}")):
        _read_token_limit(recipe, role, path)
    if recipe.has("max_steps"):
        for path in ("trainer.total_epochs", "rollout.total_epochs"):
            recipe.drop(path, f"max_steps is {recipe.get('max_steps')}")


def _read_token_limit(recipe: Recipe, role: str, path: str) -> None:
    """The tokens of a micro-batch, of which verl counts those of one context rank."""
    tokens = recipe.take_count(path)
    size = recipe.get(f"{role}.strategy_args.strategy_config.context_parallel_size", 1)
    if tokens is not None and is_count(size):
        how = f", that is {tokens} x context_parallel_size {size}" if size > 1 else ""
        _put(recipe, path, f"{role}.max_tokens_per_microbatch_in_train", tokens * size, how)


def _read_switches(recipe: Recipe) -> None:
    for path in INTERVALS:
        steps = recipe.get(path)
        if isinstance(steps, int) and steps < 0:
            recipe.put(path, 0)
            recipe.note(path, f"{steps} is read as 0")
    trackers = recipe.get("track_with")
    if isinstance(trackers, list) and "console" in trackers:
        recipe.put("track_with", ["stdout" if name == "console" else name for name in trackers])
        recipe.note("track_with", "console is read as stdout")
    project = recipe.take("trainer.project_name")
    if project is not None and isinstance(trackers, list) and "wandb" in trackers:
        recipe.put_new("tracker_kwargs.wandb.project", project)
    mode, folder = recipe.take("trainer.resume_mode"), recipe.take("trainer.resume_from_path")
    if isinstance(mode, str):
        resumed = {"auto": True, "disable": False, "resume_path": folder}.get(mode, mode)
        _put(recipe, "trainer.resume_mode", "resume_from_checkpoint", resumed)
    clip = recipe.take(f"{ACTOR}.clip_ratio")
    for ours in ("pg_clip_low", "pg_clip_high"):
        if clip is not None and recipe.put_new(ours, clip):
            recipe.note(f"{ACTOR}.clip_ratio", f"is read as {ours}")
    dual_clip = recipe.take(f"{ACTOR}.clip_ratio_c")
    if dual_clip is not None and recipe.put_new("dual_clip_loss", True):
        _put(recipe, f"{ACTOR}.clip_ratio_c", "dual_clip_c", dual_clip, " with dual_clip_loss: true")
    if recipe.take(f"{ROLLOUT}.val_kwargs.do_sample") is False:
        recipe.put("validation.generating_args.temperature", 0)


def _read_overlong_buffer(recipe: Recipe) -> None:
    for path in OVERLONG_BUFFERS:
        buffer = recipe.take(path)
        if isinstance(buffer, dict) and buffer.get("enable", True) and buffer.get("len"):
            _put(recipe, f"{path}.len", "overlong_buffer_len", buffer["len"])
            _put(recipe, f"{path}.penalty_factor", "overlong_penalty_factor", buffer.get("penalty_factor", 1.0))


def _read_reward_function(recipe: Recipe) -> None:
    """A function in a file, which verl calls for every sample, as the reward of all tags."""
    for section in REWARD_FUNCTIONS:
        path, name = recipe.take(f"{section}.path"), recipe.take(f"{section}.name") or "compute_score"
        if path is None:
            continue
        file = PurePath(str(path))
        code = f"{'.'.join(file.with_suffix('').parts)}:{name}"
        if file.suffix != ".py" or not names_code(code):
            expected = "a Python file below the current folder or that of the recipe, such as rewards/mine.py; copy it"
            recipe.refuse(f"{section}.path", path, expected)
        elif recipe.has("rewards"):
            recipe.two_spellings(f"{section}.path", "rewards")
        else:
            _put(recipe, f"{section}.path", "rewards.custom.function", code)


def _read_updates(recipe: Recipe, mini_batch: str) -> None:
    """The counts of verl's fully asynchronous trainer, which sends weights after several optimizer steps.

    Between two updates it takes ppo_mini_batch_size x require_batches x trigger_parameter_sync_step prompts, and
    generation may be ahead of that by the share `staleness_threshold` of them, which is `async_generation_ratio` here.
    `mini_batch` is the path of ppo_mini_batch_size.
    """
    names = ("require_batches", "trigger_parameter_sync_step")
    batches, syncs, partial = (_given(recipe, name, "async_training.", "") for name in (*names, "partial_rollout"))
    total = _given(recipe, "total_rollout_steps", "rollout.", "")
    if any(map(recipe.has, (batches, syncs, total))):
        counts = [recipe.get(mini_batch), recipe.take_count(batches) or 1, recipe.take_count(syncs) or 4]
        if not is_count(counts[0]):
            recipe.refuse(mini_batch, counts[0], f"the prompts of an optimizer step; {' and '.join(names)} need them")
            return
        if recipe.get("rollout_batch_size") == 0:
            recipe.take("rollout_batch_size")
        prompts, numbers = prod(counts), " x ".join(map(str, counts))
        how = f", that is {numbers} (ppo_mini_batch_size x {' x '.join(names)})"
        _put(recipe, batches, "rollout_batch_size", prompts, how)
        generated = recipe.take_count(total)
        if generated is not None:
            how = f", that is {generated} prompts / {prompts} of an update, rounded down"
            _put(recipe, total, "max_steps", generated // prompts, how)
        share = recipe.take("async_training.staleness_threshold")
        if share is not None:
            how = ", the share of an update's prompts that generation may be ahead"
            _put(recipe, "async_training.staleness_threshold", "async_generation_ratio", share, how)
    if not recipe.get("async_generation_ratio"):
        recipe.drop(partial, "no request runs during a weight update")
    elif recipe.has(partial):
        _put(recipe, partial, "in_flight_policy", "abort_resume" if recipe.take_switch(partial) else "drain")


def _read_mini_batch(recipe: Recipe, role: str, path: str, prompts: int) -> None:
    """Sets the samples of an optimizer step; in verl each data-parallel rank has its share of them, rounded down."""
    options = recipe.section(f"{role}.strategy_args.strategy_config")
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    sizes = [options.get(name, 1) for name in names]
    group = recipe.get("num_return_sequences_in_group", 1)
    micro_batch = recipe.get(f"{role}.training_args.per_device_train_batch_size", 1)
    if not all(map(is_count, (*sizes, group, micro_batch))):
        return  # conversion reports it
    try:
        devices = parse_device_mapping(recipe.get(f"{role}.device_mapping", recipe.get("actor_train.device_mapping")))
    except ValueError:
        return  # conversion reports it
    ranks = max(1, len(devices) // prod(sizes))
    steps, rest = divmod(prompts * group // ranks, micro_batch)
    how = f"{prompts} prompts x {group} responses / {ranks} data-parallel ranks"
    if rest or not steps:
        expected = f"a multiple of per_device_train_batch_size {micro_batch} on each rank: it is {how}"
        recipe.refuse(path, prompts, expected)
        return
    ours = f"{role}.training_args.gradient_accumulation_steps"
    _put(recipe, path, ours, steps, f", that is {how} / {micro_batch} of a micro-batch, rounded down")


def _given(recipe: Recipe, name: str, *sections: str) -> str:
    return next((f"{section}{name}" for section in sections if recipe.has(f"{section}{name}")), f"{sections[0]}{name}")


def _put(recipe: Recipe, path: str, ours: str, value: Any, how: str = "") -> None:
    """Sets the key that `path` stands for; one of the command line wins, and one of the file has to be the same."""
    if recipe.has(ours) and ours in recipe.overridden:
        recipe.note(path, f"has no effect: {ours} is given")
    elif recipe.get(ours, value) != value:
        recipe.two_spellings(path, ours)
    else:
        recipe.put(ours, value)
        recipe.note(path, f"is read as {ours}: {shown(value)}{how}")

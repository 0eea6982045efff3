"""Reads what recipes of ROLL write differently: roles, devices, data, estimators and losses.

Keys that only have another name are in the tables of `roll.configs.compat.roll`. Every function here takes the keys it
reads from the recipe, puts ours, and leaves one remark on each change. A key of ours that is given as well wins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

from roll.configs.agentic import ADJUSTMENTS, METHODS
from roll.configs.compat.recipe import Recipe
from roll.configs.parallel_layout import parse_device_mapping, spans
from roll.configs.pipeline import BaseConfig
from roll.configs.policy import traits_of
from roll.configs.schema import SECTION, keys_along

MARKS = ("hydra", "reward_pretrain", "value_clip", "checkpoint_config", "custom_env", "render_save_dir", "sft_train")
"""Top-level keys of which every complete recipe of ROLL has one."""

FORWARD_ENGINES = ("hf_infer", "deepspeed_infer", "fsdp2_infer", "fsdp_infer", "vllm", "sglang")
"""Engines that a reference may have there."""

PG_CLIP = 0.2
"""`pg_clip` where a recipe does not set it."""

INIT_KL_COEF = 0.2
"""`init_kl_coef` where a recipe does not set it."""


def is_roll_recipe(recipe: Recipe) -> bool:
    """Whether a file is written for ROLL, by keys that nothing else has."""
    engine = recipe.get("actor_infer.strategy_args.strategy_name")
    workers = any(isinstance(value, dict) and "worker_cls" in value for value in recipe.tree.values())
    return workers or engine == "vllm" or any(recipe.has(mark) for mark in MARKS)


READ_KEYS = (
    "global_template",
    "dataset_dir",
    "eval_steps",
    "enable_old_logprobs_recompute",
    "force_disable_old_logprobs_recompute",
    "use_pg_clip_range",
    "pg_clip",
    "train_infer_correction",
    "reward_norm",
    "reward_shift",
    "reward_scale",
)
"""Keys that only ROLL has and that are read here; the tables have the others."""


def read_roll_keys(recipe: Recipe) -> None:
    """Translates READ_KEYS, in any file."""
    for read in (_read_data, _read_old_log_probs, _read_clipping, _read_correction, _read_normalization):
        read(recipe)


def drop_nulls(recipe: Recipe, root: type, path: str = "") -> None:
    """Takes keys that are null where null is no value here: such a key is not given."""
    for name, value in list((recipe.section(path) if path else recipe.tree).items()):
        where = f"{path}.{name}" if path else str(name)
        keys = keys_along(root, where)
        if not keys or len(keys) < len(where.split(".")):
            continue
        if value is None and type(None) not in get_args(keys[-1][1].hint):
            recipe.take(where)
        elif isinstance(value, dict):
            drop_nulls(recipe, root, where)


def read_roll_recipe(recipe: Recipe, pipeline: str) -> None:
    """Translates what keys of the same name mean in a recipe of ROLL, after its own keys."""
    readers: list[Callable[[Recipe], None]] = [
        _read_reference,
        _read_sequence_parallel,
        _read_precision,
        _read_moot_keys,
        _read_devices,
        _read_trackers,
        _read_intervals,
        _read_kl,
        _read_dual_clip,
    ]
    if pipeline == "agentic":
        readers += [_read_agentic_lengths, _read_adjustment, _read_reward_normalization]
    else:
        readers += [_read_validation]
    if pipeline == "rlvr":
        readers += [_read_sampling]
    if pipeline == "sft":
        readers += [_read_epochs]
    for read in readers:
        read(recipe)


# Roles


def _read_reference(recipe: Recipe) -> None:
    path = "reference.strategy_args"
    name = recipe.get(f"{path}.strategy_name")
    if name in FORWARD_ENGINES:
        recipe.put(path, {"strategy_name": "megatron_infer"})
        recipe.note(f"{path}.strategy_name", f"{name} is read as megatron_infer, without its strategy_config")


def _read_sequence_parallel(recipe: Recipe) -> None:
    """Without tensor parallelism there is nothing to split, and Megatron turns it off."""
    for role in ("actor_train", "reference"):
        path = f"{role}.strategy_args.strategy_config"
        if recipe.get(f"{path}.sequence_parallel") and recipe.get(f"{path}.tensor_model_parallel_size", 1) == 1:
            recipe.drop(f"{path}.sequence_parallel", "tensor_model_parallel_size is 1")


def _read_precision(recipe: Recipe) -> None:
    """Megatron in fp16 is read as bf16; engines follow the policy, so that log-probs agree."""
    if _dtype(recipe, "actor_train") != "fp16":
        if _dtype(recipe, "reference") == "fp16":
            recipe.put("reference.model_args.dtype", "bf16")
            recipe.note("reference.model_args.dtype", "fp16 is read as bf16, which needs no loss scaling")
        return
    roles = [name for name in ("actor_train", "actor_infer", "reference") if _dtype(recipe, name) == "fp16"]
    for role in roles:
        recipe.put(f"{role}.model_args.dtype", "bf16")
    recipe.note(
        "actor_train.model_args.dtype", f"fp16 is read as bf16, which needs no loss scaling, in {', '.join(roles)}"
    )


def _read_moot_keys(recipe: Recipe) -> None:
    """Keys that have no effect there either, because of another key."""
    if recipe.get("actor_train.training_args.warmup_steps"):
        recipe.drop("actor_train.training_args.warmup_ratio", "warmup_steps is given")
    for role in ("actor_train", "reference"):
        recomputes = recipe.get(f"{role}.strategy_args.strategy_config.recompute_granularity") is not None
        if recomputes and recipe.get(f"{role}.model_args.disable_gradient_checkpointing") is True:
            recipe.drop(f"{role}.model_args.disable_gradient_checkpointing", "recompute_granularity is given")
    for role in ("actor_infer", "reference"):
        if recipe.get(f"{role}.pg_variant") in (None, recipe.get("actor_train.pg_variant")):
            recipe.drop(f"{role}.pg_variant", "only actor_train has a policy loss")
    if recipe.get("is_num_return_sequences_expand") is False:
        recipe.drop("is_num_return_sequences_expand", "each sample is a request with its own seed")


def _dtype(recipe: Recipe, role: str) -> Any:
    return recipe.get(f"{role}.model_args.dtype")


def _read_devices(recipe: Recipe) -> None:
    """Roles that share some of their devices there share all or none here."""
    devices = {role: _devices(recipe, role) for role in ("actor_train", "actor_infer", "reference")}
    train, infer, reference = devices["actor_train"], devices["actor_infer"], devices["reference"]
    if not train:
        return
    if _overlap_in_part(train, infer):
        rest = [rank for rank in infer if rank not in train]
        ratio = recipe.get("async_generation_ratio", 0)
        separate = bool(rest) and isinstance(ratio, int | float) and ratio > 0
        size = recipe.get("actor_infer.num_gpus_per_worker", 1)
        if separate and isinstance(size, int) and size > 0 and len(rest) % size == 0:
            _move(recipe, "actor_infer", infer, rest, train)
        else:
            _move(recipe, "actor_infer", infer, train, train)
    infer = _devices(recipe, "actor_infer")
    if _overlap_in_part(train, reference) or _overlap_in_part(infer, reference):
        _move(recipe, "reference", reference, train, train)


def _devices(recipe: Recipe, role: str) -> list[int]:
    """The devices of a role; none where they are not given or wrong, which conversion reports."""
    try:
        parsed = parse_device_mapping(recipe.get(f"{role}.device_mapping", []))
    except ValueError:
        return []
    return parsed if isinstance(parsed, list) and all(type(rank) is int for rank in parsed) else []


def _overlap_in_part(one: list[int], other: list[int]) -> bool:
    return bool(set(one) & set(other)) and one != other


def _move(recipe: Recipe, role: str, before: list[int], after: list[int], train: list[int]) -> None:
    recipe.put(f"{role}.device_mapping", after)
    way = "shares all of them" if after == train else "gets the others"
    recipe.note(
        f"{role}.device_mapping",
        f"{spans(before)} overlaps actor_train's {spans(train)} in part; roles share all their devices or none, so "
        f"{role} {way}: {spans(after)}",
    )


# Trackers

UNAVAILABLE_TRACKERS = ("trackio", "ml_tracker", "none")
"""Values of `track_with` in ROLL without a counterpart here."""


def _read_trackers(recipe: Recipe) -> None:
    """Drops trackers that are not available; `nest_tracker_kwargs` reads the options of the others."""
    given = recipe.get("track_with", ["tensorboard"])
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list):
        return
    absent = [name for name in names if name in UNAVAILABLE_TRACKERS]
    kept = [name for name in names if name not in absent]
    if absent:
        recipe.put("track_with", kept)
        recipe.note("track_with", f"{', '.join(absent)} is not available: metrics.jsonl has every step")
        if not set(kept) - {"stdout"}:
            recipe.drop("tracker_kwargs", f"it has options of {', '.join(absent)}")


# Data


def _read_data(recipe: Recipe) -> None:
    _read_eval_steps(recipe)
    train = "actor_train.data_args"
    template = recipe.get("global_template")
    if template is not None and not recipe.has(f"{train}.template"):
        recipe.take("global_template")
        recipe.put(f"{train}.template", template)
        recipe.note("global_template", f"is read as {train}.template")
    else:
        recipe.drop("global_template", f"{train}.template is given")
    for role in ("actor_train", "validation"):
        _read_folder(recipe, f"{role}.data_args")


def _read_eval_steps(recipe: Recipe) -> None:
    steps = recipe.take("validation.eval_steps")
    if steps is None:
        return
    if recipe.put_new("eval_steps", steps):
        recipe.note("validation.eval_steps", "is read as eval_steps")
    elif recipe.get("eval_steps") != steps:
        recipe.note("validation.eval_steps", f"{steps} has no effect: eval_steps is {recipe.get('eval_steps')}")


def _read_folder(recipe: Recipe, path: str) -> None:
    """Joins relative names of `file_name` to `dataset_dir`, unless they begin with it or come from the command line."""
    folder, names = recipe.take(f"{path}.dataset_dir"), recipe.get(f"{path}.file_name")
    if not isinstance(folder, str) or f"{path}.file_name" in recipe.overridden:
        return
    prefix = folder.rstrip("/").removeprefix("./")
    if prefix in ("", "."):
        return

    def joined(name: Any) -> Any:
        relative = isinstance(name, str) and not name.startswith("/")
        inside = relative and name.removeprefix("./").startswith(f"{prefix}/")
        return f"{folder.rstrip('/')}/{name.removeprefix('./')}" if relative and not inside else name

    if isinstance(names, str | list):
        files = [joined(name) for name in ([names] if isinstance(names, str) else names)]
        if files != ([names] if isinstance(names, str) else names):
            recipe.put(f"{path}.file_name", files)
            recipe.note(
                f"{path}.dataset_dir", f"is the folder of relative names in file_name: {', '.join(map(str, files))}"
            )


def _read_intervals(recipe: Recipe) -> None:
    """A negative number of steps is never, which is 0 here."""
    for key in ("eval_steps", "save_steps"):
        steps = recipe.get(key)
        if isinstance(steps, int) and steps < 0:
            recipe.put(key, 0)
            recipe.note(key, f"{steps} is read as 0")


def _read_epochs(recipe: Recipe) -> None:
    if recipe.has("actor_train.training_args.num_train_epochs") and not recipe.has("max_steps"):
        steps = BaseConfig.max_steps
        recipe.note("max_steps", f"is not given, so the run has {steps} steps; write the steps of the epochs you want")


def _read_validation(recipe: Recipe) -> None:
    """Without files nothing is validated there, whatever `eval_steps` says."""
    if recipe.get("eval_steps") and not recipe.get("validation.data_args.file_name"):
        recipe.drop("eval_steps", "validation has no files")


# Lengths


def _read_sampling(recipe: Recipe) -> None:
    """Lengths and samples of a request follow from the pipeline's keys there, whatever generating_args says."""
    group, samples = recipe.get("num_return_sequences_in_group", 1), "actor_infer.generating_args.num_return_sequences"
    if recipe.get(samples) not in (None, group):
        recipe.drop(samples, f"num_return_sequences_in_group is {group}")
    response = recipe.get("response_length")
    for role in ("actor_infer", "validation"):
        path = f"{role}.generating_args.max_new_tokens"
        longest = recipe.get(path)
        if isinstance(longest, int) and isinstance(response, int) and longest > response:
            recipe.drop(path, f"responses end at response_length {response}")
    prompt, sequence = recipe.get("prompt_length"), recipe.get("sequence_length")
    if isinstance(response, int) and isinstance(prompt, int) and sequence not in (None, prompt + response):
        recipe.drop("sequence_length", f"it is prompt_length + response_length = {prompt + response}")


def _read_agentic_lengths(recipe: Recipe) -> None:
    """A trajectory has one length, `sequence_length`."""
    lengths = [recipe.get("prompt_length"), recipe.get("response_length")]
    if not recipe.has("sequence_length") and all(isinstance(length, int) for length in lengths):
        recipe.put("sequence_length", sum(length for length in lengths if isinstance(length, int)))
    if recipe.has("sequence_length"):
        for key in ("prompt_length", "response_length"):
            recipe.drop(key, "a trajectory has several turns; sequence_length is the length of all of it")


def _read_adjustment(recipe: Recipe) -> None:
    for manager in ("train_env_manager", "val_env_manager"):
        if recipe.get(f"{manager}.max_traj_per_env", -1) != -1:
            recipe.drop(f"{manager}.max_traj_per_env", "environments run as many trajectories as batches need")
    mode = recipe.get("batch_adjust_mode")
    if isinstance(mode, str) and mode in ADJUSTMENTS:
        recipe.take("batch_adjust_mode")
        recipe.note(
            "batch_adjust_mode", f"{mode} is read as pad: {ADJUSTMENTS[mode]}, so samples without a loss fill a batch"
        )


# The policy loss


def _read_old_log_probs(recipe: Recipe) -> None:
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


def _read_kl(recipe: Recipe) -> None:
    """A term without a weight is off there; by default that in the reward is k1 times 0.2. The KL of a loss is k3."""
    if recipe.get("use_kl_loss") and not recipe.get("kl_loss_coef"):
        recipe.drop("use_kl_loss", "kl_loss_coef is 0")
    if recipe.get("add_token_level_kl"):
        weight = recipe.get("init_kl_coef", INIT_KL_COEF)
        if weight == 0:
            recipe.drop("add_token_level_kl", "init_kl_coef is 0")
        elif recipe.put_new("init_kl_coef", weight):
            recipe.note("add_token_level_kl", f"has the weight {weight:g} there: init_kl_coef is {weight:g}")
        if weight != 0 and not recipe.get("use_kl_loss") and recipe.put_new("kl_penalty", "k1"):
            recipe.note("add_token_level_kl", "is of the kind kl there: kl_penalty is k1")
    elif recipe.get("use_kl_loss") and recipe.get("kl_penalty", "k3") != "k3":
        recipe.drop("kl_penalty", "the KL of the loss is k3 there")


def _read_clipping(recipe: Recipe) -> None:
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
        _read_dual_clip(recipe, clip)


def _read_dual_clip(recipe: Recipe, clip: float = PG_CLIP) -> None:
    """The bound of `dual_clip_loss` follows from `pg_clip` there, whatever the bounds of the ratio are."""
    variant = recipe.get("actor_train.pg_variant", "ppo")
    if recipe.get("dual_clip_loss") is True and variant in ("ppo", "decoupled_ppo"):
        bound = round(1 + 2 * clip, 6)
        if recipe.put_new("dual_clip_c", bound):
            recipe.note(
                "dual_clip_loss", f"has the bound 1 + 2 pg_clip there: dual_clip_c is {bound:g}, not the default 3"
            )


def _read_sequence_ratio(recipe: Recipe, clip: float) -> None:
    """`seq` is gspo, clipped as ppo is there."""
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


WEIGHT_LEVELS = {"token": "token", "sequence": "sequence", "geometric": "geometric", "segment": "geometric"}
REJECTION_LEVELS = {
    "token": "token",
    "sequence": "sequence-sum",
    "geometric": "sequence-mean",
    "segment": "sequence-mean",
}
"""Types of weights and filters of `train_infer_correction` -> levels here."""


def _read_correction(recipe: Recipe) -> None:
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
    weight = given.get("is_weight")
    if isinstance(weight, dict) and weight.get("enabled"):
        level = _level(recipe, f"{path}.is_weight.weight_type", weight.get("weight_type", "token"), WEIGHT_LEVELS)
        upper = weight.get("upper_bound", 1.2)
        recipe.put("correction.weights", {"level": level, "mode": "clamp", "lower": 0.0, "upper": upper})
        recipe.put_new("old_log_probs_source", "recompute")
        recipe.put_new("pg_ratio_base", "proximal")
        read.append(f"is_weight as correction.weights (level {level}, upper {upper})")
    filters = given.get("filters")
    enabled = (
        [item for item in filters if isinstance(item, dict) and item.get("enabled")]
        if isinstance(filters, list)
        else []
    )
    by_ratio = next((item for item in enabled if item.get("ratio_enabled", True)), None)
    if by_ratio is not None:
        level = _level(recipe, f"{path}.filters.agg_type", by_ratio.get("agg_type", "token"), REJECTION_LEVELS)
        bounds = {"lower": by_ratio.get("ratio_low", 0.8), "upper": by_ratio.get("ratio_high", 1.2)}
        recipe.put("correction.rejection", {"statistic": "k1", "level": level, **bounds})
        read.append(
            f"the ratio of a filter as correction.rejection (level {level}, {bounds['lower']} to {bounds['upper']})"
        )
    lost = ["differences of probabilities"] * any(item.get("diff_enabled") for item in enabled)
    lost += ["further filters"] * (len(enabled) > 1)
    if read or lost:
        rest = f"; not available: {', '.join(lost)}" if lost else ""
        recipe.note(path, f"is read: {', '.join(read) or 'nothing'}{rest}")


def _level(recipe: Recipe, path: str, kind: Any, levels: Mapping[str, str]) -> str:
    if isinstance(kind, str) and kind in levels:
        return levels[kind]
    recipe.refuse(path, kind, f"one of {', '.join(levels)}")
    return "token"


# Rewards and advantages


def _read_normalization(recipe: Recipe) -> None:
    """`reward_norm`, `reward_shift` and `reward_scale` of older recipes."""
    kind = recipe.take("reward_norm")
    shift, scale = recipe.take_switch("reward_shift"), recipe.take_switch("reward_scale")
    if kind in (None, "None", "none", False):
        return
    if not isinstance(kind, str):
        recipe.refuse("reward_norm", kind, "batch, group or null")
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


def _read_reward_normalization(recipe: Recipe) -> None:
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
        recipe.note(path, f"describes grpo, with grpo_norm_by_std: {str(std == 'group').lower()}")
        return
    if grouping != "traj_group_id":
        mean, std = ("batch" if kind == "group" else kind for kind in (mean, std))
    recipe.put("adv_estimator", "reinforce")
    recipe.put_new("norm_mean_type", mean)
    recipe.put_new("norm_std_type", std)
    name = f"{estimator} with these keys" if estimator == "grpo" else "it"
    by_tag = " (over the batch, not by tag)" if grouping == "tags" and (mean or std) else ""
    recipe.note(
        path, f"{name} is read as adv_estimator: reinforce, norm_mean_type: {mean}, norm_std_type: {std}{by_tag}"
    )

"""Reads what recipes of ROLL write differently: roles, devices, trackers, data and lengths; `roll_losses` has the rest.

Keys that only have another name are in the tables of `roll.configs.compat.roll`. Every function here takes the keys it
reads from the recipe, puts ours, and leaves one remark on each change. A key of ours that is given as well wins.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, get_args

from roll.base.schema import declared, section_of
from roll.configs.agentic import ADJUSTMENTS
from roll.configs.compat.apply import PURE_OPD_KIND, STUDENT_ROLE, unsupported_key
from roll.configs.compat.recipe import Recipe
from roll.configs.compat.roll_losses import (
    read_clipping,
    read_correction,
    read_dual_clip,
    read_kl,
    read_normalization,
    read_old_log_probs,
    read_reward_normalization,
    read_sample_weights,
    read_topr,
)
from roll.configs.compat.roll_rewards import read_rewards
from roll.configs.parallel_layout import parse_device_mapping, spans
from roll.configs.pipeline import BaseConfig
from roll.configs.roles import DEVICE_ROLES

MARKS = ("hydra", "reward_pretrain", "value_clip", "checkpoint_config", "custom_env", "render_save_dir", "sft_train")
"""Top-level keys of which every complete recipe of ROLL has one."""

PACKED_ROLES = ("actor_train", "reference", "critic", "reward")
"""Roles that compute whole sequences, and so choose whether they pad them."""

FORWARD_ENGINES = ("hf_infer", "deepspeed_infer", "fsdp2_infer", "fsdp_infer", "vllm", "sglang")
"""Engines that a reference may have in ROLL."""


def is_roll_recipe(recipe: Recipe) -> bool:
    """Whether a file is written for ROLL, by keys that nothing else has."""
    engine = recipe.get("actor_infer.strategy_args.strategy_name")
    workers = any(isinstance(value, dict) and "worker_cls" in value for value in recipe.tree.values())
    return workers or engine == "vllm" or any(recipe.has(mark) for mark in MARKS)


def read_roll_keys(recipe: Recipe) -> None:
    """Translates keys that only ROLL has, in any file."""
    readers = (read_topr, _read_data, read_old_log_probs, read_clipping, read_correction, read_normalization)
    for read in (*readers, read_rewards):
        read(recipe)
    _read_distillation(recipe)
    _read_remove_padding(recipe)


def drop_nulls(recipe: Recipe, pipeline: str, section: type, path: str = "", entries: bool = False) -> None:
    """Removes keys that are null where null is not a valid value, and unknown ones: such a key counts as not given.

    Keys of `UNSUPPORTED_KEYS` stay and get a remark. `section` is the dataclass of the section at `path`, or with
    `entries` of each of its entries, which have names of the user.
    """
    for name, value in list((recipe.section(path) if path else recipe.tree).items()):
        where = f"{path}.{name}" if path else str(name)
        key = declared(section).get(name)
        if value is None and not entries:
            if type(None) not in get_args(key.hint) if key else not unsupported_key(where, pipeline):
                recipe.take(where)
        elif isinstance(value, dict):
            inner, inner_entries = (section, False) if entries else section_of(key.hint) if key else (None, False)
            if inner is not None:
                drop_nulls(recipe, pipeline, inner, where, inner_entries)


def read_roll_recipe(recipe: Recipe, pipeline: str) -> None:
    """Translates what keys of the same name mean in a recipe of ROLL, after its own keys."""
    readers: list[Callable[[Recipe], None]] = [
        _read_reference,
        _read_critic,
        _read_sequence_parallel,
        _read_precision,
        _drop_keys_without_effect,
        _read_devices,
        _read_trackers,
        read_kl,
        read_dual_clip,
        read_sample_weights,
    ]
    if pipeline == "agentic":
        readers += [_read_environments, _read_agentic_lengths, _read_adjustment, read_reward_normalization]
    else:
        readers += [_read_validation]
    if pipeline == "rlvr":
        readers += [_read_sampling]
    if pipeline in ("sft", "dpo"):
        readers += [_read_epochs, _read_prompt_length]
    if pipeline == "dpo":
        readers += [partial(_share_devices, role="reference")]
    for read in readers:
        read(recipe)


# Roles


def _read_reference(recipe: Recipe) -> None:
    path = "reference.strategy_args"
    name = recipe.get(f"{path}.strategy_name")
    if name in FORWARD_ENGINES:
        recipe.put(path, {"strategy_name": "megatron_infer"})
        recipe.note(f"{path}.strategy_name", f"{name} is read as megatron_infer, without its strategy_config")


def _read_distillation(recipe: Recipe) -> None:
    """Reads pure distillation as adv_estimator opd, also where only the roles of a student name it."""
    model = recipe.take("teacher_pretrain")
    if model is not None and recipe.put_new("reference.model_args.model_name_or_path", model):
        recipe.note("teacher_pretrain", "is read as reference.model_args.model_name_or_path")
    asked, kind = recipe.take_switch("is_pure_opd"), recipe.take(PURE_OPD_KIND)
    if asked or (asked is None and kind == STUDENT_ROLE and not recipe.get("use_opd")):
        path = "is_pure_opd" if asked else STUDENT_ROLE
        if recipe.get("adv_estimator", "opd") != "opd":
            recipe.drop("adv_estimator", f"{path} learns from the teacher alone")
        recipe.put("adv_estimator", "opd")
        recipe.note(path, "is read as adv_estimator: opd")


def _read_remove_padding(recipe: Recipe) -> None:
    """ROLL computes no padding where either of two keys is true; an override of ours decides."""
    for role in PACKED_ROLES:
        path, ours = f"{role}.use_remove_padding", f"{role}.use_sequence_packing"
        removes = recipe.take_switch(path)
        if removes is None:
            continue
        packs = recipe.get(ours)
        if packs is None or (removes and packs is False and ours not in recipe.overridden):
            recipe.put(ours, removes)
            recipe.note(path, f"is read as {ours}: {str(removes).lower()}")
        elif packs is removes:
            recipe.note(path, f"says the same as {ours}")
        else:
            recipe.note(path, f"{ours} decides")


def _read_critic(recipe: Recipe) -> None:
    """A critic belongs to gae, the default estimator of ROLL."""
    if not recipe.has("critic"):
        if recipe.get("adv_estimator") == "gae":
            _share_devices(recipe, "critic")
        return
    if recipe.put_new("adv_estimator", "gae"):
        recipe.note("critic", "is given without adv_estimator, whose default in ROLL is gae: adv_estimator is gae")
    elif recipe.get("adv_estimator") != "gae":
        recipe.drop("critic", f"adv_estimator {recipe.get('adv_estimator')} needs no critic")


def _read_sequence_parallel(recipe: Recipe) -> None:
    """Without tensor parallelism there is nothing to split, and Megatron turns it off."""
    for role in ("actor_train", "reference", "critic"):
        path = f"{role}.strategy_args.strategy_config"
        if recipe.get(f"{path}.sequence_parallel") and recipe.get(f"{path}.tensor_model_parallel_size", 1) == 1:
            recipe.drop(f"{path}.sequence_parallel", "tensor_model_parallel_size is 1")


def _read_precision(recipe: Recipe) -> None:
    """Megatron in fp16 is read as bf16; engines follow the policy, so that log-probs agree."""
    if _dtype(recipe, "actor_train") != "fp16":
        for role in ("reference", "critic"):
            if _dtype(recipe, role) == "fp16":
                recipe.put(f"{role}.model_args.dtype", "bf16")
                recipe.note(f"{role}.model_args.dtype", "fp16 is read as bf16, which needs no loss scaling")
        return
    roles = [name for name in DEVICE_ROLES if _dtype(recipe, name) == "fp16"]
    for role in roles:
        recipe.put(f"{role}.model_args.dtype", "bf16")
    recipe.note(
        "actor_train.model_args.dtype", f"fp16 is read as bf16, which needs no loss scaling, in {', '.join(roles)}"
    )


def _drop_keys_without_effect(recipe: Recipe) -> None:
    """Drops keys that have no effect in ROLL either, because of another key."""
    if recipe.get("actor_train.training_args.warmup_steps"):
        recipe.drop("actor_train.training_args.warmup_ratio", "warmup_steps is given")
    for role in ("actor_train", "reference", "critic"):
        recomputes = recipe.get(f"{role}.strategy_args.strategy_config.recompute_granularity") is not None
        if recomputes and recipe.get(f"{role}.model_args.disable_gradient_checkpointing") is True:
            recipe.drop(f"{role}.model_args.disable_gradient_checkpointing", "recompute_granularity is given")
    for role in ("actor_infer", "reference", "critic"):
        if recipe.get(f"{role}.pg_variant") in (None, recipe.get("actor_train.pg_variant")):
            recipe.drop(f"{role}.pg_variant", "only actor_train has a policy loss")
    if recipe.get("is_num_return_sequences_expand") is False:
        recipe.drop("is_num_return_sequences_expand", "each sample is a request with its own seed")


def _dtype(recipe: Recipe, role: str) -> Any:
    return recipe.get(f"{role}.model_args.dtype")


def _read_devices(recipe: Recipe) -> None:
    """With async_generation_ratio above 0, engines that share part of the trainer's devices get separate ones."""
    train, infer = _devices(recipe, "actor_train"), _devices(recipe, "actor_infer")
    ratio = recipe.get("async_generation_ratio", 0)
    if not train or not isinstance(ratio, int | float) or ratio <= 0:
        return
    if _overlap_in_part(train, infer):
        rest = [rank for rank in infer if rank not in train]
        size = recipe.get("actor_infer.num_gpus_per_worker", 1)
        if rest and isinstance(size, int) and size > 0 and len(rest) % size == 0:
            _move(recipe, "actor_infer", infer, rest, train)
        else:
            _move(recipe, "actor_infer", infer, train, train)
    infer = _devices(recipe, "actor_infer")
    for role in ("reference", "critic"):
        if _overlap_in_part(infer, _devices(recipe, role)):
            _move(recipe, role, _devices(recipe, role), train, train)


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
    way = "shares all of actor_train's" if after == train else "gets the others"
    recipe.note(
        f"{role}.device_mapping",
        f"{spans(before)} overlaps in part, and with async_generation_ratio above 0 all compute at the same time, so "
        f"{role} {way}: {spans(after)}",
    )


# Trackers

UNAVAILABLE_TRACKERS = ("trackio", "ml_tracker", "none")
"""Values of `track_with` in ROLL without a counterpart in this project."""


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


def _share_devices(recipe: Recipe, role: str) -> None:
    """A role that a recipe gives no devices is on those of the policy."""
    train = _devices(recipe, "actor_train")
    if train and recipe.put_new(f"{role}.device_mapping", train):
        recipe.note(f"{role}.device_mapping", f"is not given: the {role} is on the devices of actor_train")


PAIR_KEYS = {"chosen_key": "chosen", "rejected_key": "rejected"}
"""Keys of a recipe of DPO -> keys of `data_args`."""


def read_pairs(recipe: Recipe) -> None:
    """Columns, loss and batch of a recipe of DPO, in any file."""
    for key, name in PAIR_KEYS.items():
        column = recipe.take(key)
        if column is not None and recipe.put_new(f"actor_train.data_args.{name}", column):
            recipe.note(key, f"is read as actor_train.data_args.{name}")
    if recipe.take_switch("ipo") and recipe.put_new("dpo_loss_type", "ipo"):
        recipe.note("ipo", "is read as dpo_loss_type: ipo")
    pairs, training = recipe.take("train_batch_size"), "actor_train.training_args"
    if pairs is None:
        return
    size = recipe.get(f"{training}.per_device_train_batch_size", 1)
    sizes = recipe.section("actor_train.strategy_args.strategy_config")
    tensor, stages = (sizes.get(f"{name}_model_parallel_size", 1) for name in ("tensor", "pipeline"))
    numbers = [pairs, size, tensor, stages]
    if not all(type(number) is int and number > 0 for number in numbers):
        recipe.refuse("train_batch_size", pairs, "a number of pairs")
        return
    share = size * max(1, len(_devices(recipe, "actor_train")) // (tensor * stages))
    if pairs % share:
        recipe.refuse("train_batch_size", pairs, f"a multiple of {share}, the pairs of one micro-batch on all ranks")
    elif recipe.put_new(f"{training}.gradient_accumulation_steps", pairs // share):
        recipe.note("train_batch_size", f"is read as {training}.gradient_accumulation_steps: {pairs // share}")


def _read_prompt_length(recipe: Recipe) -> None:
    """In ROLL only `sequence_length` bounds a prompt."""
    longest = recipe.get("sequence_length")
    if (
        isinstance(longest, int)
        and 1 < longest <= BaseConfig.prompt_length
        and recipe.put_new("prompt_length", longest - 1)
    ):
        recipe.note(
            "prompt_length", f"is not given: prompts have at most {longest - 1} tokens, as sequence_length says"
        )


def _read_epochs(recipe: Recipe) -> None:
    if recipe.has("actor_train.training_args.num_train_epochs") and not recipe.has("max_steps"):
        steps = BaseConfig.max_steps
        recipe.note("max_steps", f"is not given, so the run has {steps} steps; write the steps of the epochs you want")


def _read_validation(recipe: Recipe) -> None:
    """Without validation files ROLL does not validate, whatever `eval_steps` is."""
    if recipe.get("eval_steps") and not recipe.get("validation.data_args.file_name"):
        recipe.drop("eval_steps", "validation has no files")


# Lengths


def _read_sampling(recipe: Recipe) -> None:
    """In ROLL the pipeline's keys decide the lengths and samples of a request, whatever generating_args has."""
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


def _read_environments(recipe: Recipe) -> None:
    """In older versions of ROLL the observation is `state`, and the size of a grid has two keys."""
    for tag in recipe.section("custom_envs"):
        path, options = f"custom_envs.{tag}.agent_template", f"custom_envs.{tag}.env_config"
        text = recipe.get(path)
        if isinstance(text, str) and "{state}" in text:
            recipe.put(path, text.replace("{state}", "{observation}"))
            recipe.note(path, "{state} is read as {observation}")
        if recipe.has(f"{options}.dim_x") and recipe.has(f"{options}.dim_y"):
            recipe.put_new(f"{options}.dim_room", [recipe.take(f"{options}.{key}") for key in ("dim_x", "dim_y")])


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

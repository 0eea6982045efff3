"""Reads what recipes of ROLL write differently: roles, devices, data and lengths; `roll_losses` has the rest.

Keys that only have another name are in `systems/roll.py`. Every function here takes keys from the recipe,
puts ours, and leaves one remark on each change. A key of ours that is given as well wins.
"""

from __future__ import annotations

from typing import Any, get_args

from roll.base.schema import declared, section_of
from roll.compat.recipe import MEGATRON, TRAINING, Recipe, is_count, shown
from roll.compat.rules import RuleBook
from roll.compat.systems import roll_losses
from roll.compat.systems.fsdp import read_ulysses
from roll.compat.systems.roll import VISION_PART
from roll.compat.systems.roll_rewards import read_rewards
from roll.configs.agentic import ADJUSTMENTS
from roll.configs.devices.parallel_layout import spans
from roll.configs.pipeline import BaseConfig
from roll.configs.roles import DEVICE_ROLES

MARKS = ("hydra", "reward_pretrain", "value_clip", "checkpoint_config", "custom_env", "render_save_dir", "sft_train")
"""Top-level keys of which every complete recipe of ROLL has one."""

PACKED_ROLES = ("actor_train", "reference", "critic", "reward")
"""Roles that compute whole sequences, and so choose whether they pad them."""

FORWARD_ENGINES = ("hf_infer", "deepspeed_infer", "vllm", "sglang")
"""Engines that a reference may have in ROLL, beside Megatron and FSDP."""

STUDENT_ROLE, PURE_OPD_KIND = "student_train", "pure_opd_pipeline_type"
"""The role that learns from a teacher alone in recipes of ROLL, and the key that says so here."""

PAIR_KEYS = {"chosen_key": "chosen", "rejected_key": "rejected"}
"""Keys of a recipe of DPO -> keys of `data_args`."""

PROXY, OWN_RUNNERS = "ProxyEnvManager", "roll."
"""The environment manager that runs agents, and how the names of ROLL's own agents begin."""

UNAVAILABLE_TRACKERS = ("ml_tracker", "none")
"""Values of `track_with` in ROLL without a counterpart in this project."""


def is_roll_recipe(recipe: Recipe) -> bool:
    """Whether a file is written for ROLL, by keys that nothing else has."""
    engine = recipe.get("actor_infer.strategy_args.strategy_name")
    workers = any(isinstance(value, dict) and "worker_cls" in value for value in recipe.tree.values())
    return workers or engine == "vllm" or any(recipe.has(mark) for mark in MARKS)


def read_roll_keys(recipe: Recipe) -> None:
    """Translates keys that only ROLL has, in any file."""
    roll_losses.read_topr(recipe)
    _read_data(recipe)
    roll_losses.read_old_log_probs(recipe)
    roll_losses.read_clipping(recipe)
    roll_losses.read_correction(recipe)
    roll_losses.read_reward_norm(recipe)
    read_rewards(recipe)
    _read_agents(recipe)
    _read_distillation(recipe)
    _read_remove_padding(recipe)
    _read_frozen(recipe)
    for role in PACKED_ROLES:
        read_ulysses(recipe, role, f"{role}.model_args.ulysses_size")


def read_roll_recipe(recipe: Recipe, pipeline: str) -> None:
    """Translates what keys of the same name mean in a recipe of ROLL, after its own keys."""
    _read_reference(recipe)
    _read_critic(recipe)
    _read_precision(recipe)
    _drop_keys_without_effect(recipe)
    _read_devices(recipe)
    _read_trackers(recipe)
    roll_losses.read_kl(recipe)
    roll_losses.read_dual_clip(recipe)
    roll_losses.read_sample_weights(recipe)
    if pipeline == "agentic":
        _read_environments(recipe)
        _read_agentic_lengths(recipe)
        roll_losses.read_reward_normalization(recipe)
    elif recipe.get("eval_steps") and not recipe.get("validation.data_args.file_name"):
        recipe.drop("eval_steps", "validation has no files")
    if pipeline == "rlvr":
        _read_sampling(recipe)
    if pipeline in ("sft", "dpo"):
        _read_epochs(recipe)
    if pipeline == "dpo":
        _share_devices(recipe, "reference")


def drop_nulls(
    recipe: Recipe, pipeline: str, rules: RuleBook, section: type, path: str = "", entries: bool = False
) -> None:
    """Removes keys that are null where null is not a valid value, and unknown ones: such a key counts as not given.

    Keys that have a rule stay and get a remark. `section` is the dataclass of the section at `path`, or with `entries`
    of each of its entries, which have names of the user.
    """
    for name, value in list((recipe.section(path) if path else recipe.tree).items()):
        where = f"{path}.{name}" if path else str(name)
        key = declared(section).get(name)
        if value is None and not entries:
            if type(None) not in get_args(key.hint) if key else not rules.find(where, pipeline):
                recipe.take(where)
        elif isinstance(value, dict):
            inner, inner_entries = (section, False) if entries else section_of(key.hint) if key else (None, False)
            if inner is not None:
                drop_nulls(recipe, pipeline, rules, inner, where, inner_entries)


# Roles


def _read_reference(recipe: Recipe) -> None:
    path = "reference.strategy_args"
    name = recipe.get(f"{path}.strategy_name")
    if name in FORWARD_ENGINES:
        recipe.put(path, {"strategy_name": "megatron_infer"})
        recipe.note(f"{path}.strategy_name", f"{name} is read as megatron_infer, without its strategy_config")


def _read_distillation(recipe: Recipe) -> None:
    """Reads pure distillation as adv_estimator opd, also where only the roles of a student name it."""
    recipe.move("teacher_pretrain", "reference.model_args.model_name_or_path")
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
            recipe.note(path, f"is read as {ours}: {shown(removes)}")
        else:
            recipe.note(path, f"says the same as {ours}" if packs is removes else f"{ours} decides")


def _read_frozen(recipe: Recipe) -> None:
    """Drops frozen parts that a model for text does not have, and those of roles that are not trained."""
    for role in ("actor_train", "critic", "reference", "actor_infer", "reward", "judge"):
        path = f"{role}.model_args.freeze_module_prefix"
        given = recipe.get(path)
        names = given.split(",") if isinstance(given, str) else given
        if not isinstance(names, list) or not names:
            continue
        if role not in ("actor_train", "critic"):
            recipe.drop(path, "nothing of this model is trained")
            continue
        absent = [str(name).strip() for name in names if VISION_PART.search(str(name))]
        kept = [name for name in names if str(name).strip() not in absent]
        if not kept:
            recipe.drop(path, "a model for text has no such part, and all of it is trained")
        elif absent:
            recipe.put(path, kept)
            recipe.note(path, f"{', '.join(absent)} has no effect: a model for text has no such part")


def _read_critic(recipe: Recipe) -> None:
    """A critic belongs to gae, the default estimator of ROLL."""
    if not recipe.has("critic"):
        if recipe.get("adv_estimator") == "gae":
            _share_devices(recipe, "critic")
    elif recipe.put_new("adv_estimator", "gae"):
        recipe.note("critic", "is given without adv_estimator, whose default in ROLL is gae: adv_estimator is gae")
    elif recipe.get("adv_estimator") != "gae":
        recipe.drop("critic", f"adv_estimator {recipe.get('adv_estimator')} needs no critic")


def _read_precision(recipe: Recipe) -> None:
    """Megatron in fp16 is read as bf16; engines follow the policy, so that log-probs agree."""
    halves = [role for role in DEVICE_ROLES if recipe.get(f"{role}.model_args.dtype") == "fp16"]
    why = "fp16 is read as bf16, which needs no loss scaling"
    roles = halves if "actor_train" in halves else [role for role in ("reference", "critic") if role in halves]
    for role in roles:
        recipe.put(f"{role}.model_args.dtype", "bf16")
        if "actor_train" not in halves:
            recipe.note(f"{role}.model_args.dtype", why)
    if "actor_train" in halves:
        recipe.note("actor_train.model_args.dtype", f"{why}, in {', '.join(roles)}")


def _drop_keys_without_effect(recipe: Recipe) -> None:
    """Drops keys that have no effect in ROLL either, because of another key."""
    if recipe.get(f"{TRAINING}.warmup_steps"):
        recipe.drop(f"{TRAINING}.warmup_ratio", "warmup_steps is given")
    for role in ("actor_train", "reference", "critic"):
        options, checkpointing = f"{role}.strategy_args.strategy_config", "disable_gradient_checkpointing"
        if recipe.get(f"{options}.sequence_parallel") and recipe.get(f"{options}.tensor_model_parallel_size", 1) == 1:
            recipe.drop(f"{options}.sequence_parallel", "tensor_model_parallel_size is 1")
        recomputes = recipe.get(f"{options}.recompute_granularity") is not None
        if recomputes and recipe.get(f"{role}.model_args.{checkpointing}") is True:
            recipe.drop(f"{role}.model_args.{checkpointing}", "recompute_granularity is given")
    for role in ("actor_infer", "reference", "critic"):
        if recipe.get(f"{role}.pg_variant") in (None, recipe.get("actor_train.pg_variant")):
            recipe.drop(f"{role}.pg_variant", "only actor_train has a policy loss")
    if recipe.get("is_num_return_sequences_expand") is False:
        recipe.drop("is_num_return_sequences_expand", "each sample is a request with its own seed")


# Devices


def _read_devices(recipe: Recipe) -> None:
    """With async_generation_ratio above 0, engines that share part of the trainer's devices get separate ones."""
    train, infer = recipe.devices("actor_train"), recipe.devices("actor_infer")
    ratio = recipe.get("async_generation_ratio", 0)
    if not train or not isinstance(ratio, int | float) or ratio <= 0:
        return
    if _overlap_in_part(train, infer):
        rest = [rank for rank in infer if rank not in train]
        size = recipe.get("actor_infer.num_gpus_per_worker", 1)
        fits = bool(rest) and is_count(size) and len(rest) % size == 0
        _move(recipe, "actor_infer", infer, rest if fits else train, train)
    infer = recipe.devices("actor_infer")
    for role in ("reference", "critic"):
        if _overlap_in_part(infer, recipe.devices(role)):
            _move(recipe, role, recipe.devices(role), train, train)


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


def _share_devices(recipe: Recipe, role: str) -> None:
    """A role that a recipe gives no devices is on those of the policy."""
    train = recipe.devices("actor_train")
    if train and recipe.put_new(f"{role}.device_mapping", train):
        recipe.note(f"{role}.device_mapping", f"is not given: the {role} is on the devices of actor_train")


# Trackers and data


def _read_trackers(recipe: Recipe) -> None:
    """Drops trackers that are not available; `nest_tracker_kwargs` reads the options of the others."""
    given = recipe.get("track_with", ["tensorboard"])
    names = [given] if isinstance(given, str) else given
    absent = [name for name in names if name in UNAVAILABLE_TRACKERS] if isinstance(names, list) else []
    if absent:
        kept = [name for name in names if name not in absent]
        recipe.put("track_with", kept)
        recipe.note("track_with", f"{', '.join(absent)} is not available: metrics.jsonl has every step")
        if not set(kept) - {"stdout"}:
            recipe.drop("tracker_kwargs", f"it has options of {', '.join(absent)}")


def _read_data(recipe: Recipe) -> None:
    steps, template = recipe.take("validation.eval_steps"), "actor_train.data_args.template"
    if steps is not None and recipe.put_new("eval_steps", steps):
        recipe.note("validation.eval_steps", "is read as eval_steps")
    elif steps is not None and recipe.get("eval_steps") != steps:
        recipe.note("validation.eval_steps", f"{steps} has no effect: eval_steps is {recipe.get('eval_steps')}")
    if recipe.get("global_template") is None or recipe.has(template):
        recipe.drop("global_template", f"{template} is given")
    recipe.move("global_template", template)
    for role in ("actor_train", "validation"):
        _read_folder(recipe, f"{role}.data_args")


def _read_folder(recipe: Recipe, path: str) -> None:
    """Joins relative names of `file_name` to `dataset_dir`, unless they begin with it or come from the command line."""
    folder, given = recipe.take(f"{path}.dataset_dir"), recipe.get(f"{path}.file_name")
    names = [given] if isinstance(given, str) else given
    if not isinstance(folder, str) or f"{path}.file_name" in recipe.overridden or not isinstance(names, list):
        return
    prefix = folder.rstrip("/").removeprefix("./")

    def joined(name: Any) -> Any:
        if not isinstance(name, str) or name.startswith("/") or name.removeprefix("./").startswith(f"{prefix}/"):
            return name
        return f"{folder.rstrip('/')}/{name.removeprefix('./')}"

    files = names if prefix in ("", ".") else list(map(joined, names))
    if files != names:
        recipe.put(f"{path}.file_name", files)
        shown_files = ", ".join(map(str, files))
        recipe.note(f"{path}.dataset_dir", f"is the folder of relative names in file_name: {shown_files}")
    else:
        recipe.note(f"{path}.dataset_dir", "has no effect: file_name has it, or has no relative names")


def read_pairs(recipe: Recipe) -> None:
    """Columns, loss and batch of a recipe of DPO, in any file."""
    for key, name in PAIR_KEYS.items():
        recipe.move(key, f"actor_train.data_args.{name}")
    if recipe.take_switch("ipo") and recipe.put_new("dpo_loss_type", "ipo"):
        recipe.note("ipo", "is read as dpo_loss_type: ipo")
    pairs = recipe.take("train_batch_size")
    if pairs is None:
        return
    size = recipe.get(f"{TRAINING}.per_device_train_batch_size", 1)
    sizes = recipe.section(MEGATRON)
    tensor, stages = (sizes.get(f"{name}_model_parallel_size", 1) for name in ("tensor", "pipeline"))
    if not all(map(is_count, (pairs, size, tensor, stages))):
        recipe.refuse("train_batch_size", pairs, "a number of pairs")
        return
    share = size * max(1, len(recipe.devices("actor_train")) // (tensor * stages))
    steps = f"{TRAINING}.gradient_accumulation_steps"
    if pairs % share:
        recipe.refuse("train_batch_size", pairs, f"a multiple of {share}, the pairs of one micro-batch on all ranks")
    elif recipe.put_new(steps, pairs // share):
        recipe.note("train_batch_size", f"is read as {steps}: {pairs // share}")


# Lengths


def _read_epochs(recipe: Recipe) -> None:
    """Where a recipe has epochs the run has the default steps."""
    if recipe.has(f"{TRAINING}.num_train_epochs") and not recipe.has("max_steps"):
        steps = BaseConfig.max_steps
        recipe.note("max_steps", f"is not given, so the run has {steps} steps; write the steps of the epochs you want")


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
    for manager in ("train_env_manager", "val_env_manager"):
        if recipe.get(f"{manager}.max_traj_per_env", -1) != -1:
            recipe.drop(f"{manager}.max_traj_per_env", "environments run as many trajectories as batches need")


def _read_agents(recipe: Recipe) -> None:
    """A runner of the user is an agent; GEMRunner of ROLL plays the environment of its entry, as a run here does."""
    for tag in recipe.section("custom_envs"):
        entry = f"custom_envs.{tag}"
        path, manager = f"{entry}.agent_runner_cls", f"{entry}.env_manager_cls"
        proxy = str(recipe.get(manager)).endswith(PROXY)
        runner = str(recipe.get(path) or "")
        module, _, name = runner.rpartition(".")
        if proxy and not runner:
            recipe.error(manager, f"{PROXY} runs an agent_runner_cls, which is not given; set agent (docs/agents.md)")
        elif name == "GEMRunner":
            recipe.drop(path, "a run plays the environment of an entry itself")
        elif module.startswith(OWN_RUNNERS):
            recipe.error(path, f"{name} is not available; set agent to a class of yours (docs/agents.md)")
        elif module and recipe.put_new(f"{entry}.agent", f"{module}:{name}"):
            recipe.take(path)
            recipe.note(path, f"is read as agent {module}:{name}; its run(task, seed) is what run_job(seed) was")
            for key in ("env_type", "env_config", "agent_system_template", "agent_template", "max_steps"):
                recipe.drop(f"{entry}.{key}", "the agent chooses its task and messages")
        if proxy and runner:
            recipe.put(manager, "traj")
            recipe.note(manager, f"{PROXY} is read as traj")


def _read_agentic_lengths(recipe: Recipe) -> None:
    """A trajectory has one length, `sequence_length`, and a batch is filled up, whatever `batch_adjust_mode` is."""
    lengths = [recipe.get("prompt_length"), recipe.get("response_length")]
    if not recipe.has("sequence_length") and all(isinstance(length, int) for length in lengths):
        recipe.put("sequence_length", sum(length for length in lengths if isinstance(length, int)))
    if recipe.has("sequence_length"):
        for key in ("prompt_length", "response_length"):
            recipe.drop(key, "a trajectory has several turns; sequence_length is the length of all of it")
    mode = recipe.get("batch_adjust_mode")
    if isinstance(mode, str) and mode in ADJUSTMENTS:
        recipe.take("batch_adjust_mode")
        why = f"{ADJUSTMENTS[mode]}, so samples without a loss fill a batch"
        recipe.note("batch_adjust_mode", f"{mode} is read as pad: {why}")

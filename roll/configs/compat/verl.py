"""Keys of verl and of its one-step-off trainer: tables, its numbers of devices, and its rollout correction."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from roll.configs.compat import (
    MEGATRON,
    SAMPLING,
    SGLANG,
    TRAINING,
    Names,
    Tree,
    UnsupportedKey,
    always,
    set_at,
    two_spellings,
    without,
)
from roll.configs.errors import Problem
from roll.configs.parallel_layout import spans
from roll.configs.schema import value_at

NAMES: Names = {
    "data.train_files": "actor_train.data_args.file_name",
    "data.val_files": "validation.data_args.file_name",
    "data.apply_chat_template_kwargs": "actor_train.data_args.template_kwargs",
    "data.train_batch_size": "rollout_batch_size",
    "data.max_prompt_length": "prompt_length",
    "data.max_response_length": "response_length",
    "actor_rollout_ref.model.path": "pretrain",
    "actor_rollout_ref.rollout.n": "num_return_sequences_in_group",
    "model.use_remove_padding": "actor_train.use_sequence_packing",
    "rollout.temperature": f"{SAMPLING}.temperature",
    "rollout.top_p": f"{SAMPLING}.top_p",
    "rollout.top_k": f"{SAMPLING}.top_k",
    "rollout.gpu_memory_utilization": f"{SGLANG}.mem_fraction_static",
    "rollout.tensor_model_parallel_size": "actor_infer.num_gpus_per_worker",
    "rollout.max_num_seqs": "actor_infer.max_running_requests",
    "rollout.val_kwargs.*": "validation.generating_args",
    "trainer.nnodes": "actor_train.device_mapping",
    "trainer.n_gpus_per_node": "num_devices_per_node",
    "rollout.nnodes": "actor_infer.device_mapping",
    "rollout.n_gpus_per_node": "actor_infer.device_mapping",
    "reward_model.model.path": "reward.model_args.model_name_or_path",
    "reward_model.overlong_buffer.len": "overlong_buffer_len",
    "reward_model.overlong_buffer.penalty_factor": "overlong_penalty_factor",
    "algorithm.lam": "lambd",
    "critic.model.path": "critic.model_args.model_name_or_path",
    "critic.optim.lr": "critic.training_args.learning_rate",
    "critic.cliprange_value": "value_clip",
    "critic.model.use_remove_padding": "critic.use_sequence_packing",
    "critic.ppo_mini_batch_size": "critic.training_args.gradient_accumulation_steps",
    "critic.ppo_micro_batch_size_per_gpu": "critic.training_args.per_device_train_batch_size",
    "critic.use_dynamic_bsz": "critic.use_dynamic_batching_in_train",
    "critic.ppo_max_token_len_per_gpu": "critic.max_tokens_per_microbatch_in_train",
    "trainer.critic_warmup": "critic_warmup",
    "actor.optim.lr": f"{TRAINING}.learning_rate",
    "actor.grad_clip": "max_grad_norm",
    "actor.ppo_mini_batch_size": f"{TRAINING}.gradient_accumulation_steps",
    "actor.ppo_micro_batch_size_per_gpu": f"{TRAINING}.per_device_train_batch_size",
    "actor.use_dynamic_bsz": "actor_train.use_dynamic_batching_in_train",
    "actor.ppo_max_token_len_per_gpu": "actor_train.max_tokens_per_microbatch_in_train",
    "actor.megatron.tensor_model_parallel_size": f"{MEGATRON}.tensor_model_parallel_size",
    "actor.ppo_epochs": "ppo_epochs",
    "actor.clip_ratio": ("pg_clip_low", "pg_clip_high"),
    "actor.clip_ratio_low": "pg_clip_low",
    "actor.clip_ratio_high": "pg_clip_high",
    "actor.clip_ratio_c": "dual_clip_c",
    "actor.policy_loss.loss_mode": "actor_train.pg_variant",
    "actor.policy_loss.clip_cov_ratio": "clip_cov_ratio",
    "actor.policy_loss.clip_cov_lb": "clip_cov_lower",
    "actor.policy_loss.clip_cov_ub": "clip_cov_upper",
    "actor.policy_loss.kl_cov_ratio": "kl_cov_ratio",
    "actor.policy_loss.ppo_kl_coef": "kl_cov_coef",
    "actor.loss_agg_mode": "loss_agg_mode",
    "actor.entropy_coeff": "entropy_loss_coef",
    "actor.use_kl_loss": "use_kl_loss",
    "actor.kl_loss_coef": "kl_loss_coef",
    "actor.kl_loss_type": "kl_loss_type",
    "algorithm.kl_penalty": "kl_penalty",
    "algorithm.use_kl_in_reward": "add_token_level_kl",
    "algorithm.kl_ctrl.kl_coef": "init_kl_coef",
    "algorithm.adv_estimator": "adv_estimator",
    "algorithm.norm_adv_by_std_in_grpo": "grpo_norm_by_std",
    "algorithm.gdpo_reward_keys": "rewards.<name>.tag_included",
    "algorithm.gdpo_reward_weights": "rewards.<name>.weight",
    "algorithm.rollout_correction.rollout_is": "correction.weights.level",
    "rollout_is_threshold": "correction.weights.upper",
    "algorithm.rollout_correction.rollout_rs": (
        "correction.rejection.statistic",
        "correction.rejection.level",
        "correction.rejection.upper",
    ),
    "rollout_rs_threshold": (
        "correction.rejection.statistic",
        "correction.rejection.level",
        "correction.rejection.upper",
    ),
    "trainer.total_training_steps": "max_steps",
    "trainer.total_epochs": "max_steps",
    "trainer.val_before_train": "eval_steps",
    "trainer.save_freq": "save_steps",
    "trainer.test_freq": "eval_steps",
    "trainer.default_local_dir": "output_dir",
    "trainer.experiment_name": "exp_name",
    "trainer.logger": "track_with",
    "trainer.resume_mode": "resume_from_checkpoint",
    "custom_reward_function.path": "rewards.<name>.function",
    "custom_reward_function.name": "rewards.<name>.function",
    "wait_prev_gen": "async_generation_ratio",
    "partial_rollout": "in_flight_policy",
    "require_batches": "rollout_batch_size",
    "trigger_parameter_sync_step": "rollout_batch_size",
}

VALUE_HINTS = {"loss_mode": "vanilla there is ppo here"}
"""Last part of a name in `NAMES` -> which of its values has another name in this project."""

CORRECTION = "algorithm.rollout_correction"

BYPASS = ("bypass_mode", f"{CORRECTION}.bypass_mode")

MOVED_KEYS = {
    **dict.fromkeys(BYPASS, "old_log_probs_source"),
    **dict.fromkeys(("free_cache_engine", "actor_infer.free_cache_engine"), "is_offload_states"),
}

MOVED_VALUES: dict[str, dict[bool, str]] = {name: {True: "behavior", False: "recompute"} for name in BYPASS}

KL_NAMES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}

ESTIMATOR_NAMES = {
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
    "tir_optimal_token_baseline": "optimal_token_baseline",
}

RENAMED_VALUES = {"kl_penalty": KL_NAMES, "kl_loss_type": KL_NAMES, "adv_estimator": ESTIMATOR_NAMES}

UNSUPPORTED_KEYS = (
    *(
        UnsupportedKey(pattern, bool, "engines always return log-probs; whether they are used: old_log_probs_source")
        for pattern in ("calculate_log_probs", "*.calculate_log_probs")
    ),
    *(
        UnsupportedKey(pattern, bool, "sums of squared probabilities are computed where adv_estimator reads them")
        for pattern in ("calculate_sum_pi_squared", "*.calculate_sum_pi_squared")
    ),
    *(
        UnsupportedKey(pattern, always, "equal device mappings share devices, disjoint ones do not")
        for pattern in ("hybrid_engine", "*.hybrid_engine")
    ),
)

POOLS = {"trainer": "actor_train", "rollout": "actor_infer"}
"""Section with `nnodes` and `n_gpus_per_node` -> the role that owns these devices."""

COUNTS = {"nnodes": 1, "n_gpus_per_node": 8}
"""Keys of a pool and verl's defaults."""

DEVICES_PER_NODE = 8
"""Devices of a node that two pools may share, where `num_devices_per_node` does not say it."""


def place_pools(tree: Tree, pipeline: str, overridden: Collection[str]) -> tuple[Tree, list[Problem], list[Problem]]:
    """All files and overrides together, with the numbers of nodes and devices of the pools as device mappings.

    Training has the first devices of its nodes. Generation has the next ones of the same nodes if a node holds both
    pools, else nodes of its own. Without `rollout`, both roles share the devices of `trainer`.

    Args:
        tree: the configuration.
        pipeline: sft has no generation.
        overridden: paths that the command line sets; a device mapping among them replaces the numbers of its pool.

    Returns:
        The tree, remarks and problems.
    """
    paths = [f"{pool}.{key}" for pool in POOLS for key in COUNTS if value_at(tree, f"{pool}.{key}") is not None]
    if not paths:
        return tree, [], []
    values = {path: value_at(tree, path) for path in paths}
    for path in paths:
        tree = without(tree, path)
    if not values.get("rollout.nnodes", 1):  # colocated
        values = {path: value for path, value in values.items() if not path.startswith("rollout.")}
    node = tree.get("num_devices_per_node")
    problems = [Problem(path, f"{n!r} is not a whole number of at least 1") for path, n in values.items() if _bad(n)]
    if problems or (node is not None and _bad(node)):  # conversion reports the latter
        return tree, [], problems
    if not values:
        return tree, [Problem(path, "has no effect: there is no pool of its own") for path in paths], []
    sizes = {
        pool: (values.get(f"{pool}.nnodes", COUNTS["nnodes"]), values.get(f"{pool}.n_gpus_per_node", DEVICES_PER_NODE))
        for pool in POOLS
        if any(path.startswith(f"{pool}.") for path in values)
    }
    if "trainer" not in sizes:
        missing = "needs trainer.nnodes and trainer.n_gpus_per_node too; or write actor_infer.device_mapping"
        return tree, [], [Problem(next(iter(values)), missing)]
    for pool, (_, devices) in sizes.items():
        if node is not None and devices > node:
            message = f"{devices} devices are more than num_devices_per_node {node}; use at most that"
            return tree, [], [Problem(f"{pool}.n_gpus_per_node", message)]
    mappings, per_node = _mappings(sizes, node)
    if pipeline == "sft":
        del mappings["actor_infer"]
    return _with_mappings(tree, sizes, mappings, per_node, overridden)


def _bad(value: Any) -> bool:
    return not isinstance(value, int) or isinstance(value, bool) or value < 1


def _mappings(sizes: dict[str, tuple[int, int]], node: int | None) -> tuple[dict[str, list[int]], int]:
    """Device mapping of each role, and devices per node, which is the number used unless it is given."""
    nodes, devices = sizes["trainer"]
    other_nodes, others = sizes.get("rollout", (0, 0))
    together = devices + others <= (node or DEVICES_PER_NODE)
    per_node = node or (devices + others if together else max(devices, others))
    first_node, first_device = (0, devices) if together else (nodes, 0)
    training = [n * per_node + device for n in range(nodes) for device in range(devices)]
    start = first_node * per_node + first_device
    generation = [start + n * per_node + device for n in range(other_nodes) for device in range(others)]
    return {"actor_train": training, "actor_infer": generation or training}, per_node


def _with_mappings(
    tree: Tree,
    sizes: dict[str, tuple[int, int]],
    mappings: dict[str, list[int]],
    per_node: int,
    overridden: Collection[str],
) -> tuple[Tree, list[Problem], list[Problem]]:
    given = tree.get("num_devices_per_node") is not None
    tree = set_at(tree, "num_devices_per_node", per_node)
    if tree.get("use_kl_loss") or tree.get("add_token_level_kl"):
        mappings["reference"] = mappings["actor_train"]
    notes, problems = [], []
    for role, mapping in mappings.items():
        path, pool = f"{role}.device_mapping", "rollout" if role == "actor_infer" and "rollout" in sizes else "trainer"
        nodes, devices = sizes[pool]
        numbers = f"{nodes} x {devices} devices"
        if value_at(tree, path) is None and isinstance(tree.get(role) or {}, dict):
            tree = set_at(tree, path, mapping)
            notes.append(Problem(f"{pool}.n_gpus_per_node", f"{numbers} are read as {path}: {spans(mapping)}"))
        elif path in overridden:
            notes.append(Problem(f"{pool}.n_gpus_per_node", f"{numbers} have no effect: {path} is given"))
        elif POOLS[pool] == role:
            problems.append(two_spellings(f"{pool}.n_gpus_per_node", path))
    if not given:
        apart = "rollout" in sizes and per_node < sizes["trainer"][1] + sizes["rollout"][1]
        hint = "; if one node holds both pools, set it to its number of devices" if apart else ""
        notes.append(Problem("num_devices_per_node", f"is not given: {per_node} is assumed{hint}"))
    return tree, notes, problems


REJECTION_LEVELS = {"token": "token", "seq_mean": "sequence-mean", "seq_sum": "sequence-sum", "seq_max": "sequence-max"}
"""First part of an option of `rollout_rs` -> `correction.rejection.level`; the last part is the statistic."""

EARLIER_REJECTION = {"token": "token", "sequence": "sequence-sum", "geometric": "sequence-mean"}
"""`rollout_rs` of verl before it had statistics -> level, with k1; its bounds are those of the ratio."""


UNSUPPORTED_CORRECTION = ((f"{CORRECTION}.loss_type", "ppo_clip", "for reinforce write actor_train.pg_variant: tis"),)
"""Keys without a counterpart, the value that describes what this project does, and the alternative."""


def read_rollout_correction(tree: Tree) -> tuple[Tree, list[Problem], list[Problem]]:
    """All files and overrides together, with `algorithm.rollout_correction` as `correction`; remarks and problems.

    Its k1 is the negative log ratio, so its bounds `a_b` are those of 1 / ratio; the bounds of the ratio
    are 1 / b and 1 / a. A single bound u of k1 means 1 / u to u in verl. Tokens that verl rejects leave the denominator
    of the loss as well.
    """
    names = (
        "rollout_is",
        "rollout_is_threshold",
        "rollout_is_batch_normalize",
        "rollout_rs",
        "rollout_rs_threshold",
        "rollout_rs_threshold_lower",
    )
    sections = (f"{CORRECTION}.", "rollout_correction.", "")
    found = [(section + name, name) for section in sections for name in names if _has(tree, section + name)]
    for path, usual, reason in UNSUPPORTED_CORRECTION:
        if _has(tree, path) and value_at(tree, path) != usual:
            return tree, [], [Problem(path, f"{value_at(tree, path)} is not available: {reason}")]
        tree = without(tree, path) if _has(tree, path) else tree
    given: dict[str, Any] = {}
    for path, name in found:
        given[name] = value_at(tree, path)
        tree = without(tree, path)
    level, option = given.get("rollout_is"), given.get("rollout_rs")
    if level is None and option is None:
        return tree, [Problem(path, "has no effect: rollout_is and rollout_rs are null") for path, _ in found], []
    where = next(path for path, name in found if given[name] is not None and name in ("rollout_is", "rollout_rs"))
    if any(value_at(tree, f"correction.{name}") is not None for name in ("weights", "rejection", "rejections")):
        return tree, [], [two_spellings(where, "correction")]
    correction = tree.get("correction") or {}
    if not isinstance(correction, dict):
        return tree, [], []  # conversion reports the section
    correction = dict(correction)
    try:
        if level is not None:
            correction["weights"] = _weights(level, given.get("rollout_is_threshold"))
            if given.get("rollout_is_batch_normalize"):
                correction["weights"]["normalize"] = True
        if option is not None:
            first, *further = _rejections(option, given)
            correction["rejection"] = first
            if further:
                correction["rejections"] = {str(number): each for number, each in enumerate(further, start=2)}
            if tree.get("old_log_probs_source") != "behavior":
                correction.setdefault("renormalize", True)
    except ValueError as error:
        return tree, [], [Problem(where, str(error))]
    return set_at(tree, "correction", correction), [Problem(where, f"is read as correction: {_shown(correction)}")], []


def _has(tree: Tree, path: str) -> bool:
    head, _, name = path.rpartition(".")
    section = value_at(tree, head) if head else tree
    return isinstance(section, dict) and name in section


def _weights(level: Any, threshold: Any) -> Tree:
    if level not in ("token", "sequence"):
        raise ValueError(f"rollout_is {level!r} is not token, sequence or null")
    return {"level": level, "upper": 2.0 if threshold is None else _positive(threshold, "rollout_is_threshold")}


def _rejections(option: Any, given: Tree) -> list[Tree]:
    """The rejections of an option, which may list several with commas, with a threshold for each or one for all.

    Raises:
        ValueError: one is unknown, or has no bound.
    """
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
    """The rejection of one option.

    Raises:
        ValueError: it is unknown, or its bound is not a number.
    """
    if option in EARLIER_REJECTION:
        upper = _positive(threshold, "rollout_rs_threshold")
        least = 1 / upper if lower is None else _positive(lower, "rollout_rs_threshold_lower")
        return {"statistic": "k1", "level": EARLIER_REJECTION[option], "lower": least, "upper": upper}
    level, _, statistic = option.rpartition("_")
    if level not in REJECTION_LEVELS or statistic not in ("k1", "k2", "k3"):
        known = ", ".join(f"{name}_k1" for name in REJECTION_LEVELS)
        raise ValueError(f"rollout_rs {option!r} is unknown; use {known}, or the same with k2 or k3")
    rejection: Tree = {"statistic": statistic, "level": REJECTION_LEVELS[level]}
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
    """A section on one line, with numbers of four digits."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_shown(item)}" for key, item in value.items()) + "}"
    return f"{value:.4g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)

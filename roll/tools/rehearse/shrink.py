"""Turns the configuration of a recipe into one of a run in miniature, and lists every change with its reason."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from roll.base.schema import value_at
from roll.configs.advantages import SCORED
from roll.configs.agentic import AgenticConfig
from roll.configs.compat import Tree
from roll.configs.defaults import OWN_MODEL_ROLES
from roll.configs.megatron import LAYER_SPLITS
from roll.configs.pipeline import BaseConfig, PreferenceConfig, RLConfig, RLVRConfig, SFTConfig
from roll.configs.rewards import scoring_role
from roll.configs.roles import DEVICE_ROLES, EngineRoleConfig, MegatronRoleConfig
from roll.configs.rules.devices import CUDA_ONLY
from roll.tools.rehearse.batches import (
    AlternatingScores,
    Batch,
    environment_groups,
    shrink_batch,
    shrink_partition,
    structure_of,
)
from roll.tools.rehearse.layouts import Placement, shrink_layouts
from roll.tools.rehearse.model import POSITIONS

SHORTEST, LONGEST = 16, 32
"""Tokens of a response; a recipe's own length where it is shorter."""

RESPONSE_SHARE = 32
"""A response is a recipe's divided by this, within the bounds above."""

MAX_VALIDATION_SAMPLES = 2
"""Samples of a validation prompt or task."""

MAX_FORWARD_BATCH = 4
"""Samples of a forward micro-batch, so that there are several."""

MAX_SEQUENCES_PER_MICRO_BATCH = 4
"""Longest sequences that fit the token limit of a dynamic micro-batch."""

MAX_PROCESSES = 2
"""Processes of one reward, or of the environments."""

MAX_RUNNING_REQUESTS = 64
"""Requests of one engine, whose memory is reserved for all of them."""

ENGINE_OPTIONS = ("load_format", "schedule_policy", "disable_radix_cache")
"""Options of SGLang that mean the same on a CPU; the others choose kernels or divide GPU memory."""

ACCOUNT_OPTIONS = ("mode", "api_key", "login_kwargs")
"""Options of trackers that connect to a server."""

RANDOM_JUDGE = {
    "grade_pattern": r"(\d)",
    "max_grade": 9.0,
    "judge_temperature": 1.0,
    "judge_max_tokens": 32,
    "max_retries": 20,
}
"""How the grade of a judge with random weights is read; about half of its tokens are digits."""

JUDGE_TOKENS = 4096
"""Room of a question to the judge for response, ground truth and chat template."""

LENGTH_PENALTY = 0.01

OPEN_THRESHOLD = 1e9
"""Above every score, so that a query filter is used but drops nothing."""

LEAST_SECONDS = {
    "start_timeout_s": 600.0,
    "rpc_timeout_s": 600.0,
    "sync_timeout_s": 180.0,
    "actor_infer.generation_timeout_s": 180.0,
    "trajectory_timeout_s": 600.0,
    "env_step_timeout_s": 30.0,
    "async_training.batch_deadline_s": 900.0,
}
"""Shortest limits of a rehearsal, whose processes share a few cores."""

NO_GPU = "needs a GPU"
SMALL = "a small batch of the same structure"
SHORT = "short texts of a random model"
OPENED = "opened: a random model gives a whole group one score, and no group would be left"
SLOTS = "parallel sizes above 1 become 2, on CPU slots of one machine"
GRADED = "a random judge writes digits, and the last one is its grade"
DIFFERS = "scores of a group differ, so that the loss has a gradient"
FOLDER = "everything is written to the rehearsal's folder, and nothing is sent"


@dataclass(frozen=True)
class Inputs:
    """What a rehearsal puts in place of the recipe's model and data.

    Attributes:
        models: name of a model in the recipe -> folder of its random stand-in.
        files: role -> its data files; only of roles that read files.
        prompt_tokens: of the longest prompt, or of the first message of a trajectory.
        sequence_tokens: of the longest prompt with its answer (SFT).
        turn_tokens: of the messages between two answers (agents).
        actions: of a trajectory, by tag (agents).
        reasons: key -> why its stand-in is used, for the list of changes.
    """

    models: Mapping[str, str]
    files: Mapping[str, list[str]] = field(default_factory=dict)
    prompt_tokens: int = 64
    sequence_tokens: int = 96
    turn_tokens: int = 64
    actions: Mapping[str, int] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """One key of the rehearsal that differs from the recipe; `after` is None for a key that is left out."""

    path: str
    before: Any
    after: Any
    reason: str


@dataclass(frozen=True)
class Rehearsal:
    """A run in miniature: its configuration as a mapping, what differs from the recipe, and its placement."""

    tree: Tree
    changes: list[Change]
    placement: Placement


def shrink(config: BaseConfig, inputs: Inputs, folder: str, steps: int) -> Rehearsal:
    """The run in miniature of a loaded configuration, which is not modified. Reads no file and starts nothing."""
    placement = shrink_layouts(config.device_roles())
    edit = _Edit(config)
    _shrink_run(edit, folder, steps)
    _shrink_models(edit, inputs)
    edit.set(("num_devices_per_node",), placement.slots, SLOTS)
    for role in DEVICE_ROLES:
        if role in placement.layouts:
            _shrink_role(edit, role, placement)
        else:
            edit.drop((role,), "the recipe does not use it")
    batch = Batch(1, 1, 1, 1)
    if isinstance(config, RLConfig):
        structure = structure_of(config, turns=max(inputs.actions.values(), default=1))
        batch = shrink_batch(structure, placement.layouts["actor_train"].data)
        _shrink_rl(edit, config, batch)
    if isinstance(config, RLVRConfig):
        _shrink_rlvr(edit, config, batch, inputs)
    elif isinstance(config, AgenticConfig):
        _shrink_agents(edit, config, batch, inputs)
    elif isinstance(config, SFTConfig | PreferenceConfig):
        batch = _shrink_sft(edit, config, inputs)
    _shrink_training(edit, config, batch, steps)
    for path, least in LEAST_SECONDS.items():
        value = value_at(config, path)
        if value is not None and value < least:
            edit.set(tuple(path.split(".")), least, "the processes share a few cores")
    return Rehearsal(edit.tree, edit.changes, placement)


class _Edit:
    """The mapping of a rehearsal while it is made; a change is listed if it changes the value of the recipe."""

    def __init__(self, config: BaseConfig) -> None:
        self.config = config
        self.tree: Tree = copy.deepcopy(config.source.tree)
        self.changes: list[Change] = []

    def set(self, path: tuple[str, ...], value: Any, reason: str, before: Any = None) -> None:
        """Sets a key; `before` is its value in the recipe where the configuration has no such key."""
        section = self.tree
        for name in path[:-1]:
            if not isinstance(section.get(name), dict):
                section[name] = {}
            section = section[name]
        section[path[-1]] = value
        before = before if before is not None else self.value(path)
        if before != value:
            self.changes.append(Change(".".join(path), before, value, reason))

    def drop(self, path: tuple[str, ...], reason: str = "") -> None:
        """Leaves a key out if the recipe gives it; listed if there is a reason."""
        section: Any = self.tree
        for name in path[:-1]:
            section = section.get(name)
            if not isinstance(section, dict):
                return
        if path[-1] not in section:
            return
        given = section.pop(path[-1])
        if reason:
            self.changes.append(Change(".".join(path), given, None, reason))

    def given(self, *path: str) -> bool:
        """Whether the recipe sets this key."""
        section: Any = self.tree
        for name in path:
            if not isinstance(section, dict) or name not in section:
                return False
            section = section[name]
        return True

    def value(self, path: tuple[str, ...]) -> Any:
        """The recipe's value of a key, with defaults; None if it has no such key."""
        found: Any = self.config
        for name in path:
            found = found.get(name) if isinstance(found, dict) else getattr(found, name, None)
        return found


def _shrink_run(edit: _Edit, folder: str, steps: int) -> None:
    config = edit.config
    edit.set(("pipeline",), config.pipeline, "")
    edit.set(("output_dir",), folder, FOLDER)
    for key in [name for name in edit.tree if name.endswith("_dir") and name not in ("output_dir", "rollout_dump_dir")]:
        edit.drop((key,), FOLDER)
    for name, options in config.tracker_kwargs.items():
        for key in options:
            if key.endswith(("dir", "uri")) or key in ACCOUNT_OPTIONS:
                edit.drop(("tracker_kwargs", name, key), FOLDER)
    edit.set(("platform",), "cpu", "runs here")
    edit.set(("max_steps",), steps, "a rehearsal")
    edit.set(("save_checkpoint",), True, "a checkpoint is written and resumed")
    edit.set(("save_steps",), 1, "a checkpoint is written and resumed")
    edit.set(("max_ckpt_to_keep",), 0, "a checkpoint is written and resumed")
    edit.drop(("resume_from_checkpoint",), "a checkpoint is written and resumed")
    if config.track_with:
        edit.set(("logging_steps",), 1, "a rehearsal")
    if config.eval_steps:
        edit.set(("eval_steps",), steps, "one validation before the first step and one after the last")
    edit.drop(("target_loss",), "a random model does not reach it")


def _shrink_models(edit: _Edit, inputs: Inputs) -> None:
    """A random model for every name; roles without one of their own take `pretrain`."""
    config = edit.config
    main = config.actor_train.model_args.model_name_or_path or ""
    edit.set(("pretrain",), inputs.models[main], inputs.reasons.get("model", "a small random model"), before=main)
    for role in config.device_roles():
        path = (role, "model_args", "model_name_or_path")
        name = edit.value(path)
        if name == main and role not in OWN_MODEL_ROLES:
            edit.drop(path)
        elif name in inputs.models:
            edit.set(path, inputs.models[name], "a small random model")
    for role, files in inputs.files.items():
        edit.set((role, "data_args", "file_name"), files, inputs.reasons.get(role, "a few rows"))


def _shrink_role(edit: _Edit, role: str, placement: Placement) -> None:
    section, layout = getattr(edit.config, role), placement.layouts[role]
    edit.set((role, "device_mapping"), placement.devices[role], SLOTS)
    edit.set((role, "model_args", "dtype"), "fp32", "what a CPU computes fast and exactly")
    options = (role, "strategy_args", "strategy_config")
    if isinstance(section, EngineRoleConfig):
        edit.set((role, "num_gpus_per_worker"), layout.tensor, SLOTS)
        requests = min(section.max_running_requests, MAX_RUNNING_REQUESTS)
        edit.set((role, "max_running_requests"), requests, "memory is reserved for all of them")
        for name in section.strategy_args.strategy_config:
            if name not in ENGINE_OPTIONS:
                edit.drop((*options, name), "kernels and memory of a GPU")
        return
    assert isinstance(section, MegatronRoleConfig)
    edit.set((*options, "tensor_model_parallel_size"), layout.tensor, SLOTS)
    edit.set((*options, "pipeline_model_parallel_size"), layout.pipeline, SLOTS)
    if section.strategy_args.strategy_config.sequence_parallel and layout.tensor == 1:
        edit.set((*options, "sequence_parallel"), False, "there is one tensor-parallel rank")
    for name in CUDA_ONLY:
        edit.drop((*options, name), NO_GPU)
    edit.drop((*options, "attention_backend"), NO_GPU)
    for name in (*LAYER_SPLITS, "recompute_num_layers"):
        edit.drop((*options, name), "the small model has one layer for each stage")
    if section.model_args.attn_implementation == "fa2":
        edit.set((role, "model_args", "attn_implementation"), "auto", NO_GPU)


def _shrink_rl(edit: _Edit, config: RLConfig, batch: Batch) -> None:
    folder = edit.tree["output_dir"]
    if config.adv_estimator == "pass_at_k":
        edit.set(("pass_k",), min(config.pass_k, batch.group_size - 1), SMALL)
    if config.uses_critic and config.critic_warmup:
        edit.set(("critic_warmup",), 1, "a rehearsal")
    edit.set(("rollout_dump_dir",), f"{folder}/samples", FOLDER)
    edit.set(("verify_weights",), "always", "every weight update is verified")
    edit.set(("model_update_buffer_size_mb",), 1, "a weight update has several buckets")
    queue = config.async_training.max_queue_size
    if queue is not None:
        samples = batch.groups * batch.group_size
        group = 1 if isinstance(config, AgenticConfig) else config.num_return_sequences_in_group
        before, least = config.rollout_batch_size * group, config.async_training.min_batch_count * samples
        edit.set(("async_training", "max_queue_size"), max(least, round(queue * samples / before)), SMALL)
    if config.difficulty_mask:
        edit.set(("difficulty_low_threshold",), -OPEN_THRESHOLD, OPENED)
        edit.set(("difficulty_high_threshold",), OPEN_THRESHOLD, OPENED)
    if edit.given("num_return_sequences_in_group") or not isinstance(config, AgenticConfig):
        edit.set(("num_return_sequences_in_group",), batch.group_size, SMALL)


def _shrink_rlvr(edit: _Edit, config: RLVRConfig, batch: Batch, inputs: Inputs) -> None:
    edit.set(("rollout_batch_size",), batch.groups, SMALL)
    if not config.length_penalty_per_token and SCORED.holds(config, config):
        edit.set(("length_penalty_per_token",), LENGTH_PENALTY, DIFFERS)
    response = _response_tokens(config.response_length or LONGEST)
    edit.set(("prompt_length",), max(SHORTEST, inputs.prompt_tokens), "the longest prompt of the rehearsal")
    edit.set(("response_length",), response, SHORT)
    edit.drop(("sequence_length",))
    for role in ("actor_infer", "validation"):
        _shrink_sampling(edit, role, response)
    if edit.given("actor_infer", "generating_args", "num_return_sequences"):
        edit.set(("actor_infer", "generating_args", "num_return_sequences"), batch.group_size, SMALL)
    samples = min(config.validation.generating_args.num_return_sequences or 1, MAX_VALIDATION_SAMPLES)
    if edit.given("validation", "generating_args", "num_return_sequences"):
        edit.set(("validation", "generating_args", "num_return_sequences"), samples, SMALL)
    for name, reward in config.rewards.items():
        section = ("rewards", name)
        if reward.world_size > MAX_PROCESSES:
            edit.set((*section, "world_size"), MAX_PROCESSES, "processes share a few cores")
        if scoring_role(reward) == "judge":
            for key, value in RANDOM_JUDGE.items():
                edit.set((*section, key), value, GRADED)
            length = min(POSITIONS, JUDGE_TOKENS + len(reward.prompt_template.encode()) + 2 * inputs.prompt_tokens)
            edit.set(("judge", "sequence_length"), length, SHORT)
        if scoring_role(reward) is not None and (scoring_role(reward) == "reward" or reward.template is not None):
            template = config.actor_train.data_args.template
            edit.set((*section, "template"), template, "its tokenizer is that of the policy")
        if reward.query_filter_config.type != "no_filter":
            opened = {"threshold_down": -OPEN_THRESHOLD, "threshold_up": OPEN_THRESHOLD}
            value = {"type": "mean_filter", "filter_args": opened}
            before = asdict(reward.query_filter_config)
            edit.set((*section, "query_filter_config"), value, OPENED, before=before)
    shares = config.actor_train.data_args.domain_interleave_probs
    if shares:
        equal = {name: 1.0 if share > 0 else 0.0 for name, share in shares.items()}
        edit.set(("actor_train", "data_args", "domain_interleave_probs"), equal, "every domain in a few prompts")


def _shrink_agents(edit: _Edit, config: AgenticConfig, batch: Batch, inputs: Inputs) -> None:
    tokens = _response_tokens(config.response_length or LONGEST)
    turns = max(inputs.actions.values())
    length = inputs.prompt_tokens + turns * (tokens + inputs.turn_tokens)
    edit.set(("rollout_batch_size",), batch.groups * batch.group_size, SMALL)
    if not config.async_training.batch_hook_class and SCORED.holds(config, config):
        hook = f"{AlternatingScores.__module__}:{AlternatingScores.__name__}"
        edit.set(("async_training", "batch_hook_class"), hook, DIFFERS)
    edit.set(("sequence_length",), length, f"holds {turns} turns of the environments")
    edit.set(("max_tokens_per_step",), tokens, SHORT)
    for role in ("actor_infer", "validation"):
        _shrink_sampling(edit, role, tokens)
    if "custom_envs" not in edit.tree:
        edit.tree["custom_envs"] = {
            tag: {"env_type": entry.env_type, "env_config": dict(entry.env_config)}
            for tag, entry in config.custom_envs.items()
        }
    for tag, entry in config.custom_envs.items():
        section = ("custom_envs", tag)
        edit.drop((*section, "env_config", "max_steps"))
        edit.set((*section, "max_steps"), inputs.actions[tag], "a few turns")
        if edit.given(*section, "max_tokens_per_step"):
            edit.set((*section, "max_tokens_per_step"), min(entry.max_tokens_per_step or tokens, tokens), SHORT)
    edit.drop(("max_actions_per_traj",))
    _shrink_environments(edit, config, "train_env_manager", batch.groups, batch.group_size)
    if config.eval_steps:
        size = min(config.val_env_manager.group_size, MAX_VALIDATION_SAMPLES)
        groups = max(1, min(2, (config.val_batch_size or 1) // config.val_env_manager.group_size))
        groups = max(groups, len(config.tags_of(config.val_env_manager)))
        _shrink_environments(edit, config, "val_env_manager", groups, size)
        edit.set(("val_batch_size",), groups * size, SMALL)


def _shrink_environments(edit: _Edit, config: AgenticConfig, name: str, groups: int, size: int) -> None:
    manager = getattr(config, name)
    tags = config.tags_of(manager)
    at_a_time = environment_groups(manager, len(tags), groups)
    edit.set((name, "num_env_groups"), at_a_time, SMALL)
    edit.set((name, "group_size"), size, SMALL)
    if manager.group_size_redundancy:
        edit.set((name, "group_size_redundancy"), 1, SMALL)
    parts = manager.num_groups_partition or [1] * len(tags)
    edit.set((name, "num_groups_partition"), shrink_partition(parts, at_a_time), SMALL)
    if manager.max_env_num_per_worker:
        environments = at_a_time * (size + min(manager.group_size_redundancy, 1))
        processes = min(manager.processes, MAX_PROCESSES)
        edit.set((name, "max_env_num_per_worker"), -(-environments // processes), SMALL)


def _shrink_sft(edit: _Edit, config: SFTConfig | PreferenceConfig, inputs: Inputs) -> Batch:
    """Prompts with an answer, or with two; returns the batch, which is one optimizer step."""
    prompt = max(SHORTEST, inputs.prompt_tokens)
    edit.set(("prompt_length",), prompt, "the longest prompt of the rehearsal")
    edit.set(("sequence_length",), max(inputs.sequence_tokens, prompt + 1), "the longest example of the rehearsal")
    edit.drop(("response_length",))
    training = config.actor_train.training_args
    accumulation = min(training.gradient_accumulation_steps, 2)
    return Batch(1, 1, min(training.per_device_train_batch_size, 2), accumulation)


def _shrink_training(edit: _Edit, config: BaseConfig, batch: Batch, steps: int) -> None:
    section = ("actor_train", "training_args")
    edit.set((*section, "per_device_train_batch_size"), batch.micro_batch, SMALL)
    edit.set((*section, "gradient_accumulation_steps"), batch.accumulation, SMALL)
    for role, worker in config.trained_roles().items():
        if role != "actor_train":
            for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
                edit.drop((role, "training_args", name), "follows from actor_train's")
        if worker.training_args.warmup_steps > 1:
            share = worker.training_args.warmup_steps * steps // config.max_steps
            path = (role, "training_args", "warmup_steps")
            edit.set(path, max(1, min(share, steps)), "the same share of a short run")
    length = edit.tree.get("sequence_length") or edit.tree["prompt_length"] + edit.tree["response_length"]
    for role in config.device_roles():
        for key in ("max_tokens_per_microbatch_in_train", "max_tokens_per_microbatch_in_infer"):
            limit = edit.value((role, key))
            if limit:
                held = limit // (config.sequence_length or limit)
                held = max(1, min(held, MAX_SEQUENCES_PER_MICRO_BATCH))
                own = length
                if role == "reward":
                    own += 2 + length % 2  # an end token, padding, and a multiple of two tensor-parallel ranks
                edit.set((role, key), held * own, "as many of the longest sequences as fit the recipe's, at most 4")
        forward = edit.value((role, "infer_batch_size"))
        if forward and forward > MAX_FORWARD_BATCH and not edit.value((role, "use_dynamic_batching_in_infer")):
            edit.set((role, "infer_batch_size"), MAX_FORWARD_BATCH, SMALL)


def _shrink_sampling(edit: _Edit, role: str, tokens: int) -> None:
    path = (role, "generating_args", "max_new_tokens")
    if edit.given(*path):
        edit.set(path, min(edit.value(path) or tokens, tokens), SHORT)


def _response_tokens(recipe: int) -> int:
    return min(recipe, max(SHORTEST, min(recipe // RESPONSE_SHARE, LONGEST)))

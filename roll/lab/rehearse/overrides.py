"""The overrides that make a recipe a run in miniature, each with its reason."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roll.algorithms.options.shaping_options import SCORED
from roll.base.schema import Tree, value_at
from roll.configs.agentic import AgenticConfig
from roll.configs.defaults import OWN_MODEL_ROLES
from roll.configs.devices.megatron import CUDA_ONLY, LAYER_SPLITS
from roll.configs.pipeline import BaseConfig, RLConfig, RLVRConfig
from roll.configs.roles import DEVICE_ROLES, EngineRoleConfig
from roll.configs.scoring.built_in_rewards import scoring_role
from roll.lab.rehearse.inputs import Inputs
from roll.lab.rehearse.model import POSITIONS
from roll.lab.rehearse.sizes import Placement, SmallBatch, shrink_batch, shrink_layouts

if TYPE_CHECKING:
    from roll.rollout.source import SampleBatch

Override = tuple[str, str, dict[str, Any]]
"""Reason, section and values of keys: None leaves a key out, and what has no reason is not listed as a change."""

SHORTEST, LONGEST = 16, 32
"""Fewest tokens of `prompt_length`, and tokens of a response, unless the recipe's are shorter."""

ANY_SCORE = 1e9
"""Above every score, so that a query filter is used but drops nothing."""

SECONDS = {
    "start_timeout_s": 600.0,
    "rpc_timeout_s": 600.0,
    "sync_timeout_s": 180.0,
    "actor_infer.generation_timeout_s": 180.0,
    "trajectory_timeout_s": 600.0,
    "env_step_timeout_s": 30.0,
    "async_training.batch_deadline_s": 900.0,
}
"""Shortest limits of a rehearsal."""

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

MODEL = "a small random model"
SMALL = "a small batch of the same structure"
SHORT = "short texts of a random model"
BUSY = "processes share a few cores"
NO_GPU = "needs a GPU"
OPENED = "opened: a random model gives a whole group one score, and no group would be left"
SLOTS = "parallel sizes above 1 become 2, on CPU slots of one machine"
DIFFERS = "scores of a group differ, so that the loss has a gradient"
IN_ITS_FOLDER = "everything is written to the rehearsal's folder, and nothing is sent"
RESUMED = "a checkpoint is written and resumed"


class AlternatingScores:
    """Adds 0.1 to the score of every other sample: agents with random weights get the same score from most games."""

    def __init__(self, config: RLConfig) -> None:
        pass

    def before_learning(self, batch: SampleBatch, step: int) -> None:
        """Changes `scores` [B]."""
        batch.data.batch["scores"][::2] += 0.1


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
    tree, changes = copy.deepcopy(config.source.tree), list[Change]()
    for reason, section, values in _overrides(config, inputs, placement, folder, steps):
        for key, value in values.items():
            path = f"{section}.{key}" if section else key
            before = _removed(tree, section, key) if value is None else value_at(config, path)
            if value is not None:
                _section(tree, section)[key] = value
            if reason and before != value:
                changes.append(Change(path, before, value, reason))
    return Rehearsal(tree, changes, placement)


def _removed(tree: Tree, section: str, key: str) -> Any:
    """Takes a key out; its value, None where it was not given."""
    given = value_at(tree, section) if section else tree
    return given.pop(key, None) if isinstance(given, dict) else None


def _section(tree: Tree, path: str) -> Tree:
    for name in filter(None, path.split(".")):
        if not isinstance(tree.get(name), dict):
            tree[name] = {}
        tree = tree[name]
    return tree


def _lowered(config: BaseConfig, reason: str, section: str, **most: int) -> Override:
    """Values above these become these."""
    path = f"{section}.".lstrip(".")
    return reason, section, {key: limit for key, limit in most.items() if (value_at(config, path + key) or 0) > limit}


def _overrides(config: BaseConfig, inputs: Inputs, placement: Placement, folder: str, steps: int) -> Iterator[Override]:
    yield from _run(config, folder, steps)
    yield from _models_and_data(config, inputs)
    yield from _roles(config, placement)
    prompt, response = max(SHORTEST, inputs.prompt_tokens), min(config.response_length or LONGEST, LONGEST)
    turns = max(inputs.actions.values(), default=1)
    if isinstance(config, RLConfig):
        batch = shrink_batch(config, placement.layouts["actor_train"].data, turns)
        yield from _reinforcement(config, batch, folder)
    else:
        training = config.actor_train.training_args
        sizes = (training.per_device_train_batch_size, training.gradient_accumulation_steps)
        batch = SmallBatch(1, 1, *(min(size, 2) for size in sizes))
    if isinstance(config, AgenticConfig):
        yield from _agents(config, batch, inputs)
        sequence = inputs.prompt_tokens + turns * (response + inputs.turn_tokens)
        yield f"holds {turns} turns of the environments", "", {"sequence_length": sequence}
        yield SHORT, "", {"max_tokens_per_step": response}
    else:
        yield "the longest prompt of the rehearsal", "", {"prompt_length": prompt}
        if isinstance(config, RLVRConfig):
            yield from _rewards(config, batch, inputs)
            sequence = prompt + response
            yield SHORT, "", {"response_length": response}
            yield "", "", {"sequence_length": None}
        else:
            sequence = max(inputs.sequence_tokens, prompt + 1)
            yield "the longest example of the rehearsal", "", {"sequence_length": sequence}
            yield "", "", {"response_length": None}
    yield from _training(config, batch, sequence)
    for path, least in SECONDS.items():
        if (value_at(config, path) or least) < least:
            section, _, key = path.rpartition(".")
            yield BUSY, section, {key: least}


def _run(config: BaseConfig, folder: str, steps: int) -> Iterator[Override]:
    yield "", "", {"pipeline": config.pipeline}
    kept = ("output_dir", "rollout_dump_dir")
    others = [name for name in config.source.tree if name.endswith("_dir") and name not in kept]
    yield IN_ITS_FOLDER, "", dict.fromkeys(others)
    yield IN_ITS_FOLDER, "", {"output_dir": folder}
    for tracker, options in config.tracker_kwargs.items():
        sent = [name for name in options if name.endswith(("dir", "uri")) or name in ACCOUNT_OPTIONS]
        yield IN_ITS_FOLDER, f"tracker_kwargs.{tracker}", dict.fromkeys(sent)
    yield "runs here", "", {"platform": "cpu"}
    yield "a rehearsal", "", {"max_steps": steps}
    yield RESUMED, "", {"save_checkpoint": True, "save_steps": 1, "max_ckpt_to_keep": 0, "resume_from_checkpoint": None}
    if config.track_with:
        yield "a rehearsal", "", {"logging_steps": 1}
    if config.eval_steps:
        yield "one validation before the first step and one after the last", "", {"eval_steps": steps}
    yield "a random model does not reach it", "", {"target_loss": None}


def _models_and_data(config: BaseConfig, inputs: Inputs) -> Iterator[Override]:
    """A random model for every name; roles without one of their own take `pretrain`."""
    main = config.actor_train.model_args.model_name_or_path or ""
    yield inputs.reasons.get("model", MODEL), "", {"pretrain": inputs.models[main]}
    for role, section in config.device_roles().items():
        name = section.model_args.model_name_or_path or ""
        own = name != main or role in OWN_MODEL_ROLES
        reason = MODEL if own or main != config.pretrain else ""
        yield reason, f"{role}.model_args", {"model_name_or_path": inputs.models[name] if own else None}
    yield "it belongs to the model of the recipe", "actor_train.model_args", {"adapter_name_or_path": None}
    for role, files in inputs.files.items():
        yield inputs.reasons.get(role, "a few rows"), f"{role}.data_args", {"file_name": files}


def _roles(config: BaseConfig, placement: Placement) -> Iterator[Override]:
    yield SLOTS, "", {"num_devices_per_node": placement.slots}
    unused = [role for role in DEVICE_ROLES if role not in placement.layouts]
    yield "the recipe does not use it", "", dict.fromkeys(unused)
    for role, layout in placement.layouts.items():
        yield SLOTS, role, {"device_mapping": placement.devices[role]}
        yield "what a CPU computes fast and exactly", f"{role}.model_args", {"dtype": "fp32"}
        options = f"{role}.strategy_args.strategy_config"
        if isinstance(getattr(config, role), EngineRoleConfig):
            yield SLOTS, role, {"num_gpus_per_worker": layout.tensor}
            yield _lowered(config, "memory is reserved for all of them", role, max_running_requests=64)
            of_gpu = [name for name in value_at(config, options) if name not in ENGINE_OPTIONS]
            yield "kernels and memory of a GPU", options, dict.fromkeys(of_gpu)
            continue
        sizes = {"tensor_model_parallel_size": layout.tensor, "pipeline_model_parallel_size": layout.pipeline}
        sizes |= {"context_parallel_size": layout.context}
        yield SLOTS, options, sizes
        yield _lowered(config, SLOTS, options, expert_model_parallel_size=layout.expert)
        yield _lowered(config, SLOTS, options, expert_tensor_parallel_size=layout.expert_tensor or layout.tensor)
        if value_at(config, f"{options}.sequence_parallel") and layout.tensor == 1:
            yield "there is one tensor-parallel rank", options, {"sequence_parallel": False}
        yield NO_GPU, options, dict.fromkeys((*CUDA_ONLY, "attention_backend", "cp_comm_type"))
        splits = (*LAYER_SPLITS, "recompute_num_layers")
        yield "the small model has one layer for each stage", options, dict.fromkeys(splits)
        if value_at(config, f"{role}.model_args.attn_implementation") == "fa2":
            yield NO_GPU, f"{role}.model_args", {"attn_implementation": "auto"}


def _training(config: BaseConfig, batch: SmallBatch, sequence: int) -> Iterator[Override]:
    sizes = {"per_device_train_batch_size": batch.micro_batch, "gradient_accumulation_steps": batch.accumulation}
    for role in config.trained_roles():
        if role == "actor_train":
            yield SMALL, "actor_train.training_args", sizes
        else:
            yield "follows from actor_train's", f"{role}.training_args", dict.fromkeys(sizes)
        yield _lowered(config, "a short run", f"{role}.training_args", warmup_steps=1)
    for role, section in config.device_roles().items():
        for key in ("max_tokens_per_microbatch_in_train", "max_tokens_per_microbatch_in_infer"):
            if getattr(section, key, 0):  # an end token of a reward model, and a multiple of the tensor-parallel ranks
                yield "two of the longest sequences", role, {key: 2 * (sequence + 8 - sequence % 4)}
        if not getattr(section, "use_dynamic_batching_in_infer", True):
            yield _lowered(config, SMALL, role, infer_batch_size=4)  # so that there are several


def _reinforcement(config: RLConfig, batch: SmallBatch, folder: str) -> Iterator[Override]:
    yield IN_ITS_FOLDER, "", {"rollout_dump_dir": f"{folder}/samples"}
    yield "every weight update is verified", "", {"verify_weights": "always"}
    yield "a weight update has several buckets", "", {"model_update_buffer_size_mb": 1}
    yield _lowered(config, "a rehearsal", "", critic_warmup=1)
    if config.adv_estimator == "pass_at_k":
        yield SMALL, "", {"pass_k": min(value_at(config, "pass_k"), batch.group_size - 1)}
    queue = config.async_training.max_queue_size
    if queue is not None:
        samples = batch.groups * batch.group_size
        before = config.groups_per_batch * config.num_return_sequences_in_group
        least = config.async_training.min_batch_count * samples
        yield SMALL, "async_training", {"max_queue_size": max(least, round(queue * samples / before))}
    if config.difficulty_mask:
        yield OPENED, "", {"difficulty_low_threshold": -ANY_SCORE, "difficulty_high_threshold": ANY_SCORE}
    if "num_return_sequences_in_group" in config.source.tree or not isinstance(config, AgenticConfig):
        yield SMALL, "", {"num_return_sequences_in_group": batch.group_size}
    for role in ("actor_infer", "validation"):
        yield SHORT, f"{role}.generating_args", {"max_new_tokens": None}


def _rewards(config: RLVRConfig, batch: SmallBatch, inputs: Inputs) -> Iterator[Override]:
    yield SMALL, "", {"rollout_batch_size": batch.groups}
    if not config.length_penalty_per_token and SCORED.holds(config, config):
        yield DIFFERS, "", {"length_penalty_per_token": 0.01}
    yield SMALL, "actor_infer.generating_args", {"num_return_sequences": None}
    yield _lowered(config, SMALL, "validation.generating_args", num_return_sequences=2)
    data = config.actor_train.data_args
    if data.domain_interleave_probs:
        equal = {name: 1.0 if share > 0 else 0.0 for name, share in data.domain_interleave_probs.items()}
        yield "every domain in a few prompts", "actor_train.data_args", {"domain_interleave_probs": equal}
    for name, reward in config.rewards.items():
        section, role = f"rewards.{name}", scoring_role(reward)
        yield _lowered(config, BUSY, section, world_size=2)
        if role == "judge":
            yield "a random judge writes digits, and the last one is its grade", section, RANDOM_JUDGE
            length = JUDGE_TOKENS + len(reward.prompt_template.encode()) + 2 * inputs.prompt_tokens
            yield SHORT, "judge", {"sequence_length": min(POSITIONS, length)}
        if role == "reward" or (role and reward.template is not None):
            yield "its tokenizer is that of the policy", section, {"template": data.template}
        if reward.query_filter_config.type != "no_filter":
            rule = f"{section}.query_filter_config"
            limits = {"threshold_down": -ANY_SCORE, "threshold_up": ANY_SCORE, "std_threshold": None}
            yield OPENED, rule, {"type": "mean_filter"}
            yield OPENED, f"{rule}.filter_args", limits


def _agents(config: AgenticConfig, batch: SmallBatch, inputs: Inputs) -> Iterator[Override]:
    yield SMALL, "", {"rollout_batch_size": batch.groups * batch.group_size}
    if not config.async_training.batch_hook_class and SCORED.holds(config, config):
        hook = f"{AlternatingScores.__module__}:{AlternatingScores.__name__}"
        yield DIFFERS, "async_training", {"batch_hook_class": hook}
    yield "", "", {"max_actions_per_traj": None}
    for tag, entry in config.custom_envs.items():  # all of the entry, which may be a default of the recipe
        if entry.is_agent:
            runs: Tree = {"agent": entry.agent} if entry.agent else {"command": entry.command}
            tasks = {"tasks": {"file_name": entry.tasks.file_name}} if entry.tasks.file_name else {}
            sizes = {"max_requests": entry.max_requests, "branches": entry.branches}
            yield "", f"custom_envs.{tag}", {**runs, **tasks, **sizes}
        else:
            options = {name: value for name, value in entry.env_config.items() if name != "max_steps"}
            yield "", f"custom_envs.{tag}", {"env_type": entry.env_type, "env_config": options}
            yield "a few turns", f"custom_envs.{tag}", {"max_steps": inputs.actions[tag]}
        yield SHORT, f"custom_envs.{tag}", {"max_tokens_per_step": None}
    yield from _environments(config, "train_env_manager", batch.groups, batch.group_size)
    if config.eval_steps:
        size = min(config.val_env_manager.group_size, 2)
        groups = max(2, len(config.tags_of(config.val_env_manager)))
        yield from _environments(config, "val_env_manager", groups, size)
        yield SMALL, "", {"val_batch_size": groups * size}


def _environments(config: AgenticConfig, section: str, groups: int, size: int) -> Iterator[Override]:
    manager = getattr(config, section)
    tags = len(config.tags_of(manager))
    groups = max(tags, min(manager.num_env_groups or groups, groups))
    parts = [(groups + number) // tags for number in range(tags)]
    yield SMALL, section, {"num_env_groups": groups, "group_size": size, "num_groups_partition": parts}
    yield _lowered(config, SMALL, section, group_size_redundancy=1)
    if manager.max_env_num_per_worker:
        processes, redundancy = min(manager.processes, 2), min(manager.group_size_redundancy, 1)
        yield SMALL, section, {"max_env_num_per_worker": -(-groups * (size + redundancy) // processes)}

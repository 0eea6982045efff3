"""Turns the configuration of a recipe into one of a run in miniature, and lists every change with its reason."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from roll.algorithms.options.shaping_options import SCORED
from roll.base.schema import Tree, value_at
from roll.configs.agentic import AgenticConfig
from roll.configs.defaults import OWN_MODEL_ROLES
from roll.configs.devices.megatron import CUDA_ONLY, LAYER_SPLITS
from roll.configs.pipeline import BaseConfig, RLConfig, RLVRConfig
from roll.configs.roles import DEVICE_ROLES, EngineRoleConfig, MegatronRoleConfig
from roll.configs.scoring.built_in_rewards import scoring_role
from roll.configs.scoring.rewards import RewardConfig
from roll.lab.rehearse.inputs import Inputs
from roll.lab.rehearse.model import POSITIONS
from roll.lab.rehearse.sizes import Placement, SmallBatch, shrink_batch, shrink_layouts

if TYPE_CHECKING:
    from roll.rollout.source import SampleBatch

SHORTEST = 16
"""Fewest tokens of `prompt_length`."""

LONGEST = 32
"""Tokens of a response, unless the recipe's are shorter."""

MAX_VALIDATION_SAMPLES = 2
"""Samples of a validation prompt or task."""

MAX_FORWARD_BATCH = 4
"""Samples of a forward micro-batch, so that there are several."""

FEW_PROCESSES = 2
"""Processes of one reward, or of the environments."""

MAX_RUNNING_REQUESTS = 64
"""Requests of one engine, whose memory is reserved for all of them."""

ENGINE_OPTIONS = ("load_format", "schedule_policy", "disable_radix_cache")
"""Options of SGLang that mean the same on a CPU; the others choose kernels or divide GPU memory."""

KEPT_FOLDERS = ("output_dir", "rollout_dump_dir")
"""Folders of the recipe that become others of the rehearsal; the others are left out."""

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
    edit = _Section(config, copy.deepcopy(config.source.tree), [])
    _shrink_run(edit, config, folder, steps)
    _replace_models(edit, config, inputs)
    edit.set(SLOTS, num_devices_per_node=placement.slots)
    for role in DEVICE_ROLES:
        if role in placement.layouts:
            _shrink_role(edit.at(role), getattr(config, role), placement, role)
        else:
            edit.drop("the recipe does not use it", role)
    if isinstance(config, RLConfig):
        turns = max(inputs.actions.values(), default=1)
        batch = shrink_batch(config, placement.layouts["actor_train"].data, turns)
        _shrink_rl(edit, config, batch)
        if isinstance(config, RLVRConfig):
            _shrink_rlvr(edit, config, batch, inputs)
        elif isinstance(config, AgenticConfig):
            _shrink_agents(edit, config, batch, inputs)
    else:
        batch = _shrink_examples(edit, config, inputs)
    _shrink_training(edit, config, batch)
    for path, least in LEAST_SECONDS.items():
        *sections, key = path.split(".")
        if (value_at(config, path) or least) < least:
            edit.at(*sections).set("the processes share a few cores", **{key: least})
    return Rehearsal(edit.root, edit.changes, placement)


@dataclass(frozen=True)
class _Section:
    """A section of the rehearsal's mapping while it is made; a change is listed if it changes the recipe's value."""

    config: BaseConfig
    root: Tree
    changes: list[Change]
    path: tuple[str, ...] = ()

    def at(self, *names: str) -> _Section:
        return replace(self, path=(*self.path, *names))

    def set(self, reason: str, **values: Any) -> None:
        section = self.root
        for name in self.path:
            if not isinstance(section.get(name), dict):
                section[name] = {}
            section = section[name]
        for key, value in values.items():
            before = self.value(key)
            section[key] = value
            if before != value:
                self.changes.append(Change(".".join((*self.path, key)), before, value, reason))

    def drop(self, reason: str, *keys: str) -> None:
        """Leaves keys out that the recipe gives; listed if there is a reason."""
        for key in keys:
            if key in self.given:
                before = self.given.pop(key)
                if reason:
                    self.changes.append(Change(".".join((*self.path, key)), before, None, reason))

    @property
    def given(self) -> Tree:
        """The section as the recipe gives it, and as it has been changed."""
        section: Any = self.root
        for name in self.path:
            section = section.get(name) if isinstance(section, dict) else None
        return section if isinstance(section, dict) else {}

    def value(self, key: str) -> Any:
        """The recipe's value of a key, with defaults; None if it has no such key."""
        value = value_at(self.config, ".".join((*self.path, key)))
        return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _shrink_run(edit: _Section, config: BaseConfig, folder: str, steps: int) -> None:
    edit.set("", pipeline=config.pipeline)
    edit.drop(IN_ITS_FOLDER, *[name for name in edit.given if name.endswith("_dir") and name not in KEPT_FOLDERS])
    edit.set(IN_ITS_FOLDER, output_dir=folder)
    for name, options in config.tracker_kwargs.items():
        sent = [key for key in options if key.endswith(("dir", "uri")) or key in ACCOUNT_OPTIONS]
        edit.at("tracker_kwargs", name).drop(IN_ITS_FOLDER, *sent)
    edit.set("runs here", platform="cpu")
    edit.set("a rehearsal", max_steps=steps)
    edit.set(RESUMED, save_checkpoint=True, save_steps=1, max_ckpt_to_keep=0)
    edit.drop(RESUMED, "resume_from_checkpoint")
    if config.track_with:
        edit.set("a rehearsal", logging_steps=1)
    if config.eval_steps:
        edit.set("one validation before the first step and one after the last", eval_steps=steps)
    edit.drop("a random model does not reach it", "target_loss")


def _replace_models(edit: _Section, config: BaseConfig, inputs: Inputs) -> None:
    """A random model for every name; roles without one of their own take `pretrain`."""
    main = config.actor_train.model_args.model_name_or_path or ""
    edit.root["pretrain"] = inputs.models[main]
    reason = inputs.reasons.get("model", "a small random model")
    edit.changes.append(Change("pretrain", main, inputs.models[main], reason))
    for role in config.device_roles():
        section = edit.at(role, "model_args")
        name = section.value("model_name_or_path")
        if name == main and role not in OWN_MODEL_ROLES:
            section.drop("", "model_name_or_path")
        elif name in inputs.models:
            section.set("a small random model", model_name_or_path=inputs.models[name])
    for role, files in inputs.files.items():
        edit.at(role, "data_args").set(inputs.reasons.get(role, "a few rows"), file_name=files)


def _shrink_role(edit: _Section, role: EngineRoleConfig | MegatronRoleConfig, placement: Placement, name: str) -> None:
    layout, options = placement.layouts[name], edit.at("strategy_args", "strategy_config")
    edit.set(SLOTS, device_mapping=placement.devices[name])
    edit.at("model_args").set("what a CPU computes fast and exactly", dtype="fp32")
    if isinstance(role, EngineRoleConfig):
        edit.set(SLOTS, num_gpus_per_worker=layout.tensor)
        requests = min(role.max_running_requests, MAX_RUNNING_REQUESTS)
        edit.set("memory is reserved for all of them", max_running_requests=requests)
        options.drop("kernels and memory of a GPU", *[key for key in options.given if key not in ENGINE_OPTIONS])
        return
    options.set(SLOTS, tensor_model_parallel_size=layout.tensor, pipeline_model_parallel_size=layout.pipeline)
    if role.strategy_args.strategy_config.sequence_parallel and layout.tensor == 1:
        options.set("there is one tensor-parallel rank", sequence_parallel=False)
    options.drop(NO_GPU, *CUDA_ONLY, "attention_backend")
    options.drop("the small model has one layer for each stage", *LAYER_SPLITS, "recompute_num_layers")
    if role.model_args.attn_implementation == "fa2":
        edit.at("model_args").set(NO_GPU, attn_implementation="auto")


def _shrink_rl(edit: _Section, config: RLConfig, batch: SmallBatch) -> None:
    if config.adv_estimator == "pass_at_k":
        edit.set(SMALL, pass_k=min(value_at(config, "pass_k"), batch.group_size - 1))
    if config.uses_critic and config.critic_warmup:
        edit.set("a rehearsal", critic_warmup=1)
    edit.set(IN_ITS_FOLDER, rollout_dump_dir=f"{edit.root['output_dir']}/samples")
    edit.set("every weight update is verified", verify_weights="always")
    edit.set("a weight update has several buckets", model_update_buffer_size_mb=1)
    queue = config.async_training.max_queue_size
    if queue is not None:
        samples = batch.groups * batch.group_size
        group = 1 if isinstance(config, AgenticConfig) else config.num_return_sequences_in_group
        before, least = config.rollout_batch_size * group, config.async_training.min_batch_count * samples
        edit.at("async_training").set(SMALL, max_queue_size=max(least, round(queue * samples / before)))
    if config.difficulty_mask:
        edit.set(OPENED, difficulty_low_threshold=-OPEN_THRESHOLD, difficulty_high_threshold=OPEN_THRESHOLD)
    if "num_return_sequences_in_group" in edit.given or not isinstance(config, AgenticConfig):
        edit.set(SMALL, num_return_sequences_in_group=batch.group_size)
    for role in ("actor_infer", "validation"):
        edit.at(role, "generating_args").drop(SHORT, "max_new_tokens")


def _shrink_rlvr(edit: _Section, config: RLVRConfig, batch: SmallBatch, inputs: Inputs) -> None:
    edit.set(SMALL, rollout_batch_size=batch.groups)
    if not config.length_penalty_per_token and SCORED.holds(config, config):
        edit.set(DIFFERS, length_penalty_per_token=LENGTH_PENALTY)
    edit.set("the longest prompt of the rehearsal", prompt_length=max(SHORTEST, inputs.prompt_tokens))
    edit.set(SHORT, response_length=min(config.response_length or LONGEST, LONGEST))
    edit.drop("", "sequence_length")
    edit.at("actor_infer", "generating_args").drop(SMALL, "num_return_sequences")
    sampling = edit.at("validation", "generating_args")
    if "num_return_sequences" in sampling.given:
        samples = min(sampling.value("num_return_sequences"), MAX_VALIDATION_SAMPLES)
        sampling.set(SMALL, num_return_sequences=samples)
    for name, reward in config.rewards.items():
        _shrink_reward(edit, config, edit.at("rewards", name), reward, inputs)
    shares = config.actor_train.data_args.domain_interleave_probs
    if shares:
        equal = {name: 1.0 if share > 0 else 0.0 for name, share in shares.items()}
        edit.at("actor_train", "data_args").set("every domain in a few prompts", domain_interleave_probs=equal)


def _shrink_reward(edit: _Section, config: RLVRConfig, section: _Section, reward: RewardConfig, inputs: Inputs) -> None:
    if reward.world_size > FEW_PROCESSES:
        section.set("processes share a few cores", world_size=FEW_PROCESSES)
    scored_by = scoring_role(reward)
    if scored_by == "judge":
        section.set(GRADED, **RANDOM_JUDGE)
        length = min(POSITIONS, JUDGE_TOKENS + len(reward.prompt_template.encode()) + 2 * inputs.prompt_tokens)
        edit.at("judge").set(SHORT, sequence_length=length)
    if scored_by == "reward" or (scored_by and reward.template is not None):
        section.set("its tokenizer is that of the policy", template=config.actor_train.data_args.template)
    if reward.query_filter_config.type != "no_filter":
        opened = {"threshold_down": -OPEN_THRESHOLD, "threshold_up": OPEN_THRESHOLD}
        section.set(OPENED, query_filter_config={"type": "mean_filter", "filter_args": opened})


def _shrink_agents(edit: _Section, config: AgenticConfig, batch: SmallBatch, inputs: Inputs) -> None:
    tokens, turns = min(config.response_length or LONGEST, LONGEST), max(inputs.actions.values())
    edit.set(SMALL, rollout_batch_size=batch.groups * batch.group_size)
    if not config.async_training.batch_hook_class and SCORED.holds(config, config):
        hook = f"{AlternatingScores.__module__}:{AlternatingScores.__name__}"
        edit.at("async_training").set(DIFFERS, batch_hook_class=hook)
    length = inputs.prompt_tokens + turns * (tokens + inputs.turn_tokens)
    edit.set(f"holds {turns} turns of the environments", sequence_length=length)
    edit.set(SHORT, max_tokens_per_step=tokens)
    edit.drop("", "max_actions_per_traj")
    edit.root.setdefault(
        "custom_envs",
        {
            tag: {"env_type": entry.env_type, "env_config": dict(entry.env_config)}
            for tag, entry in config.custom_envs.items()
        },
    )
    for tag in config.custom_envs:
        section = edit.at("custom_envs", tag)
        section.at("env_config").drop("", "max_steps")
        section.set("a few turns", max_steps=inputs.actions[tag])
        section.drop(SHORT, "max_tokens_per_step")
    _shrink_environments(edit, config, "train_env_manager", batch.groups, batch.group_size)
    if config.eval_steps:
        size = min(config.val_env_manager.group_size, MAX_VALIDATION_SAMPLES)
        groups = max(2, len(config.tags_of(config.val_env_manager)))
        _shrink_environments(edit, config, "val_env_manager", groups, size)
        edit.set(SMALL, val_batch_size=groups * size)


def _shrink_environments(edit: _Section, config: AgenticConfig, name: str, groups: int, size: int) -> None:
    manager, section = getattr(config, name), edit.at(name)
    tags = len(config.tags_of(manager))
    groups = max(tags, min(manager.num_env_groups or groups, groups))
    parts = [(groups + number) // tags for number in range(tags)]
    section.set(SMALL, num_env_groups=groups, group_size=size, num_groups_partition=parts)
    redundancy = min(manager.group_size_redundancy, 1)
    if redundancy:
        section.set(SMALL, group_size_redundancy=redundancy)
    if manager.max_env_num_per_worker:
        processes = min(manager.processes, FEW_PROCESSES)
        section.set(SMALL, max_env_num_per_worker=-(-groups * (size + redundancy) // processes))


def _shrink_examples(edit: _Section, config: BaseConfig, inputs: Inputs) -> SmallBatch:
    """Prompts with an answer, or with two; returns the batch, which is one optimizer step."""
    prompt = max(SHORTEST, inputs.prompt_tokens)
    edit.set("the longest prompt of the rehearsal", prompt_length=prompt)
    edit.set("the longest example of the rehearsal", sequence_length=max(inputs.sequence_tokens, prompt + 1))
    edit.drop("", "response_length")
    training = config.actor_train.training_args
    accumulation = min(training.gradient_accumulation_steps, 2)
    return SmallBatch(1, 1, min(training.per_device_train_batch_size, 2), accumulation)


def _shrink_training(edit: _Section, config: BaseConfig, batch: SmallBatch) -> None:
    sizes = {"per_device_train_batch_size": batch.micro_batch, "gradient_accumulation_steps": batch.accumulation}
    edit.at("actor_train", "training_args").set(SMALL, **sizes)
    for role, worker in config.trained_roles().items():
        section = edit.at(role, "training_args")
        if role != "actor_train":
            section.drop("follows from actor_train's", *sizes)
        if worker.training_args.warmup_steps > 1:
            section.set("a short run", warmup_steps=1)
    tree = edit.root
    length = tree.get("sequence_length") or tree["prompt_length"] + tree["response_length"]
    for role in config.device_roles():
        section = edit.at(role)
        for key in ("max_tokens_per_microbatch_in_train", "max_tokens_per_microbatch_in_infer"):
            if section.value(key):  # an end token of a reward model, and a multiple of the tensor-parallel ranks
                section.set("two of the longest sequences", **{key: 2 * (length + 8 - length % 4)})
        forward = section.value("infer_batch_size")
        if forward and forward > MAX_FORWARD_BATCH and not section.value("use_dynamic_batching_in_infer"):
            section.set(SMALL, infer_batch_size=MAX_FORWARD_BATCH)

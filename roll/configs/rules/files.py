"""Models, datasets, checkpoints and folders on this machine."""

from __future__ import annotations

import contextlib
import os
import reprlib
from collections.abc import Callable
from pathlib import Path

from roll.base.errors import Report, either, similar_path, unreachable
from roll.base.schema import MAX_EXPLAINED
from roll.configs.defaults import OWN_MODEL_ROLES
from roll.configs.megatron import MegatronTrainConfig, check_recompute, stage_layers
from roll.configs.pipeline import BaseConfig, RLConfig
from roll.configs.roles import TEMPLATES, EngineRoleConfig, MegatronRoleConfig, RoleConfig
from roll.configs.rules.learning import check_name
from roll.configs.scoring_roles import JudgeConfig, ScoringEngineConfig
from roll.configs.trackers import METRICS_FILE
from roll.hub.find import folder_files
from roll.hub.generated import is_generated
from roll.hub.names import CONFIG_NAME, HubError, hub_name, local_model, other_reading
from roll.hub.special_tokens import read_tokenizer
from roll.hub.splits import READABLE, wanted_splits
from roll.models.families.hf_config import ADAPTER_CONFIG, UnsupportedModel, read_positions
from roll.models.families.registry import value_architectures
from roll.models.families.shape import ModelShape, read_model_shape

LONGEST_NAME = 200
"""Characters of an `exp_name`, which trackers use as the name of a file."""

COMPLETE = ("COMPLETE", "step-*/COMPLETE", "checkpoints/step-*/COMPLETE")
"""Files of which a checkpoint, or a folder with checkpoints, has one."""

TOP_K_BYTES = 8
"""Memory of one of the teacher's `opd_top_k` tokens of a batch: its id and its log-prob."""

LARGE_TOP_K_BYTES, MAX_TOP_K_BYTES = 4 * 2**30, 64 * 2**30
"""Memory for these tokens that is warned of, and that is refused: the driver holds them and sends them to the ranks."""


def check_files(config: BaseConfig, report: Report) -> None:
    """Names can be printed; data files have a known type and exist; a checkpoint given by path exists."""
    for key in ("exp_name", "output_dir", "logging_dir", "checkpoint_dir", "rollout_dump_dir"):
        value = getattr(config, key, None)
        if isinstance(value, str) and not value.isprintable():
            report.error(key, f"{value!r} has characters that cannot be printed; remove them")
    if len(config.exp_name) > LONGEST_NAME:
        report.error("exp_name", f"has {len(config.exp_name):,} characters; use at most {LONGEST_NAME}")
    if ".." in Path(config.exp_name).parts or os.path.isabs(config.exp_name):
        report.error("exp_name", f"{config.exp_name} leads out of the folder of the run; use a name without ..")
    if "save_steps" in config.source.given and config.save_steps > config.max_steps > 0:
        report.warn(
            "save_steps", f"{config.save_steps} is above max_steps {config.max_steps}: only the last step is saved"
        )
    for role in config.data_roles():
        given = [os.path.realpath(name) for name in getattr(config, role).data_args.file_name]
        if twice := next((name for name in given if given.count(name) > 1), None):
            report.warn(f"{role}.data_args.file_name", f"lists {twice} twice, so its rows count twice; list it once")
        check_name(f"{role}.data_args.template", getattr(config, role).data_args.template, TEMPLATES, report)
        for name in getattr(config, role).data_args.file_name:
            path = f"{role}.data_args.file_name"
            if hub_name(name, "dataset") is not None or is_generated(name):
                continue  # `roll.plan.inputs` looks it up
            if os.path.isdir(name):
                _check_dataset_folder(name, role, config, report)
            elif not name.endswith(READABLE):
                kinds = f"use a file that ends in {' or '.join(READABLE)}{other_reading(name, 'dataset')}"
                report.error(path, f"{name} has an unknown file type; {kinds}")
            elif not os.path.isfile(name) or unreachable(name):
                absent = "is not a file on this machine"
                explained = len(report.missing) < MAX_EXPLAINED
                report.missing_resource(path, f"{name} {_absence(name, absent, _is_data) if explained else absent}")
    _check_folders(config, report)
    checkpoint = config.resume_from_checkpoint
    if isinstance(checkpoint, str) and (not os.path.isdir(checkpoint) or unreachable(checkpoint)):
        otherwise = "is not a folder; use a checkpoint's path, or true for the newest one of output_dir"
        reason = _absence(checkpoint, otherwise, Path.is_dir)
        report.missing_resource("resume_from_checkpoint", f"{checkpoint} {reason}")
    elif isinstance(checkpoint, str) and not any(next(Path(checkpoint).glob(each), None) for each in COMPLETE):
        report.missing_resource("resume_from_checkpoint", f"{checkpoint} holds no complete checkpoint")


def _check_dataset_folder(name: str, role: str, config: BaseConfig, report: Report) -> None:
    try:
        args = getattr(config, role).data_args
        folder_files(Path(name), args.subset, wanted_splits(role, args.split))
    except HubError as error:
        report.missing_resource(f"{role}.data_args.file_name", str(error))


def _absence(name: str, otherwise: str, fits: Callable[[Path], bool]) -> str:
    """Why nothing can be read at a path; if it is not there, with the most similar name in its folder that fits."""
    why = unreachable(name)
    if why:
        return f"cannot be read: {why}"
    like = similar_path(Path(name), fits)
    if like:
        return f"{otherwise}; did you mean {like}?"
    return otherwise if Path(name).is_absolute() else f"{otherwise}; relative paths start in {Path.cwd()}"


def _is_data(path: Path) -> bool:
    return path.suffix in READABLE and path.is_file()


def _is_model(path: Path) -> bool:
    return (path / CONFIG_NAME).is_file()


def _check_folders(config: BaseConfig, report: Report) -> None:
    reported: set[str] = set()
    models = {
        local_model(name).resolve(): role
        for role, worker in reversed(config.device_roles().items())
        if (name := worker.model_args.model_name_or_path) and os.path.isfile(local_model(name) / CONFIG_NAME)
    }
    checkpoints = Path(config.checkpoint_dir or Path(config.output_dir, "checkpoints")).resolve()
    folders = {key: getattr(config, key, None) for key in ("output_dir", "logging_dir", "checkpoint_dir")}
    folders["rollout_dump_dir"] = getattr(config, "rollout_dump_dir", None)
    for tracker in sorted({*config.track_with} & {*config.tracker_kwargs}):
        for option in ("log_dir", "logdir"):
            folders[f"tracker_kwargs.{tracker}.{option}"] = config.tracker_kwargs[tracker].get(option)
    for role, worker in config.device_roles().items():
        if isinstance(worker, EngineRoleConfig):
            key = f"{role}.strategy_args.strategy_config.crash_dump_folder"
            folders[key] = worker.strategy_args.strategy_config.get("crash_dump_folder")
    for key, folder in folders.items():
        if folder is None:
            continue
        why, place = obstacle(Path(folder)), Path(folder).resolve()
        if why is not None and why not in reported:
            report.missing_resource(key, f"{folder} {why}; use another")
            reported.add(why)
        inside = next((model for model in models if place.is_relative_to(model)), None)
        if str(folder).startswith("~"):
            if (user := Path(folder).parts[0]) not in reported:
                report.error(key, f"{folder} is of a user that this machine does not have; use another folder")
            reported.add(user)
        elif "://" in str(folder):
            report.error(key, f"{folder} is an address; use a folder of this machine")
        elif place == Path("/"):
            report.error(key, f"{folder} is the root folder; use a folder of its own")
        elif inside is not None:
            if str(inside) not in reported:
                report.error(
                    key, f"{folder} is inside {inside}, the model of {models[inside]}; use a folder of its own"
                )
            reported.add(str(inside))
        elif Path.cwd().is_relative_to(place):
            report.warn(key, f"{folder} contains the current folder; use a folder of its own, such as output/my_run")
        elif key not in ("output_dir", "checkpoint_dir") and place.is_relative_to(checkpoints):
            if any(part.startswith("step-") for part in place.relative_to(checkpoints).parts[:1]):
                report.error(key, f"{folder} is inside a checkpoint, which a run renames and deletes; use another")
            elif not Path(config.output_dir).resolve().is_relative_to(checkpoints):
                report.warn(key, f"{folder} is among the checkpoints in {checkpoints}; use another")
    if config.resume_from_checkpoint is False and os.path.isfile(os.path.join(config.output_dir, METRICS_FILE)):
        report.warn(
            "output_dir",
            f"{config.output_dir} has an earlier run, whose metrics and samples a new run replaces; use another "
            "folder, or continue it with resume_from_checkpoint=true",
        )


def obstacle(folder: Path) -> str | None:
    """Why a folder cannot be made or written; None if it can."""
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path) or path == path.parent)
    if not there.is_dir():
        return f"cannot be a folder, since {there} is a file"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"cannot be written, since this user has no access to {there}"
    if there.resolve().parts[1:2] in (("proc",), ("sys",)):
        return f"cannot be made, since {there} belongs to the kernel"
    for path in (folder, *(there / name for name in folder.relative_to(there).parts)):
        if (why := unreachable(path)) is not None:
            return f"cannot be used, since {reprlib.repr(path.name)} cannot be reached: {why}"
    return None


def _check_same_model(config: RLConfig, report: Report) -> None:
    names = [role.model_args.model_name_or_path for role in (config.actor_train, config.actor_infer)]
    folders = [local_model(name).resolve() for name in names if name]
    if len(folders) < 2 or folders[0] == folders[1]:
        return
    path, shapes = "actor_infer.model_args.model_name_or_path", []
    with contextlib.suppress(UnsupportedModel):  # reported with the role
        shapes = [read_model_shape(folder, value_head=False) for folder in folders]
    message = f"{names[1]} is not {names[0]}, the model of actor_train"
    if None not in shapes and shapes and shapes[0] != shapes[1]:
        report.error(path, f"{message}, and has another shape than the weights that it gets; leave it out")
    else:
        report.warn(path, f"{message}, whose weights replace its own before the first batch; leave it out")


def check_models(config: BaseConfig, report: Report) -> None:
    """The model of each role exists, is supported and fits the layout; a shared problem is reported once."""
    seen: set[str] = set()
    if isinstance(config, RLConfig):
        _check_same_model(config, report)
    for role, worker in config.device_roles().items():
        name = worker.model_args.model_name_or_path
        path = f"{role}.model_args.model_name_or_path"
        if role in OWN_MODEL_ROLES:
            _check_own_model(role, path, name, report)
            if name is None:
                continue
        if name is None:
            if not seen:
                report.error("pretrain", f"is not set, and neither is {path}; set it to the folder of a HF model")
            seen.add("")
            continue
        path = "pretrain" if name == config.pretrain else path
        if isinstance(worker, ScoringEngineConfig):
            _check_scoring_length(role, worker, name, report)
        try:
            shape = read_model_shape(local_model(name), worker.value_head)
        except UnsupportedModel as error:
            if name not in seen and not isinstance(worker, JudgeConfig):  # SGLang runs many that cannot be trained
                report.error(path, str(error))
            seen.add(name)
            continue
        if shape is None and name not in seen and hub_name(name, "model") is None:
            report.missing_resource(path, _model_absence(name))
        if shape is not None:
            _check_splits(role, worker, shape, report)
            if role == "reference" and isinstance(config, RLConfig) and config.opd_top_k is not None:
                _check_top_k(config, config.opd_top_k, shape, report)
            if name not in seen and role not in OWN_MODEL_ROLES:  # their tokens are others; longer texts have no score
                _check_positions(config, path, shape, report)
        seen.add(name)


def _check_top_k(config: RLConfig, top_k: int, shape: ModelShape, report: Report) -> None:
    count, length = min(top_k, shape.vocabulary), config.sequence_length or 0
    size = config.samples_per_batch * length * count * TOP_K_BYTES
    if size > LARGE_TOP_K_BYTES:
        whole = ", the whole vocabulary," if count < top_k or count == shape.vocabulary else ""
        message = (
            f"{count}{whole} for {config.samples_per_batch} samples of up to {length} tokens are "
            f"{size / 2**30:,.0f} GiB of ids and log-probs in the driver; use less, such as 64, or a smaller batch"
        )
        (report.error if size > MAX_TOP_K_BYTES else report.warn)("opd_top_k", message)


def _check_own_model(role: str, path: str, name: str | None, report: Report) -> None:
    """The model is given, and that of role reward is one whose output is a value: another head would start at 0."""
    if name is None:
        model = "a reward model, such as one that pipeline reward_model has trained"
        report.error(path, f"is not set; name {model if role == 'reward' else 'the model that grades'}")
    if name is None or role != "reward":
        return
    with contextlib.suppress(UnsupportedModel):  # reported with those of other roles
        shape = read_model_shape(local_model(name), value_head=True)
        if shape is not None and shape.architecture not in value_architectures():
            report.error(
                path,
                f"{name} is a {shape.architecture}, which has no head for scores; use a reward model, such as a "
                f"{shape.architecture.replace('ForCausalLM', 'ForSequenceClassification')}",
            )


def _check_scoring_length(role: str, worker: ScoringEngineConfig, name: str, report: Report) -> None:
    positions, path = read_positions(local_model(name)), f"{role}.sequence_length"
    if positions is None and worker.sequence_length is None and os.path.isfile(local_model(name) / CONFIG_NAME):
        report.error(path, f"is not set, and {name} does not say how many positions it has; set it, such as to 8192")
    if positions is not None and (worker.sequence_length or 0) > positions:
        report.error(
            path, f"{worker.sequence_length} is above max_position_embeddings {positions} of {name}; use at most that"
        )


def check_head_sizes(config: BaseConfig, platform: str, report: Report) -> None:
    """On a CPU, SGLang reads no `head_dim` of some families: an engine would end where that is not hidden / heads."""
    if platform != "cpu":
        return
    for role, worker in config.device_roles().items():
        name, shape = worker.model_args.model_name_or_path, None
        if name is not None and isinstance(worker, EngineRoleConfig):
            with contextlib.suppress(UnsupportedModel):  # of a judge; `check_models` refuses that of another role
                shape = read_model_shape(local_model(name), worker.value_head)
        if shape is None or shape.family.sglang.reads_head_dim:
            continue
        if shape.head_dim != shape.hidden // shape.heads:
            report.error(
                "pretrain" if name == config.pretrain else f"{role}.model_args.model_name_or_path",
                f"{name} is a {shape.architecture} with head_dim {shape.head_dim}, which is not hidden_size "
                f"{shape.hidden} / num_attention_heads {shape.heads}, and SGLang cannot load that on a CPU; use "
                "another model, or platform cuda",
            )


def check_tokenizers(config: BaseConfig, report: Report) -> None:
    """The models that read the same samples give every token the same number."""
    models = {role: worker.model_args.model_name_or_path for role, worker in config.device_roles().items()}
    policy = models.pop("actor_train", None)
    for role in OWN_MODEL_ROLES:
        models.pop(role, None)  # it reads texts
    others = {role: name for role, name in models.items() if name not in (None, policy)}
    known = read_tokenizer(policy) if others else None
    if known is None:
        return
    tokens = {number: token for token, number in known.get_vocab().items()}
    for role, name in others.items():
        tokenizer = read_tokenizer(name)
        if tokenizer is None:
            continue
        theirs = {number: token for token, number in tokenizer.get_vocab().items()}
        number = next((each for each in sorted(theirs) if tokens.get(each, theirs[each]) != theirs[each]), None)
        if number is not None:
            report.error(
                f"{role}.model_args.model_name_or_path",
                f"token {number} of {name} is {theirs[number]!r}, but {tokens[number]!r} in actor_train's {policy}; "
                "use a model with the same tokenizer",
            )


def _model_absence(name: str) -> str:
    why = unreachable(Path(name, CONFIG_NAME))
    if why is not None:
        return f"{name} cannot be read: {why}"
    if os.path.isfile(Path(name, ADAPTER_CONFIG)):
        return f"{name} is a LoRA adapter; merge it into its model"
    if os.path.exists(name):
        return f"{name} has no {CONFIG_NAME}, so it is not the folder of a HF model"
    otherwise = f"is not a folder on this machine{other_reading(name, 'model')}"
    return f"{name} {_absence(name, otherwise, _is_model)}"


def _check_positions(config: BaseConfig, path: str, shape: ModelShape, report: Report) -> None:
    if shape.max_positions and (config.sequence_length or 0) > shape.max_positions:
        sum_of = f", for prompt_length {config.prompt_length} and response_length {config.response_length} together"
        report.error(
            "sequence_length",
            f"{config.sequence_length} is above max_position_embeddings {shape.max_positions} of {path}; "
            f"use at most that{'' if 'sequence_length' in config.source.given else sum_of}",
        )


def _check_splits(role: str, worker: RoleConfig, shape: ModelShape, report: Report) -> None:
    tensor = worker.layout.tensor
    key = (
        "strategy_args.strategy_config.tensor_model_parallel_size"
        if isinstance(worker, MegatronRoleConfig)
        else "num_gpus_per_worker"
    )
    trained = isinstance(worker, MegatronRoleConfig)
    if tensor not in _splits(shape, trained):
        sizes = (
            f"{shape.heads} attention heads, {shape.kv_heads} key-value heads (a divisor or a multiple) and "
            f"intermediate_size {shape.intermediate}"
        )
        if tensor in _splits(shape, trained=False):
            sizes = f"{shape.qkv_rows} rows of query, key and value, or leaves a rank without any of its "
            sizes += f"{shape.vocabulary} tokens"
        fitting = either(_splits(shape, trained))
        report.error(f"{role}.{key}", f"{tensor} does not divide the model's {sizes}; use {fitting}")
    if isinstance(worker, MegatronRoleConfig):
        try:
            options = worker.strategy_args.strategy_config
            stage_layers(shape.layers, options)
            if isinstance(options, MegatronTrainConfig):
                check_recompute(shape.layers, options)
        except ValueError as error:
            key, reason = str(error).split(": ", 1)
            report.error(f"{role}.strategy_args.strategy_config.{key}", reason)


def _splits(shape: ModelShape, trained: bool) -> list[int]:
    """Tensor-parallel sizes the model can be cut into; Megatron also cuts rows of heads, and the vocabulary evenly."""
    return [
        size
        for size in range(1, shape.heads + 1)
        if shape.heads % size == 0
        and shape.intermediate % size == 0
        and (shape.kv_heads % size == 0 or size % shape.kv_heads == 0)
        and (not trained or (shape.qkv_rows % size == 0 and shape.fills_vocabulary(size)))
    ]

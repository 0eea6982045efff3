"""The models of a run on this machine: they exist, are supported, fit the layout and share a tokenizer."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from roll.base.errors import Finding, error, missing, unreachable, warning
from roll.base.text import either
from roll.configs.devices.megatron import (
    MegatronConfig,
    MegatronTrainConfig,
    check_recompute,
    part_layers,
    stage_layers,
)
from roll.configs.files.folders import absence
from roll.configs.files.mixtures import check_experts
from roll.configs.pipeline import BaseConfig, RLConfig
from roll.configs.roles import EngineRoleConfig, MegatronRoleConfig, RoleConfig, TrainedRoleConfig
from roll.configs.scoring.scoring_roles import SCORING_MODELS, JudgeConfig, ScoringEngineConfig
from roll.hub.names import ADAPTER_CONFIG, CONFIG_NAME, hub_name, local_model, other_reading
from roll.hub.special_tokens import read_tokenizer
from roll.models.families.frozen import frozen_names, untrained_part
from roll.models.families.hf_config import UnsupportedModel, read_positions
from roll.models.families.registry import value_architectures
from roll.models.families.shape import ModelShape, RotaryConfig, read_model_shape

TOP_K_BYTES = 8
"""Memory of one of the teacher's `opd_top_k` tokens of a batch: its id and its log-prob."""

MOST_SCALED = 4
"""Largest factor of linear rope scaling that is proposed."""

LARGE_TOP_K_BYTES, MAX_TOP_K_BYTES = 4 * 2**30, 64 * 2**30
"""Memory for these tokens that is warned of, and that is refused: the driver holds them and sends them to the ranks."""


def check_models(config: BaseConfig) -> Iterator[Finding]:
    """The model of each role exists, is supported and fits the layout; a shared problem is reported once."""
    seen: set[str] = set()
    if isinstance(config, RLConfig):
        yield from _check_same_model(config)
    for role, worker in config.device_roles().items():
        name = worker.model_args.model_name_or_path
        path = f"{role}.model_args.model_name_or_path"
        if role in SCORING_MODELS:
            yield from _check_own_model(role, path, name)
            if name is None:
                continue
        if name is None:
            if not seen:
                yield error("pretrain", f"is not set, and neither is {path}; set it to the folder of a HF model")
            seen.add("")
            continue
        path = "pretrain" if name == config.pretrain else path
        if isinstance(worker, ScoringEngineConfig):
            yield from _check_scoring_length(role, worker, name)
        try:
            shape = read_model_shape(local_model(name), worker.value_head)
        except UnsupportedModel as reason:
            if name not in seen and not isinstance(worker, JudgeConfig):  # SGLang runs many that cannot be trained
                yield error(path, str(reason))
            seen.add(name)
            continue
        if shape is None and name not in seen and hub_name(name, "model") is None:
            yield missing(path, _model_absence(name))
        if shape is not None:
            yield from _check_splits(role, worker, shape)
            yield from _check_frozen(role, worker, shape)
            yield from _check_kernel(role, worker, shape)
            if isinstance(worker, MegatronRoleConfig):
                yield from check_experts(config, role, worker, shape)
            if role == "reference" and isinstance(config, RLConfig) and config.opd_top_k is not None:
                yield from _check_top_k(config, config.opd_top_k, shape)
            if name not in seen and role not in SCORING_MODELS:  # their tokens are others; longer texts have no score
                yield from _check_positions(config, path, shape)
        seen.add(name)


def _check_same_model(config: RLConfig) -> Iterator[Finding]:
    names = [role.model_args.model_name_or_path for role in (config.actor_train, config.actor_infer)]
    folders = [local_model(name).resolve() for name in names if name]
    if len(folders) < 2 or folders[0] == folders[1]:
        return
    path, shapes = "actor_infer.model_args.model_name_or_path", []
    with contextlib.suppress(UnsupportedModel):  # reported with the role
        shapes = [_sizes(read_model_shape(folder, value_head=False)) for folder in folders]
    message = f"{names[1]} is not {names[0]}, the model of actor_train"
    if None not in shapes and shapes and shapes[0] != shapes[1]:
        yield error(path, f"{message}, and has another shape than the weights that it gets; leave it out")
    else:
        yield warning(path, f"{message}, whose weights replace its own before the first batch; leave it out")


def _sizes(shape: ModelShape | None) -> ModelShape | None:
    """A shape without the numbers that no weight depends on; the first weight update tries these."""
    return shape and replace(shape, rotary=RotaryConfig(), norm_epsilon=0.0)


def _check_top_k(config: RLConfig, top_k: int, shape: ModelShape) -> Iterator[Finding]:
    count, length = min(top_k, shape.vocabulary), config.sequence_length or 0
    size = config.samples_per_batch * length * count * TOP_K_BYTES
    if size > LARGE_TOP_K_BYTES:
        whole = ", the whole vocabulary," if count < top_k or count == shape.vocabulary else ""
        message = (
            f"{count}{whole} for {config.samples_per_batch} samples of up to {length} tokens are "
            f"{size / 2**30:,.0f} GiB of ids and log-probs in the driver; use less, such as 64, or a smaller batch"
        )
        yield (error if size > MAX_TOP_K_BYTES else warning)("opd_top_k", message)


def _check_own_model(role: str, path: str, name: str | None) -> Iterator[Finding]:
    """The model is given, and that of role reward is one whose output is a value: another head would start at 0."""
    if name is None:
        model = "a reward model, such as one that pipeline reward_model has trained"
        yield error(path, f"is not set; name {model if role == 'reward' else 'the model that grades'}")
    if name is None or role != "reward":
        return
    with contextlib.suppress(UnsupportedModel):  # reported with those of other roles
        shape = read_model_shape(local_model(name), value_head=True)
        if shape is not None and shape.architecture not in value_architectures():
            yield error(
                path,
                f"{name} is a {shape.architecture}, which has no head for scores; use a reward model, such as a "
                f"{shape.architecture.replace('ForCausalLM', 'ForSequenceClassification')}",
            )


def _check_scoring_length(role: str, worker: ScoringEngineConfig, name: str) -> Iterator[Finding]:
    positions, path = read_positions(local_model(name)), f"{role}.sequence_length"
    if positions is None and worker.sequence_length is None and os.path.isfile(local_model(name) / CONFIG_NAME):
        yield error(path, f"is not set, and {name} does not say how many positions it has; set it, such as to 8192")
    if positions is not None and (worker.sequence_length or 0) > positions:
        yield error(
            path, f"{worker.sequence_length} is above max_position_embeddings {positions} of {name}; use at most that"
        )


def check_head_sizes(config: BaseConfig, platform: str) -> Iterator[Finding]:
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
            yield error(
                "pretrain" if name == config.pretrain else f"{role}.model_args.model_name_or_path",
                f"{name} is a {shape.architecture} with head_dim {shape.head_dim}, which is not hidden_size "
                f"{shape.hidden} / num_attention_heads {shape.heads}, and SGLang cannot load that on a CPU; use "
                "another model, or platform cuda",
            )


def check_tokenizers(config: BaseConfig) -> Iterator[Finding]:
    """The models that read the same samples give every token the same number."""
    models = {role: worker.model_args.model_name_or_path for role, worker in config.device_roles().items()}
    policy = models.pop("actor_train", None)
    for role in SCORING_MODELS:
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
            yield error(
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
    return f"{name} {absence(name, otherwise, _is_model)}"


def _check_positions(config: BaseConfig, path: str, shape: ModelShape) -> Iterator[Finding]:
    if shape.max_positions and (config.sequence_length or 0) > shape.max_positions:
        sum_of = f", for prompt_length {config.prompt_length} and response_length {config.response_length} together"
        factor = -(-(config.sequence_length or 0) // shape.max_positions)
        scaled = f'rope_scaling {{"rope_type": "linear", "factor": {factor}.0}} and max_position_embeddings'
        hint = f"; or write {scaled} {factor * shape.max_positions} into its config.json (yarn is not available)"
        yield error(
            "sequence_length",
            f"{config.sequence_length} is above max_position_embeddings {shape.max_positions} of {path}; "
            f"use at most that{'' if 'sequence_length' in config.source.given else sum_of}"
            f"{hint if shape.rotary.kind == 'default' and factor <= MOST_SCALED else ''}",
        )


def _check_splits(role: str, worker: RoleConfig, shape: ModelShape) -> Iterator[Finding]:
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
        yield error(f"{role}.{key}", f"{tensor} does not divide the model's {sizes}; use {fitting}")
    if isinstance(worker, MegatronRoleConfig):
        yield from _check_context(f"{role}.strategy_args.strategy_config", worker.strategy_args.strategy_config, shape)
        try:
            options = worker.strategy_args.strategy_config
            stage_layers(shape.layers, options)
            if isinstance(options, MegatronTrainConfig):
                check_recompute(shape.layers, options)
        except ValueError as broken:
            key, reason = str(broken).split(": ", 1)
            yield error(f"{role}.strategy_args.strategy_config.{key}", reason)


def _check_frozen(role: str, worker: RoleConfig, shape: ModelShape) -> Iterator[Finding]:
    if not isinstance(worker, TrainedRoleConfig):
        return
    try:
        frozen = frozen_names(shape, worker.model_args.freeze_module_prefix)
    except ValueError as reason:
        yield error(f"{role}.model_args.freeze_module_prefix", str(reason))
        return
    with contextlib.suppress(ValueError):  # layers that do not fit the stages are reported by `_check_splits`
        parts = part_layers(shape.layers, worker.strategy_args.strategy_config)
        if untrained := untrained_part(shape, frozen, parts):
            yield error(f"{role}.model_args.freeze_module_prefix", untrained)


def _check_kernel(role: str, worker: RoleConfig, shape: ModelShape) -> Iterator[Finding]:
    """Transformer Engine computes the layers of the model, where its attention is asked for."""
    if not isinstance(worker, MegatronRoleConfig) or shape.is_plain:
        return
    why = f"torch's operators compute the layers of a {shape.architecture}"
    if worker.model_args.attn_implementation == "fa2":
        yield warning(f"{role}.model_args.attn_implementation", f"fa2 has no effect: {why}")
    options, path = worker.strategy_args.strategy_config, f"{role}.strategy_args.strategy_config"
    if options.attention_backend != "auto":
        yield warning(f"{path}.attention_backend", f"{options.attention_backend} has no effect: {why}")
    if options.apply_rope_fusion:
        yield error(f"{path}.apply_rope_fusion", f"true needs Transformer Engine, and {why}; leave it out")


def _check_context(path: str, options: MegatronConfig, shape: ModelShape) -> Iterator[Finding]:
    """Attention under context parallelism has no window, and the exchange a2a gives each rank whole heads."""
    context, heads = options.context_parallel_size, max(1, shape.kv_heads // options.tensor_model_parallel_size)
    if context == 1:
        return
    if shape.local is not None:
        yield error(
            f"{path}.context_parallel_size",
            f"{context} cannot split the layers of a {shape.architecture} with a window of {shape.local.window} "
            "tokens; use 1",
        )
    if options.cp_comm_type in ("p2p", "a2a") and not shape.is_plain:
        yield error(
            f"{path}.cp_comm_type",
            f"{options.cp_comm_type} needs Transformer Engine, and torch's operators compute the layers of a "
            f"{shape.architecture}; leave it out",
        )
    if options.cp_comm_type == "a2a" and heads % context:
        yield error(
            f"{path}.cp_comm_type",
            f"a2a needs context_parallel_size {context} to divide the {heads} key-value heads of a rank; use p2p",
        )


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


def check_engine_lengths(config: BaseConfig) -> Iterator[Finding]:
    """An engine whose context and cache are set by hand has room for the longest sequence, of a scoring one its own."""
    for role, worker in config.device_roles().items():
        if not isinstance(worker, EngineRoleConfig):
            continue
        longest, advice = config.sequence_length, "use at least that, or leave it out"
        if isinstance(worker, ScoringEngineConfig):
            name = worker.model_args.model_name_or_path
            longest = worker.sequence_length or (None if name is None else read_positions(local_model(name)))
            advice += f", or set {role}.sequence_length to the longest it has to score"
        for name, what in (("context_length", "the context"), ("max_total_tokens", "the key-value cache")):
            given = worker.strategy_args.strategy_config.get(name)
            if isinstance(given, int) and longest is not None and given < longest:
                yield error(
                    f"{role}.strategy_args.strategy_config.{name}",
                    f"{what} of {given} tokens is shorter than the longest sequence, {longest}; {advice}",
                )


def _is_model(path: Path) -> bool:
    return (path / CONFIG_NAME).is_file()

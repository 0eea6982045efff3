"""The engine of each role: its name, its options, and what they need of the platform."""

from __future__ import annotations

from typing import Any

from roll.configs.agentic import AgenticConfig
from roll.configs.errors import Report
from roll.configs.layouts import ROLES, is_megatron, megatron_config
from roll.configs.pipeline import BaseConfig, RLConfig
from roll.configs.sglang_options import OWNED, ServerOption, server_options
from roll.configs.suggestions import nearest
from roll.configs.vllm import OPTIONS, ROLE_OPTIONS
from roll.configs.worker import WorkerConfig

ENGINES = {"actor_train": "megatron_train", "actor_infer": "sglang", "reference": "megatron_infer"}
"""The engine each role runs."""

CUDA_ONLY = ("bias_activation_fusion", "apply_rope_fusion", "overlap_grad_reduce")
"""Megatron options that need a GPU."""


def check_engines(config: BaseConfig, report: Report) -> None:
    """Each role runs the engine made for it, with options that engine knows and the platform has."""
    for role in ROLES:
        worker = getattr(config, role, None)
        if worker is None or (role != "actor_train" and not worker.device_mapping):
            continue
        name, path = worker.strategy_args.strategy_name, f"{role}.strategy_args"
        if name != ENGINES[role]:
            report.error(f"{path}.strategy_name", f"{name} cannot run {role}; use {ENGINES[role]}")
        elif is_megatron(worker):
            _check_megatron(config, role, worker, report)
        else:
            _check_sglang(worker, f"{path}.strategy_config", report)
    _check_precision(config, report)
    if config.deterministic and config.platform == "cuda":
        report.error(
            "deterministic", "true is not available on cuda, where kernels add in any order; use platform cpu or false"
        )
    if not isinstance(config, AgenticConfig):
        _check_data(config, report)
    for name in config.tracker_kwargs:
        if name not in config.track_with:
            report.error(f"tracker_kwargs.{name}", f"track_with does not name {name}; add it there or remove this")


def _check_precision(config: BaseConfig, report: Report) -> None:
    """Both engines compute in one precision, else their log-probs differ by more than rounding."""
    if not isinstance(config, RLConfig):
        return
    training, sampling = config.actor_train.model_args.dtype, config.actor_infer.model_args.dtype
    if training != sampling:
        report.warn(
            "actor_infer.model_args.dtype",
            f"{sampling} samples while actor_train computes in {training}: their log-probs differ by rounding; "
            f"use {training}",
        )


def _check_data(config: BaseConfig, report: Report) -> None:
    if config.eval_steps and not config.validation.data_args.file_name:
        report.error(
            "validation.data_args.file_name",
            f"is empty, but eval_steps is {config.eval_steps}; name a file, or set eval_steps: 0",
        )
    if not config.actor_train.data_args.file_name:
        report.error("actor_train.data_args.file_name", "is empty; name the JSONL or parquet files to train on")


def _check_megatron(config: BaseConfig, role: str, worker: WorkerConfig, report: Report) -> None:
    path, megatron, model = f"{role}.strategy_args.strategy_config", megatron_config(worker), worker.model_args
    if megatron.sequence_parallel and megatron.tensor_model_parallel_size == 1:
        report.error(
            f"{path}.sequence_parallel",
            "true splits the sequence over tensor-parallel ranks, and there is one; set it to false, or "
            "tensor_model_parallel_size to 2 or more",
        )
    if model.disable_gradient_checkpointing and megatron.recompute_granularity is not None:
        report.error(
            f"{path}.recompute_granularity",
            f"{megatron.recompute_granularity} contradicts model_args.disable_gradient_checkpointing: true; keep one",
        )
    if model.dtype == "fp16":
        report.error(f"{role}.model_args.dtype", "fp16 needs loss scaling, which is not available; use bf16 or fp32")
    if config.platform != "cpu":
        return
    for option in CUDA_ONLY:
        if getattr(megatron, option):
            report.error(f"{path}.{option}", "true needs a GPU, and platform is cpu; set it to false")
    if model.attn_implementation == "fa2":
        report.error(f"{role}.model_args.attn_implementation", "fa2 needs a GPU, and platform is cpu; use auto or sdpa")


def _check_sglang(worker: WorkerConfig, path: str, report: Report) -> None:
    options = worker.strategy_args.strategy_config
    known = server_options()
    for name, value in options.items():
        if name in OWNED:
            report.error(f"{path}.{name}", f"{value!r}: the framework sets this option; {OWNED[name]}")
        elif known is not None and name not in known:
            like = OPTIONS.get(name) or nearest(name, known.keys() - OWNED.keys())
            hint = f"; did you mean {like}?" if like else ""
            if name in ROLE_OPTIONS:
                hint = f"; set actor_infer.{ROLE_OPTIONS[name]}"
            report.error(f"{path}.{name}", f"SGLang has no option of this name{hint}")
        elif name == "mem_fraction_static":
            _check_share(f"{path}.{name}", value, report)
        elif known is not None:
            _check_value(f"{path}.{name}", value, known[name], report)
    if known is None and options:
        report.warn(path, f"sglang is not installed here: {', '.join(options)} were not checked against its options")


def _check_share(path: str, share: Any, report: Report) -> None:
    if share is not None and not (isinstance(share, int | float) and 0 < share < 1):
        report.error(path, f"{share!r} is not a share of the device's memory between 0 and 1, such as 0.8")


def _check_value(path: str, value: Any, option: ServerOption, report: Report) -> None:
    refusal, doubt = option.refuses(value), option.doubts(value)
    if refusal:
        report.error(path, refusal)
    if doubt:
        report.warn(path, doubt)

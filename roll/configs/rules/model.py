"""The model on disk: present, supported, and divisible by the layouts."""

from __future__ import annotations

import os
from pathlib import Path

from roll.configs.errors import Report
from roll.configs.layouts import device_roles, is_megatron, role_layout
from roll.configs.model_config import CONFIG_NAME, UnsupportedModel
from roll.configs.model_shape import ModelShape, read_model_shape
from roll.configs.paths import unreachable
from roll.configs.pipeline import BaseConfig
from roll.configs.worker import WorkerConfig


def check_models(config: BaseConfig, report: Report) -> None:
    """Each role's model; problems shared by several roles are told once, at the role that comes first."""
    seen: set[str] = set()
    for role, worker in device_roles(config).items():
        name = worker.model_args.model_name_or_path
        path = f"{role}.model_args.model_name_or_path"
        if name is None:
            if not seen:
                report.error("pretrain", f"is not given, and neither is {path}; name the folder of a HF model")
            seen.add("")
            continue
        path = "pretrain" if name == config.pretrain else path
        try:
            shape = read_model_shape(name)
        except UnsupportedModel as error:
            if name not in seen:
                report.error(path, str(error))
            seen.add(name)
            continue
        if shape is None and name not in seen:
            report.absent(path, _absence(name))
        if shape is not None:
            _check_splits(role, worker, shape, report)
            if name not in seen:
                _check_positions(config, path, shape, report)
        seen.add(name)


def _absence(name: str) -> str:
    why = unreachable(Path(name, CONFIG_NAME))
    if why is not None:
        return f"{name} cannot be read: {why}"
    if os.path.exists(name):
        return f"{name} has no {CONFIG_NAME}, so it is not the folder of a HF model"
    fetch = ""
    if name.count("/") == 1 and not name.startswith((".", "/", "models/")):
        fetch = f"; download it: hf download {name} --local-dir models/{name.split('/')[1]}"
    return f"{name} is not a folder on this machine{fetch}"


def _check_positions(config: BaseConfig, path: str, shape: ModelShape, report: Report) -> None:
    if shape.max_positions and (config.sequence_length or 0) > shape.max_positions:
        report.error(
            "sequence_length",
            f"{config.sequence_length} is above max_position_embeddings {shape.max_positions} of {path}; "
            "use at most that",
        )


def _check_splits(role: str, worker: WorkerConfig, shape: ModelShape, report: Report) -> None:
    layout = role_layout(worker)
    tensor, stages = layout.tensor, layout.pipeline
    key = "strategy_args.strategy_config.tensor_model_parallel_size" if is_megatron(worker) else "num_gpus_per_worker"
    if tensor not in _splits(shape):
        sizes = (
            f"{shape.heads} attention heads, {shape.kv_heads} key-value heads (a divisor or a multiple) and "
            f"intermediate_size {shape.intermediate}"
        )
        report.error(f"{role}.{key}", f"{tensor} does not divide the model's {sizes}; use {_either(_splits(shape))}")
    if shape.layers % stages:
        fitting = [n for n in range(1, shape.layers + 1) if shape.layers % n == 0]
        where = f"{role}.strategy_args.strategy_config.pipeline_model_parallel_size"
        report.error(where, f"{stages} does not divide the model's {shape.layers} layers; use {_either(fitting)}")


def _splits(shape: ModelShape) -> list[int]:
    """Tensor-parallel sizes the model can be cut into."""
    return [
        size
        for size in range(1, shape.heads + 1)
        if shape.heads % size == 0
        and shape.intermediate % size == 0
        and (shape.kv_heads % size == 0 or size % shape.kv_heads == 0)
    ]


def _either(values: list[int]) -> str:
    return ", ".join(map(str, values[:-1])) + (" or " if len(values) > 1 else "") + str(values[-1])

"""The devices of each role as a parallel layout, read off its configuration."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from roll.configs.arguments import MegatronConfig
from roll.configs.layout import ParallelLayout
from roll.configs.pipeline import BaseConfig
from roll.configs.worker import WorkerConfig

ROLES = ("actor_train", "actor_infer", "reference")
"""Roles that can own devices, in the order they are shown."""


def device_roles(config: BaseConfig) -> dict[str, WorkerConfig]:
    """The roles of this run that own devices, by name; a reference that nothing uses owns none."""
    roles: dict[str, WorkerConfig] = {name: getattr(config, name) for name in ROLES if hasattr(config, name)}
    if not uses_reference(config):
        roles.pop("reference", None)
    return {name: worker for name, worker in roles.items() if worker.device_mapping}


def uses_reference(config: Any) -> bool:
    """Whether a KL term needs the frozen model."""
    return bool(getattr(config, "use_kl_loss", False) or getattr(config, "add_token_level_kl", False))


def is_megatron(worker: WorkerConfig) -> bool:
    """Whether the role runs Megatron-Core."""
    return worker.strategy_args.strategy_name.startswith("megatron")


def megatron_config(worker: WorkerConfig) -> MegatronConfig:
    """The role's `strategy_config` as a dataclass; loading has checked its keys and types."""
    known = {item.name for item in fields(MegatronConfig)}
    return MegatronConfig(**{k: v for k, v in worker.strategy_args.strategy_config.items() if k in known})


def role_layout(worker: WorkerConfig) -> ParallelLayout:
    """How the role's devices are split.

    For Megatron one rank per device. For sglang `tensor` is the devices of one engine and `data` the number of
    engines; each engine is one worker.
    """
    if not is_megatron(worker):
        engines = len(worker.device_mapping) // worker.num_gpus_per_worker
        return ParallelLayout(tensor=worker.num_gpus_per_worker, data=max(1, engines))
    megatron = megatron_config(worker)
    model_parallel = megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size
    return ParallelLayout(
        tensor=megatron.tensor_model_parallel_size,
        data=max(1, len(worker.device_mapping) // model_parallel),
        pipeline=megatron.pipeline_model_parallel_size,
    )

"""Which devices the roles own: sizes that divide, and roles that share all devices or none."""

from __future__ import annotations

from itertools import combinations

from roll.configs.device_mapping import spans
from roll.configs.errors import Report
from roll.configs.layouts import device_roles, is_megatron, megatron_config, role_layout, uses_reference
from roll.configs.machine import Machine
from roll.configs.pipeline import BaseConfig, RLConfig
from roll.configs.worker import WorkerConfig


def check_devices(config: BaseConfig, report: Report) -> None:
    """Every role that needs devices has some, they divide by its layout, and roles share all or none."""
    _check_owned(config, report)
    for role, worker in device_roles(config).items():
        _check_divides(role, worker, report)
    for (first, one), (second, other) in combinations(device_roles(config).items(), 2):
        _check_overlap(first, one.device_mapping, second, other.device_mapping, report)


def _check_owned(config: BaseConfig, report: Report) -> None:
    needed = ["actor_train"] + (["actor_infer"] if isinstance(config, RLConfig) else [])
    for role in needed:
        if not getattr(config, role).device_mapping:
            report.error(f"{role}.device_mapping", "is empty; name the devices of this role, such as list(range(0,8))")
    if not isinstance(config, RLConfig):
        return
    if config.async_generation_ratio > 0 and config.actor_infer.device_mapping == config.actor_train.device_mapping:
        report.warn(
            "async_generation_ratio",
            f"{config.async_generation_ratio:g} gains nothing while actor_infer shares the devices of actor_train: "
            "they take turns; give them separate devices",
        )
    if uses_reference(config) and not config.reference.device_mapping:
        terms = " and ".join(name for name in ("use_kl_loss", "add_token_level_kl") if getattr(config, name))
        devices = f"such as {spans(config.actor_train.device_mapping)}, the devices of actor_train, to share them"
        report.error(
            "reference.device_mapping", f"is empty, but {terms} needs the reference; name its devices, {devices}"
        )
    if config.reference.device_mapping and not uses_reference(config):
        report.warn(
            "reference",
            "is configured but not used: neither use_kl_loss nor add_token_level_kl is on; it is not loaded",
        )


def _check_divides(role: str, worker: WorkerConfig, report: Report) -> None:
    count, path = len(worker.device_mapping), f"{role}.device_mapping"
    if not is_megatron(worker):
        size = worker.num_gpus_per_worker
        if count % size:
            report.error(
                path,
                f"{count} devices cannot hold engines of num_gpus_per_worker {size}; use {_multiples(count, size)}",
            )
        return
    if worker.num_gpus_per_worker != 1:
        report.error(
            f"{role}.num_gpus_per_worker",
            f"{worker.num_gpus_per_worker} does not apply to {worker.strategy_args.strategy_name}: a rank owns one "
            "device; set strategy_config.tensor_model_parallel_size instead",
        )
    megatron = megatron_config(worker)
    tensor, pipeline = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    if count % (tensor * pipeline):
        sizes = f"tensor parallel {tensor}" + (f" x pipeline parallel {pipeline}" if pipeline > 1 else "")
        report.error(path, f"{count} devices cannot hold {sizes}; use {_multiples(count, tensor * pipeline)}")


def _multiples(count: int, size: int) -> str:
    """The multiples of `size` on either side of `count`."""
    below = count // size * size
    return f"{below} or {below + size}" if below else str(size)


def _check_overlap(first: str, one: list[int], second: str, other: list[int], report: Report) -> None:
    shared = sorted(set(one) & set(other))
    if not shared or one == other:
        return
    path = f"{second}.device_mapping"
    if set(one) == set(other):
        report.error(path, f"lists the devices of {first} in another order; to share them write {spans(one)}")
        return
    outside = spans(range(max(one) + 1, max(one) + 1 + len(other)))
    report.error(
        path,
        f"overlaps {first}.device_mapping in {_short(shared)}; roles share all their devices or none: "
        f"write {spans(one)} to share, or devices outside, such as {outside}, to separate",
    )


def _short(ranks: list[int]) -> str:
    names = ", ".join(str(rank) for rank in ranks[:4])
    return f"device{'s' if len(ranks) > 1 else ''} {names}" + (", ..." if len(ranks) > 4 else "")


def check_nodes(config: BaseConfig, devices_per_node: int, report: Report) -> None:
    """Engines fit on one node each; a tensor-parallel group that spans nodes is slow."""
    for role, worker in device_roles(config).items():
        size = role_layout(worker).tensor
        for start in range(0, len(worker.device_mapping), size):
            group = worker.device_mapping[start : start + size]
            nodes = sorted({rank // devices_per_node for rank in group})
            if len(nodes) == 1:
                continue
            spread = f"devices {spans(group)} are on nodes {spans(nodes)} ({devices_per_node} devices per node)"
            if is_megatron(worker):
                report.warn(f"{role}.device_mapping", f"a tensor-parallel group spans nodes and will be slow: {spread}")
            else:
                report.error(
                    f"{role}.device_mapping", f"an engine must be on one node: {spread}; lower num_gpus_per_worker"
                )
            break


def check_fits_machine(config: BaseConfig, machine: Machine, report: Report) -> None:
    """On cpu more devices than cores have to be asked for by `num_devices_per_node`."""
    if config.num_devices_per_node is not None or config.platform != "cpu":
        return
    for role, worker in device_roles(config).items():
        highest = max(worker.device_mapping)
        if highest >= machine.cores:
            report.error(
                f"{role}.device_mapping",
                f"device {highest} does not exist: this machine has {machine.cores} cores, so devices 0 to "
                f"{machine.cores - 1}; use those, or set num_devices_per_node: {highest + 1} to put several on a core",
            )

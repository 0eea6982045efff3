"""The hardware of this machine, and which platform and nodes a run is planned for or started on."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from roll.base.errors import ConfigError, Finding, Report, error, missing, warning
from roll.base.text import gibibytes
from roll.configs.check import check
from roll.configs.defaults import fill_in_mismatch
from roll.configs.devices.parallel_layout import by_node, spans
from roll.configs.devices.system_envs import compiler_problem, joins_ray
from roll.configs.files.model_files import check_head_sizes
from roll.configs.pipeline import BaseConfig, RLConfig
from roll.configs.roles import EngineRoleConfig, MegatronRoleConfig
from roll.plan.memory import STATE_LINES, memory_plans, model_shapes

GPUS_PER_NODE = 8
"""Assumed devices per node of a run on GPUs that is planned on a machine without any."""


@dataclass(frozen=True)
class Hardware:
    """Accelerators, usable cores and memory of one machine; a memory of 0 is not known."""

    gpus: int
    cores: int
    memory_bytes: int = 0


def this_machine() -> Hardware:
    """The GPUs this process may use (CUDA_VISIBLE_DEVICES respected) and its cores, without importing torch."""
    devices = sum(1 for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        devices = min(devices, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))
    memory = psutil.virtual_memory().total
    with contextlib.suppress(OSError, ValueError):  # no limit of a container
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return Hardware(gpus=devices, cores=len(os.sched_getaffinity(0)), memory_bytes=memory)


def prepare_run(config: BaseConfig, hardware: Hardware | None = None) -> list[str]:
    """Resolves `platform: auto` by the hardware of this machine, and checks everything a run needs.

    Returns:
        Warnings to show before the run starts.

    Raises:
        ConfigError: a model, dataset or checkpoint is missing, or there are too few devices.
    """
    hardware = hardware or this_machine()
    joins = joins_ray()
    guessed = config.platform == "auto" and joins and not hardware.gpus
    _resolve_auto(config, hardware)
    report = check(config)
    if guessed:
        report.warn("platform", "auto is cpu, since this machine has no GPU; write cuda where the cluster has GPUs")
    report.add(check_fits_machine(config, config.platform, hardware))
    per_node = config.num_devices_per_node or (hardware.cores if config.platform == "cpu" else hardware.gpus)
    if not report.errors:
        report.add(check_memory(config, config.platform, hardware))
        if per_node:
            report.add(check_nodes(config, config.platform, per_node))
    report.add(check_head_sizes(config, config.platform))
    problems = report.errors + report.missing
    if problems:
        raise ConfigError(problems, config.source.file)
    return [str(warning) for warning in report.warnings]


def prepare_devices(config: BaseConfig, hardware: Hardware | None = None) -> None:
    """The part of `prepare_run` that is about devices; models and data need not be on this machine.

    Raises:
        ConfigError: there are too few devices.
    """
    hardware = hardware or this_machine()
    _resolve_auto(config, hardware)
    report = Report()
    report.add(check_fits_machine(config, config.platform, hardware))
    problems = report.errors + report.missing
    if problems:
        raise ConfigError(problems, config.source.file)


def platform_here(config: BaseConfig, hardware: Hardware) -> str:
    if config.platform == "auto":
        return "cuda" if hardware.gpus else "cpu"
    return config.platform


def _resolve_auto(config: BaseConfig, hardware: Hardware) -> None:
    if config.platform == "auto":
        config.platform = platform_here(config, hardware)  # type: ignore[assignment]
        if isinstance(config, RLConfig):
            fill_in_mismatch(config)


def resolve_platform(config: BaseConfig, hardware: Hardware, report: Report) -> tuple[str, int]:
    """The platform and the devices per node that a plan assumes; assumptions are warnings of the report.

    `auto` is cuda if there are GPUs, and cpu if all devices fit this machine's cores; otherwise the run is planned for
    GPUs elsewhere.
    """
    highest = max((max(worker.device_mapping) for worker in config.device_roles().values()), default=0)
    platform: str = config.platform
    if platform == "auto":
        slots = config.num_devices_per_node or hardware.cores
        platform = "cpu" if not hardware.gpus and highest < slots and config.num_devices_per_node is None else "cuda"
        if platform == "cuda" and not hardware.gpus:
            report.warn(
                "platform",
                "auto on a machine without a GPU: planned for cuda elsewhere; write platform: cpu to run here",
            )
    if config.num_devices_per_node is not None:
        return platform, config.num_devices_per_node
    if platform == "cpu":
        return platform, hardware.cores
    if not hardware.gpus:
        report.warn("num_devices_per_node", f"is not given and there is no GPU here: assumed {GPUS_PER_NODE}")
    return platform, hardware.gpus or GPUS_PER_NODE


def check_nodes(config: BaseConfig, platform: str, devices_per_node: int) -> Iterator[Finding]:
    """Engines are split evenly over their nodes; groups that span nodes, and GPUs shared on several, are slow."""
    yield from _check_sharing(config, platform, devices_per_node)
    for role, worker in config.device_roles().items():
        size, path = worker.layout.tensor * worker.layout.context, f"{role}.device_mapping"
        kind = "context" if worker.layout.context > 1 else "tensor"
        what = f"a {kind}-parallel group" if isinstance(worker, MegatronRoleConfig) else "an engine"
        groups = [worker.device_mapping[first : first + size] for first in range(0, len(worker.device_mapping), size)]
        spanning = [group for group in groups if len({device // devices_per_node for device in group}) > 1]
        if spanning:
            nodes = sorted({device // devices_per_node for device in spanning[0]})
            placement = (
                f"devices {spans(spanning[0])} are on nodes {spans(nodes)} ({devices_per_node} devices per node)"
            )
            yield warning(path, f"{what} spans nodes and will be slow: {placement}")
        try:
            for group in groups if isinstance(worker, EngineRoleConfig) else ():
                by_node(group, devices_per_node)
        except ValueError as reason:
            yield error(path, f"num_gpus_per_worker {size} gives an engine {reason}; or lower num_gpus_per_worker")


def _check_sharing(config: BaseConfig, platform: str, devices_per_node: int) -> Iterator[Finding]:
    if platform == "cpu" or not isinstance(config, RLConfig):
        return
    devices = {*config.actor_train.device_mapping, *config.actor_infer.device_mapping}
    nodes = {device // devices_per_node for device in devices}
    if config.shares_devices and len(nodes) > 1:
        yield warning(
            "actor_infer.device_mapping",
            f"shares the GPUs of actor_train on {len(nodes)} nodes: weights are sent through host memory with gloo, "
            "which is slower than NCCL between separate GPUs, or shared memory within one node",
        )
    share = config.actor_infer.strategy_args.strategy_config.get("mem_fraction_static")
    if share is None and config.keeps_engines(platform):
        yield error(
            "actor_infer.strategy_args.strategy_config.mem_fraction_static",
            "is not set, and the engine would take most of the memory that actor_train needs on the GPUs they share; "
            "set its share, such as 0.3",
        )
    for role in ("actor_train", "actor_infer") if config.shares_devices else ():
        variables = {**os.environ, **config.system_envs, **getattr(config, role).system_envs}
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            if re.search(r"expandable_segments\s*:\s*true", variables.get(name, ""), re.IGNORECASE):
                yield missing(
                    name,
                    f"{variables[name]} of {role} does not work with CUDA IPC, which sends weights between actor_train "
                    "and actor_infer on the GPUs they share; leave expandable_segments out",
                )


def _check_gpus(config: BaseConfig, hardware: Hardware) -> Iterator[Finding]:
    per_node, elsewhere = config.num_devices_per_node or 0, "or join the Ray of a cluster that does with RAY_ADDRESS"
    if not hardware.gpus:
        yield missing("platform", f"cuda needs GPUs, and this machine has none; use cpu, {elsewhere}")
    elif per_node > hardware.gpus:
        yield missing(
            "num_devices_per_node", f"{per_node}, and this machine has {hardware.gpus} GPUs; use those, {elsewhere}"
        )
    for role, worker in config.device_roles().items() if hardware.gpus else ():
        if isinstance(worker, EngineRoleConfig) and (why := compiler_problem(worker.system_envs)):
            yield missing(f"{role}.strategy_args.strategy_name", f"sglang: {why}")


def _check_one_machine(config: BaseConfig, platform: str, hardware: Hardware) -> Iterator[Finding]:
    per_node = config.num_devices_per_node or (hardware.gpus if platform == "cuda" else 0)
    if not per_node or joins_ray():
        return
    counted = "num_devices_per_node is" if config.num_devices_per_node else "the number of GPUs here is"
    for role, worker in config.device_roles().items():
        highest = max(worker.device_mapping)
        if highest >= per_node:
            here = platform == "cpu" or highest < hardware.gpus
            advice = f"set num_devices_per_node: {highest + 1} if it is on this one, or " if here else ""
            yield missing(
                f"{role}.device_mapping",
                f"device {highest} is on another machine, as {counted} {per_node}: "
                f"{advice}join a cluster with RAY_ADDRESS",
            )


def check_fits_machine(config: BaseConfig, platform: str, hardware: Hardware) -> Iterator[Finding]:
    """The devices of a run on `platform` are here, unless Ray joins other machines."""
    if platform == "cuda" and not joins_ray():
        yield from _check_gpus(config, hardware)
    elif platform == "cuda" and config.num_devices_per_node is None and not hardware.gpus:
        yield missing(
            "num_devices_per_node", "is not set, and this machine has no GPUs to count; write the GPUs of one node"
        )
    per_node = config.num_devices_per_node
    if platform == "cpu" or (per_node or 0) <= hardware.gpus:  # otherwise `_check_gpus` has said so
        yield from _check_one_machine(config, platform, hardware)
    if per_node is not None or platform != "cpu":
        return
    for role, worker in config.device_roles().items():
        highest = max(worker.device_mapping)
        if highest >= hardware.cores:
            yield missing(
                f"{role}.device_mapping",
                f"device {highest} does not exist: this machine has {hardware.cores} cores, so devices 0 to "
                f"{hardware.cores - 1}; use those, or set num_devices_per_node: {highest + 1} to put several on a core",
            )


def check_memory(config: BaseConfig, platform: str, hardware: Hardware) -> Iterator[Finding]:
    """Weights and optimizers of all CPU slots fit the memory of this machine, unless Ray joins others."""
    if platform != "cpu" or not hardware.memory_bytes or joins_ray():
        return
    least = whole = 0
    for plan in memory_plans(config, model_shapes(config), "cpu"):
        slots = len(config.device_roles()[plan.role].device_mapping)
        least += slots * sum(line.bytes for line in plan.lines if line.name in STATE_LINES)
        whole += slots * plan.total
    memory = f"and this machine has {gibibytes(hardware.memory_bytes)} of memory; use a smaller model or fewer slots"
    if least > hardware.memory_bytes:
        yield missing("pretrain", f"models and optimizers need at least {gibibytes(least)}, {memory}")
    elif whole > hardware.memory_bytes:
        yield warning("pretrain", f"the run may need up to {gibibytes(whole)}, {memory}, or a smaller batch")

"""The plan of a run: devices, layouts, batch arithmetic, memory and warnings, without starting anything."""

from __future__ import annotations

from roll.configs.errors import ConfigError, Report
from roll.configs.layouts import device_roles, is_megatron, role_layout
from roll.configs.machine import Machine, this_machine
from roll.configs.memory import gibibytes, memory_plans
from roll.configs.model_shape import ModelShape, read_model_shape
from roll.configs.pipeline import BaseConfig
from roll.configs.plan_lines import batch_lines
from roll.configs.plan_types import DevicePlan, Plan, RolePlan
from roll.configs.rules import check
from roll.configs.rules.devices import check_nodes
from roll.configs.worker import WorkerConfig

GPUS_PER_NODE = 8
"""Devices per node assumed when a run on GPUs is planned on a machine without any."""


def make_plan(config: BaseConfig, machine: Machine | None = None) -> Plan:
    """What follows from a loaded configuration.

    Models and datasets that are not on this machine cost the plan their lines, and it says so.

    Args:
        config: from `load_config`.
        machine: where it is planned; None asks this one.

    Raises:
        ConfigError: the devices cannot be placed on the nodes, or the configuration was changed after loading and
            breaks a rule.
    """
    machine = machine or this_machine()
    report = check(config)
    platform, per_node = place(config, machine, report)
    check_nodes(config, per_node, report)
    if report.errors:
        raise ConfigError(report.errors, config.source.file)
    shapes = _shapes(config)
    memory = memory_plans(config, shapes)
    absent = [f"{problem} (this stops a run, not a plan)" for problem in report.missing]
    unknown = [role for role in device_roles(config) if role not in shapes]
    if unknown:
        absent.append(f"no memory estimate for {', '.join(unknown)}: the model's config.json is not on this machine")
    return Plan(
        exp_name=config.exp_name,
        pipeline=str(getattr(config, "pipeline", "")),
        source=config.source.file,
        platform=platform,
        nodes=1 + max((max(w.device_mapping) // per_node for w in device_roles(config).values()), default=0),
        devices_per_node=per_node,
        roles=[_role(config, role, worker, per_node) for role, worker in device_roles(config).items()],
        devices=_devices(config, per_node),
        batch=batch_lines(config),
        memory=memory,
        warnings=[str(problem) for problem in report.warnings] + absent,
    )


def place(config: BaseConfig, machine: Machine, report: Report) -> tuple[str, int]:
    """The platform and the devices per node that a plan assumes; what is a guess is put into the report as a warning.

    `auto` is cuda where there are GPUs, and cpu where all devices fit this machine's cores; otherwise the run is taken
    to be planned for GPUs elsewhere.
    """
    highest = max((max(worker.device_mapping) for worker in device_roles(config).values()), default=0)
    platform: str = config.platform
    if platform == "auto":
        slots = config.num_devices_per_node or machine.cores
        platform = "cpu" if not machine.gpus and highest < slots and config.num_devices_per_node is None else "cuda"
        if platform == "cuda" and not machine.gpus:
            report.warn(
                "platform",
                "auto on a machine without a GPU: planned for cuda elsewhere; write platform: cpu to run here",
            )
    if config.num_devices_per_node is not None:
        return platform, config.num_devices_per_node
    if platform == "cpu":
        if highest >= machine.cores:
            report.warn(
                "num_devices_per_node",
                f"is not given, and device {highest} is beyond the {machine.cores} cores here: "
                f"taken as more nodes; write num_devices_per_node: {highest + 1} for one node",
            )
        return platform, machine.cores
    if not machine.gpus:
        report.warn("num_devices_per_node", f"is not given and there is no GPU here: taken as {GPUS_PER_NODE}")
    return platform, machine.gpus or GPUS_PER_NODE


def _shapes(config: BaseConfig) -> dict[str, ModelShape]:
    shapes: dict[str, ModelShape] = {}
    for role, worker in device_roles(config).items():
        shape = read_model_shape(worker.model_args.model_name_or_path or "")
        if shape is not None:
            shapes[role] = shape
    return shapes


def _role(config: BaseConfig, role: str, worker: WorkerConfig, per_node: int) -> RolePlan:
    layout, devices = role_layout(worker), worker.device_mapping
    others = device_roles(config).items()
    return RolePlan(
        role=role,
        strategy=worker.strategy_args.strategy_name,
        model=worker.model_args.model_name_or_path,
        dtype=worker.model_args.dtype,
        devices=devices,
        nodes=sorted({device // per_node for device in devices}),
        workers=layout.world_size if is_megatron(worker) else layout.data,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        data=layout.data,
        shares_devices_with=[name for name, other in others if name != role and other.device_mapping == devices],
    )


def _devices(config: BaseConfig, per_node: int) -> list[DevicePlan]:
    uses: dict[int, list[str]] = {}
    for role, worker in device_roles(config).items():
        for rank, device in enumerate(worker.device_mapping):
            uses.setdefault(device, []).append(f"{role} {_place(worker, rank)}")
    return [DevicePlan(device, device // per_node, device % per_node, uses[device]) for device in sorted(uses)]


def _place(worker: WorkerConfig, rank: int) -> str:
    layout = role_layout(worker)
    if not is_megatron(worker):
        return f"engine {rank // layout.tensor}" + (f" tp{rank % layout.tensor}" if layout.tensor > 1 else "")
    at = layout.coordinates(rank)
    return f"rank {rank} (tp{at.tensor} dp{at.data} pp{at.pipeline})"


def shared_device_memory(plan: Plan) -> list[str]:
    """Sums of memory on devices that several roles share, as sentences."""
    totals = {memory.role: memory.total for memory in plan.memory}
    sentences: list[str] = []
    for role in plan.roles:
        group = [role.role, *role.shares_devices_with]
        if (
            role.shares_devices_with
            and group == sorted(group, key=[r.role for r in plan.roles].index)
            and all(n in totals for n in group)
        ):
            sentences.append(f"{' + '.join(group)} on one device: {gibibytes(sum(totals[name] for name in group))}")
    return sentences

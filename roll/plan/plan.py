"""The plan of a run: devices, layouts, batch sizes, memory and warnings, without starting anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from roll.base.errors import ConfigError
from roll.base.text import gibibytes
from roll.configs.check import check
from roll.configs.devices.parallel_layout import ParallelLayout
from roll.configs.files.model_files import check_head_sizes
from roll.configs.pipeline import BaseConfig, RLConfig
from roll.configs.roles import MegatronRoleConfig, RoleConfig
from roll.hub.find import Download, LookUp
from roll.hub.names import CONFIG_NAME, local_model
from roll.models.families.shape import ModelShape
from roll.plan.batch_lines import Line, batch_lines
from roll.plan.hardware import (
    Hardware,
    check_fits_machine,
    check_memory,
    check_nodes,
    platform_here,
    resolve_platform,
    this_machine,
)
from roll.plan.memory import GRAPHS, STATE_LINES, MemoryPlan, memory_plans, model_shapes
from roll.plan.update_size import update_lines

SCORING_ROLES = ("reward", "judge")
"""Roles whose models score responses, and stay on their devices in every phase."""

UNMOVED = {"actor_infer", *SCORING_ROLES}
"""Roles whose states no hand-over moves to host memory: engines free theirs, and models that score keep their own."""


@dataclass(frozen=True)
class RolePlan:
    """One role: its engine, its devices and how they are split; `workers` are ranks, or engines for sglang."""

    role: str
    strategy: str
    model: str | None
    dtype: str
    devices: list[int]
    nodes: list[int]
    workers: int
    tensor: int
    pipeline: int
    data: int
    shares_devices_with: list[str]
    context: int = 1
    experts: str = ""
    """How the experts of a mixture are split, such as `etp1 ep8 edp2`; empty where every rank has all of them."""


@dataclass(frozen=True)
class DevicePlan:
    """One device: its node and the rank or engine of every role on it."""

    device: int
    node: int
    local_index: int
    uses: list[str]


@dataclass(frozen=True)
class Plan:
    """All numbers that follow from a configuration; text, numbers and lists only, so that it converts to JSON."""

    exp_name: str
    pipeline: str
    source: str
    platform: str
    nodes: int
    devices_per_node: int
    roles: list[RolePlan]
    devices: list[DevicePlan]
    batch: list[Line]
    memory: list[MemoryPlan]
    takes_turns: bool = False
    """Whether trainer and engines hold the memory of their devices in turns."""
    engine_share: float | None = None
    """`mem_fraction_static` of engines that keep their memory on GPUs that they share with the trainer."""
    downloads: list[Download] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)
    """What stops a run on this machine, such as a missing model."""
    warnings: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The plan for JSON, with totals."""
        plan = asdict(self)
        for shown, memory in zip(plan["memory"], self.memory, strict=True):
            shown["total"] = memory.total
        return plan | {"needed_memory": needed_memory(self)}


def make_plan(config: BaseConfig, hardware: Hardware | None = None, hub: LookUp | None = None) -> Plan:
    """The plan of a configuration for a machine, by default this one, with what was looked up of models and datasets.

    For a model that is not on this machine the plan has no memory estimate, and a warning.

    Raises:
        ConfigError: the devices do not fit the nodes, or a model does not fit its role.
    """
    hardware, hub = hardware or this_machine(), hub or LookUp()
    here = platform_here(config, hardware)
    report = check(config)
    platform, per_node = resolve_platform(config, hardware, report)
    report.add(check_nodes(config, platform, per_node))
    report.add(check_head_sizes(config, platform))
    report.add(check_fits_machine(config, here, hardware))
    if not report.errors:
        report.add(check_memory(config, here, hardware))
    if report.errors:
        raise ConfigError(report.errors, config.source.file)
    shapes, engine_share = model_shapes(config), None
    if isinstance(config, RLConfig) and config.keeps_engines(platform):
        engine_share = config.actor_infer.strategy_args.strategy_config.get("mem_fraction_static")
    return Plan(
        exp_name=config.exp_name,
        pipeline=config.pipeline,
        source=config.source.file,
        platform=platform,
        nodes=1 + max((max(w.device_mapping) // per_node for w in config.device_roles().values()), default=0),
        devices_per_node=per_node,
        roles=[_role(config, role, worker, per_node) for role, worker in config.device_roles().items()],
        devices=_devices(config, per_node),
        batch=[*batch_lines(config), *update_lines(config, shapes, platform)],
        memory=memory_plans(config, shapes, platform),
        takes_turns=isinstance(config, RLConfig) and config.takes_turns(platform),
        engine_share=engine_share,
        downloads=hub.downloads,
        stops=[str(problem) for problem in [*report.missing, *hub.problems]],
        warnings=[*map(str, report.warnings), *_without_memory(config, shapes)],
    )


def _without_memory(config: BaseConfig, shapes: Mapping[str, ModelShape]) -> list[str]:
    """Why roles have no memory estimate."""
    reasons: dict[str, list[str]] = {}
    for role, worker in config.device_roles().items():
        if role not in shapes:
            file = local_model(worker.model_args.model_name_or_path or "") / CONFIG_NAME
            why = "architecture is not known here" if file.is_file() else "config.json is not on this machine"
            reasons.setdefault(why, []).append(role)
    return [f"no memory estimate for {', '.join(roles)}: the model's {why}" for why, roles in reasons.items()]


def _role(config: BaseConfig, role: str, worker: RoleConfig, per_node: int) -> RolePlan:
    layout, devices = worker.layout, worker.device_mapping
    others = [(name, {*other.device_mapping}) for name, other in config.device_roles().items() if name != role]
    return RolePlan(
        role=role,
        strategy=worker.strategy_args.strategy_name,
        model=worker.model_args.model_name_or_path,
        dtype=worker.model_args.dtype,
        devices=devices,
        nodes=sorted({device // per_node for device in devices}),
        workers=layout.world_size if isinstance(worker, MegatronRoleConfig) else layout.data,
        tensor=layout.tensor,
        context=layout.context,
        pipeline=layout.pipeline,
        data=layout.data,
        shares_devices_with=[name for name, theirs in others if theirs & {*devices}],
        experts=_experts(layout),
    )


def _experts(layout: ParallelLayout) -> str:
    if layout.expert == 1 and layout.expert_tensor in (None, layout.tensor):
        return ""
    return f"etp{layout.expert_ranks // layout.expert} ep{layout.expert} edp{layout.expert_copies}"


def _devices(config: BaseConfig, per_node: int) -> list[DevicePlan]:
    uses: dict[int, list[str]] = {}
    for role, worker in config.device_roles().items():
        for rank, device in enumerate(worker.device_mapping):
            uses.setdefault(device, []).append(f"{role} {_position(worker, rank)}")
    return [DevicePlan(device, device // per_node, device % per_node, uses[device]) for device in sorted(uses)]


def _position(worker: RoleConfig, rank: int) -> str:
    layout = worker.layout
    if not isinstance(worker, MegatronRoleConfig):
        return f"engine {rank // layout.tensor}" + (f" tp{rank % layout.tensor}" if layout.tensor > 1 else "")
    at = layout.coordinates(rank)
    context = f" cp{at.context}" if layout.context > 1 else ""
    return f"rank {rank} (tp{at.tensor}{context} dp{at.data} pp{at.pipeline})"


def _groups(plan: Plan) -> dict[tuple[str, ...], int]:
    """The roles of each device, in the order of devices, and on how many devices of one node they are at most."""
    known = {memory.role for memory in plan.memory}
    counts: dict[tuple[str, ...], Counter[int]] = {}
    for item in plan.devices:
        group = tuple(role.role for role in plan.roles if item.device in role.devices)
        if known.issuperset(group):
            counts.setdefault(group, Counter())[item.node] += 1
    return {group: max(nodes.values()) for group, nodes in counts.items()}


def _mixed(group: Sequence[str]) -> bool:
    return "actor_infer" in group and not UNMOVED.issuperset(group)


def shared_device_memory(plan: Plan) -> list[str]:
    """One line for each set of roles that share a device: the sum of their memory, or that of every phase."""
    totals, needed = {memory.role: memory.total for memory in plan.memory}, needed_memory(plan)
    sentences: list[str] = []
    for group, devices in _groups(plan).items():
        roles = " + ".join(group)
        if plan.takes_turns and _mixed(group):
            sentences.append(_phases(group, plan.memory, devices))
        elif len(group) > 1:
            sentence = f"{roles} on one device: {gibibytes(sum(totals[name] for name in group))}"
            if plan.engine_share and _mixed(group):
                share = f"mem_fraction_static {plan.engine_share:g}"
                sentence += f"; with {share} the device needs {gibibytes(needed[roles])}"
            sentences.append(sentence)
    return sentences


def needed_memory(plan: Plan) -> dict[str, int]:
    """Bytes of the smallest device for each set of roles on one: where they take turns, for their largest phase."""
    return {" + ".join(group): _needed_bytes(plan, group) for group in _groups(plan)}


def _needed_bytes(plan: Plan, group: Sequence[str]) -> int:
    """An engine beside a trainer takes its share of what the trainer's states leave free, and no more later."""
    if plan.takes_turns and _mixed(group):
        return max(_phase_bytes(group, plan.memory).values())
    lines = [(memory.role, line) for memory in plan.memory if memory.role in group for line in memory.lines]
    total, share = sum(line.bytes for _, line in lines), plan.engine_share
    if share is None or not _mixed(group):
        return total
    engine = sum(line.bytes for role, line in lines if role == "actor_infer" and line.name != GRAPHS)
    states = sum(line.bytes for role, line in lines if role != "actor_infer" and line.name in STATE_LINES)
    return int(max(states + engine / share, (total - engine) / (1 - share)))


def what_stops(plan: Plan, device_gib: float | None = None, elsewhere: bool = False) -> list[str]:
    """Why the run cannot start here, or not on devices of `device_gib`; a run `elsewhere` may find what is missing."""
    stops = [] if elsewhere else [*plan.stops]
    if device_gib is None:
        return stops
    if len(plan.memory) < len(plan.roles):
        stops.append("not every model is here, so what a device needs is not known")
    return stops + [
        f"{roles} need on one device at least {gibibytes(size)} at once, more than the {device_gib:g} GiB"
        for roles, size in needed_memory(plan).items()
        if size > device_gib * 2**30
    ]


def _phase_bytes(group: Sequence[str], memory: Sequence[MemoryPlan]) -> dict[str, int]:
    """Memory of one device in each phase of `roll.distributed.shared_devices`; roles compute one after another."""
    of_role = {plan.role: {line.name: line.bytes for line in plan.lines} for plan in memory}
    trainers = [role for role in group if role not in UNMOVED]
    stays = sum(sum(of_role[role].values()) for role in SCORING_ROLES if role in group)
    graphs = of_role["actor_infer"].get(GRAPHS, 0)
    states = {role: sum(of_role[role].get(name, 0) for name in STATE_LINES) for role in trainers}
    training = sum(states.values()) + max(sum(of_role[role].values()) - states[role] for role in trainers)
    generation = sum(of_role["actor_infer"].values())
    sent = of_role["actor_train"]["weights"] if "actor_train" in group else 0
    update = sent + of_role["actor_infer"]["weights"]
    return {
        "while training": training + graphs + stays,
        "during an update": update + graphs + stays,
        "while generating": generation + stays,
    }


def _phases(group: Sequence[str], memory: Sequence[MemoryPlan], devices: int) -> str:
    phases = ", ".join(f"{gibibytes(size)} {phase}" for phase, size in _phase_bytes(group, memory).items())
    trainers = [plan for plan in memory if plan.role in group and plan.role not in UNMOVED]
    away = sum(line.bytes for plan in trainers for line in plan.lines if line.name in ("weights", "optimizer"))
    kept = away + sum(line.bytes for plan in trainers for line in plan.host)
    return (
        f"{' + '.join(group)} take turns on one device: {phases}, with {gibibytes(kept)} in host memory meanwhile, "
        f"{gibibytes(kept * devices)} on a node (up to twice that: torch rounds pinned memory up to powers of two)"
    )

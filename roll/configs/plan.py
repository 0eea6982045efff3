"""The plan of a run: devices, layouts, batch sizes, memory and warnings, without starting anything."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from textwrap import TextWrapper
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from roll.base.errors import ConfigError, Problem, gibibytes
from roll.base.terminal import make_console
from roll.configs.agentic import AgenticConfig, EnvManagerConfig
from roll.configs.hardware import (
    Hardware,
    check_fits_machine,
    check_memory,
    check_nodes,
    platform_here,
    resolve_platform,
    this_machine,
)
from roll.configs.memory import GRAPHS, STATE_LINES, MemoryPlan, memory_plans, model_shapes
from roll.configs.parallel_layout import spans
from roll.configs.pipeline import BaseConfig, PreferenceConfig, RLConfig
from roll.configs.policy import samples_with_own_pass, training_gives_old_log_probs
from roll.configs.roles import ActorTrainConfig, MegatronRoleConfig, RoleConfig, TrainedRoleConfig
from roll.configs.rules import check
from roll.configs.rules.files import check_head_sizes
from roll.hub.find import Download, LookUp
from roll.hub.names import CONFIG_NAME, local_model

SCORING_ROLES = ("reward", "judge")
"""Roles whose models score responses, and stay on their devices in every phase."""

UNMOVED = {"actor_infer", *SCORING_ROLES}
"""Roles whose states no hand-over moves to host memory: engines free theirs, and models that score keep their own."""

UNBROKEN = ("role", "engine", "dtype", "workers", "layout")
"""Columns whose words a narrow terminal does not cut."""


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


@dataclass(frozen=True)
class DevicePlan:
    """One device: its node and the rank or engine of every role on it."""

    device: int
    node: int
    local_index: int
    uses: list[str]


@dataclass(frozen=True)
class Line:
    """One number of the batch and its formula."""

    name: str
    value: int | float | str
    formula: str


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
    """The plan of a loaded configuration.

    For a model that is not on this machine the plan has no memory estimate, and a warning.

    Args:
        config: from `load_config`.
        hardware: of the machine that would run it; None is this machine.
        hub: what was looked up of models and datasets given by name; None if nothing was.

    Raises:
        ConfigError: the devices do not fit the nodes, or the configuration was changed after loading and breaks a
            rule.
    """
    hardware = hardware or this_machine()
    report = check(config)
    platform, per_node = resolve_platform(config, hardware, report)
    check_nodes(config, platform, per_node, report)
    check_head_sizes(config, platform, report)
    check_fits_machine(config, platform_here(config, hardware), hardware, report)
    check_memory(config, platform_here(config, hardware), hardware, report)
    if report.errors:
        raise ConfigError(report.errors, config.source.file)
    shapes = model_shapes(config)
    memory = memory_plans(config, shapes, platform)
    hub = hub or LookUp()
    warnings = list(report.warnings)
    unknown = [role for role in config.device_roles() if role not in shapes]
    if unknown:
        folders = {
            role: local_model(config.device_roles()[role].model_args.model_name_or_path or "") for role in unknown
        }
        here = [role for role, folder in folders.items() if os.path.isfile(folder / CONFIG_NAME)]
        away = [role for role in unknown if role not in here]
        for names, why in ((away, "config.json is not on this machine"), (here, "architecture is not known here")):
            if names:
                warnings.append(Problem("", f"no memory estimate for {', '.join(names)}: the model's {why}"))
    return Plan(
        exp_name=config.exp_name,
        pipeline=config.pipeline,
        source=config.source.file,
        platform=platform,
        nodes=1 + max((max(w.device_mapping) // per_node for w in config.device_roles().values()), default=0),
        devices_per_node=per_node,
        roles=[_role(config, role, worker, per_node) for role, worker in config.device_roles().items()],
        devices=_devices(config, per_node),
        batch=batch_lines(config),
        memory=memory,
        takes_turns=isinstance(config, RLConfig) and config.takes_turns(platform),
        engine_share=config.actor_infer.strategy_args.strategy_config.get("mem_fraction_static")
        if isinstance(config, RLConfig) and config.keeps_engines(platform)
        else None,
        downloads=hub.downloads,
        stops=[str(problem) for problem in [*report.missing, *hub.problems]],
        warnings=[str(problem) for problem in warnings],
    )


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
        pipeline=layout.pipeline,
        data=layout.data,
        shares_devices_with=[name for name, theirs in others if theirs & {*devices}],
    )


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
    return f"rank {rank} (tp{at.tensor} dp{at.data} pp{at.pipeline})"


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


def fits_devices(plan: Plan, device_gib: float) -> bool:
    """Whether devices of this memory are enough for what every role needs at least; false if it is not known."""
    known = len(plan.memory) == len(plan.roles)
    return known and max(needed_memory(plan).values(), default=0) <= device_gib * 2**30


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


def batch_lines(config: BaseConfig) -> list[Line]:
    """Prompts, samples, micro-batches, optimizer steps and the schedule of a run, each with its formula."""
    training, data = config.actor_train.training_args, config.actor_train.layout.data
    samples, step = config.samples_per_batch, config.actor_train.samples_per_optimizer_step
    size, accumulation = training.per_device_train_batch_size, training.gradient_accumulation_steps
    lines: list[Line] = []

    def add(name: str, value: int | str, formula: str) -> None:
        lines.append(Line(name, value, formula))

    if isinstance(config, AgenticConfig):
        lines += _agentic_lines(config)
    elif isinstance(config, RLConfig):
        prompts, group = config.rollout_batch_size, config.num_return_sequences_in_group
        engines, limit = config.actor_infer.layout.data, config.actor_infer.max_running_requests
        share, responses = config.requests_per_engine, f"{samples} samples"
        if config.uses_greedy_responses:
            responses = f"({samples} samples + {prompts} greedy responses)"
        add("prompts per step", prompts, "rollout_batch_size")
        add("samples per step", samples, f"{prompts} prompts x {group} num_return_sequences_in_group")
        add("requests per engine and step", share, f"{responses} / {engines} engines, rounded up")
        add("requests at a time on one engine", min(share, limit), f"max_running_requests {limit}")
    product = f"{size} per_device_train_batch_size x {accumulation} gradient_accumulation_steps x {data} data parallel"
    unit, rows = ("pairs", 2) if isinstance(config, PreferenceConfig) else ("samples", 1)
    add(f"{unit} per optimizer step", step, product)
    add(f"{unit} per rank and optimizer step", step // data, f"{step} / {data} data parallel")
    lines.append(_micro_batch_line(config.actor_train, step // data))
    if isinstance(config, RLConfig):
        filling = ", filled up with masked samples" if samples % step else ""
        steps = f"{samples} samples / {step} x {config.ppo_epochs} ppo_epochs{filling}"
        add("optimizer steps per batch", config.optimizer_steps_per_batch, steps)
        lines.append(_forward_line(config))
    else:
        add("optimizer steps per batch", 1, "a batch is one optimizer step")
    length = config.sequence_length or 0
    formula = f"{samples} {unit} x {'2 responses x ' if rows > 1 else ''}{config.sequence_length} sequence_length"
    add("tokens per step, at most", rows * samples * length, formula)
    lines += _schedule_lines(config, config.actor_train)
    if isinstance(config, RLConfig) and config.uses_critic:
        lines += _critic_lines(config)
    return lines


def _schedule_lines(config: BaseConfig, worker: TrainedRoleConfig, of: str = "") -> list[Line]:
    training, steps = worker.training_args, config.schedule_steps(worker)
    each = config.steps_per_batch(worker)
    waits = config.max_steps - steps // each
    batches = f"({config.max_steps} max_steps - {waits} critic_warmup)" if waits else f"{config.max_steps} max_steps"
    warmup = training.warmup_steps or round(training.warmup_ratio * steps)
    end = f" to {training.min_learning_rate:g}" if training.lr_scheduler_type != "constant" else ""
    rate = f"to {training.learning_rate:g}, then {training.lr_scheduler_type}{end}"
    return [
        Line(f"{of}learning-rate schedule", f"{steps} steps", f"{batches} x {each} optimizer steps per batch"),
        Line(f"{of}warm-up", f"{warmup} steps", rate),
    ]


def _critic_lines(config: RLConfig) -> list[Line]:
    step, samples = config.critic.samples_per_optimizer_step, config.samples_per_batch
    formula = f"{samples} samples / {step} x {config.ppo_epochs} ppo_epochs"
    steps = Line("critic: optimizer steps per batch", config.steps_per_batch(config.critic), formula)
    return [steps, *_schedule_lines(config, config.critic, "critic: ")]


def _micro_batch_line(worker: ActorTrainConfig, samples_per_rank: int) -> Line:
    tokens = worker.training_token_limit
    if tokens is not None:
        return Line(
            "micro-batches", "by tokens", f"{samples_per_rank} samples in micro-batches of at most {tokens} tokens"
        )
    count, size = worker.training_args.gradient_accumulation_steps, worker.training_args.per_device_train_batch_size
    return Line(
        "micro-batches per rank and optimizer step", count, f"{samples_per_rank} samples / {size} per micro-batch"
    )


def _forward_line(config: RLConfig) -> Line:
    worker, data = config.actor_train, config.actor_train.layout.data
    name = "forward micro-batches per rank (log-probs)"
    if config.old_log_probs_source == "behavior":
        return Line(name, 0, "old_log_probs_source behavior takes the engine's log-probs")
    if worker.forward_token_limit is not None:
        return Line(name, "by tokens", f"at most {worker.forward_token_limit} tokens each")
    share = -(-config.filled_samples_per_batch // data)
    later = ""
    if training_gives_old_log_probs(config):
        left = samples_with_own_pass(config) or "no"
        later = f"; from the second step on {left} samples: training gives the log-probs of the others"
    return Line(
        name,
        -(-share // worker.infer_batch_size),
        f"{share} samples / {worker.infer_batch_size} infer_batch_size, rounded up{later}",
    )


def _agentic_lines(config: AgenticConfig) -> list[Line]:
    manager, turns, trajectories = config.train_env_manager, config.turns, config.rollout_batch_size
    tags = config.tags_of(manager)
    tokens = max((config.custom_envs[tag].max_tokens_per_step or 0 for tag in tags), default=0)
    engines, limit = config.actor_infer.layout.data, config.actor_infer.max_running_requests
    groups = f"{trajectories} trajectories / {manager.group_size} train_env_manager.group_size"
    requests = f"{manager.environments} environments / {engines} engines, rounded up; max_running_requests {limit}"
    samples = Line("samples per step", config.samples_per_batch, "one for each trajectory (sample_by traj)")
    if config.sample_by == "step":
        formula = f"{trajectories} trajectories x {turns} turns (sample_by step)"
        samples = Line("samples per step, at most", config.samples_per_batch, formula)
    lines = [
        Line("trajectories per step", trajectories, "rollout_batch_size"),
        Line("groups per step", config.groups_per_batch, groups),
        *_manager_lines("", manager),
        Line("turns per trajectory, at most", turns, _of_tags("max_steps", config)),
        Line("tokens per turn, at most", tokens, _of_tags("max_tokens_per_step", config)),
        Line("tokens per trajectory, at most", config.sequence_length or 0, "sequence_length"),
        samples,
        Line("requests at a time on one engine", min(config.requests_per_engine, limit), requests),
    ]
    if config.eval_steps:
        lines.append(Line("trajectories of a validation", config.val_batch_size or 0, "val_batch_size"))
        lines += _manager_lines(" of a validation", config.val_env_manager)
    return lines


def _manager_lines(suffix: str, manager: EnvManagerConfig) -> list[Line]:
    """Environments at a time and their processes; `suffix` distinguishes validation from training."""
    count, limit = manager.environments, manager.max_env_num_per_worker
    groups = ", ".join(f"{part} {tag}" for tag, part in zip(manager.tags, manager.num_groups_partition, strict=True))
    members = f"({manager.group_size} group_size + {manager.group_size_redundancy} group_size_redundancy)"
    processes = f"{count} environments / {limit} max_env_num_per_worker, rounded up"
    return [
        Line(
            f"environments at a time{suffix}", count, f"{manager.num_env_groups} num_env_groups ({groups}) x {members}"
        ),
        Line(
            f"environment processes{suffix}",
            manager.processes,
            processes if limit else "max_env_num_per_worker 0: all in one",
        ),
    ]


def _of_tags(key: str, config: AgenticConfig) -> str:
    tags = config.tags_of(config.train_env_manager)
    return f"{key} of " + ", ".join(f"{tag} ({getattr(config.custom_envs[tag], key)})" for tag in tags)


def print_plan(
    plan: Plan, file: TextIO | None = None, device_gib: float | None = None, elsewhere: bool = False
) -> None:
    """Writes the plan to `file`, or to standard output; a run `elsewhere` may find what is missing here."""
    console = make_console(file)
    plural = "s" if plan.nodes > 1 else ""
    nodes = f"{plan.nodes} node{plural} x {plan.devices_per_node} device{'s' if plan.devices_per_node > 1 else ''}"
    source = f"  ({plan.source})" if plan.source else ""
    console.print(f"{plan.exp_name}: {plan.pipeline} on {plan.platform}, {nodes}{source}", markup=False, style="bold")
    console.print(_roles(plan))
    console.print(_device_table(plan))
    console.print(
        _table(
            "Batch",
            ["", "", ""],
            [
                (line.name, f"{line.value:,}" if isinstance(line.value, int) else str(line.value), line.formula)
                for line in plan.batch
            ],
        )
    )
    if plan.memory:
        console.print(_memory(plan))
        for sentence in shared_device_memory(plan):
            console.print(f"  {sentence}", markup=False)
    for roles, size in needed_memory(plan).items():
        if device_gib is None:
            break
        enough = size <= device_gib * 2**30
        verdict = f"at least {gibibytes(size)} at once, {'of' if enough else 'more than the'} {device_gib:g} GiB"
        console.print(f"  {roles} need on one device {verdict}", markup=False, style="green" if enough else "bold red")
    if device_gib is not None and len(plan.memory) < len(plan.roles):
        console.print("  not every model is here, so what a device needs is not known", style="bold red")
    if plan.downloads:
        console.print(_downloads(plan))
    if plan.stops:
        title, style = ("Missing here", "bold yellow") if elsewhere else ("This stops a run here", "bold red")
        _print_list(console, title, style, plan.stops)
    if not plan.warnings and not plan.stops:
        console.print("No warnings.", style="green")
    if not plan.warnings:
        return
    title = f"{len(plan.warnings)} warning{'s' if len(plan.warnings) > 1 else ''}"
    _print_list(console, title, "bold yellow", plan.warnings)


def _print_list(console: Console, title: str, style: str, lines: Sequence[str]) -> None:
    console.print(title, style=style)
    wrap = TextWrapper(console.width, "    ", "    ", break_long_words=False, break_on_hyphens=False)
    for line in lines:
        text = "\n".join(map(wrap.fill, line.splitlines()))
        console.print(f"  - {text.lstrip()}", markup=False, soft_wrap=True)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_header=any(columns), title_style="bold")
    for index, column in enumerate(columns):
        number = title in ("Batch", "Memory per device") and index == len(columns) - 2
        table.add_column(column, justify="right" if number else "left", overflow="fold", no_wrap=column in UNBROKEN)
    for row in rows:
        table.add_row(*row)
    return table


def _roles(plan: Plan) -> Table:
    rows = [
        (
            role.role,
            role.strategy,
            role.dtype,
            f"{role.workers} {'engine' if role.strategy == 'sglang' else 'rank'}{'s' if role.workers > 1 else ''}",
            f"tp{role.tensor} pp{role.pipeline} dp{role.data}",
            role.model or "-",
        )
        for role in plan.roles
    ]
    columns = ["role", "engine", "dtype", "workers", "layout", "model"]
    return _table("Roles", columns, rows)


def _device_table(plan: Plan) -> Table:
    rows = []
    owners = {item.device: [role for role in plan.roles if item.device in role.devices] for item in plan.devices}
    for roles, group in groupby(plan.devices, key=lambda item: owners[item.device]):
        items = list(group)
        uses = ", ".join(f"{role.role} {_places(role, [item.device for item in items])}" for role in roles)
        rows.append((spans([item.device for item in items]), spans(sorted({item.node for item in items})), uses))
    return _table("Devices", ["devices", "nodes", "used by"], rows)


def _places(role: RolePlan, devices: Sequence[int]) -> str:
    size, unit = (role.tensor, "engine") if role.strategy == "sglang" else (1, "rank")
    numbers = sorted({role.devices.index(device) // size for device in devices})
    return f"{unit}{'s' if len(numbers) > 1 else ''} {spans(numbers)}"


def _memory(plan: Plan) -> Table:
    rows: list[tuple[str, str, str, str]] = []
    for memory in plan.memory:
        rows += [
            (memory.role if not i else "", line.name, gibibytes(line.bytes), line.formula)
            for i, line in enumerate(memory.lines)
        ]
        rows.append(("", "total", gibibytes(memory.total), memory.where))
        rows += [("", line.name, gibibytes(line.bytes), line.formula) for line in memory.host]
    return _table("Memory per device", ["role", "", "", "formula"], rows)


def _downloads(plan: Plan) -> Table:
    rows = [
        (
            item.name,
            ", ".join(item.used_by),
            f"{item.files} file{'s' if item.files != 1 else ''}, {gibibytes(item.bytes)}",
            f"{gibibytes(item.missing_bytes)} to fetch" if item.missing_bytes else "on this machine",
        )
        for item in plan.downloads
    ]
    return _table("Models and data by name", ["name", "key", "size", ""], rows)

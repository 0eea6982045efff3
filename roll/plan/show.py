"""Prints the plan of a run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from textwrap import TextWrapper
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from roll.base.terminal import make_console
from roll.base.text import gibibytes
from roll.configs.devices.parallel_layout import spans
from roll.plan.plan import Plan, RolePlan, needed_memory, shared_device_memory

UNBROKEN = ("role", "engine", "dtype", "workers", "layout")
"""Columns whose words a narrow terminal does not cut."""


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

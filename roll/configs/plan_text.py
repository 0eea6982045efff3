"""Prints a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from roll.configs.memory import gibibytes
from roll.configs.parallel_layout import spans
from roll.configs.plan import Plan, shared_device_memory

WIDTH = 160
"""Columns where the output is not a terminal, so that formulas stay on one line."""


def print_plan(plan: Plan, file: TextIO | None = None) -> None:
    """Writes the plan to `file`, or to standard output."""
    console = Console(file=file, highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console = Console(file=file, highlight=False, width=WIDTH)
    plural = "s" if plan.nodes > 1 else ""
    nodes = f"{plan.nodes} node{plural} x {plan.devices_per_node} devices"
    source = f"  ({plan.source})" if plan.source else ""
    console.print(f"{plan.exp_name}: {plan.pipeline} on {plan.platform}, {nodes}{source}", markup=False, style="bold")
    console.print(_roles(plan))
    console.print(_devices(plan))
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
    if not plan.warnings:
        console.print("No warnings.", style="green")
        return
    console.print(f"{len(plan.warnings)} warning{'s' if len(plan.warnings) > 1 else ''}", style="bold yellow")
    for warning in plan.warnings:
        console.print(f"  - {warning}", markup=False, soft_wrap=True)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_header=any(columns), title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(
            column, justify="right" if title in ("Batch", "Memory per device") and index == len(columns) - 2 else "left"
        )
    for row in rows:
        table.add_row(*row)
    return table


def _roles(plan: Plan) -> Table:
    rows = [
        (
            role.role,
            role.strategy,
            role.dtype,
            spans(role.devices),
            spans(role.nodes),
            f"{role.workers} {'engines' if role.strategy == 'sglang' else 'ranks'}",
            f"tp{role.tensor} pp{role.pipeline} dp{role.data}",
            ", ".join(role.shares_devices_with) or "-",
            role.model or "-",
        )
        for role in plan.roles
    ]
    columns = ["role", "engine", "dtype", "devices", "nodes", "workers", "layout", "shares with", "model"]
    return _table("Roles", columns, rows)


def _devices(plan: Plan) -> Table:
    rows = [(str(item.device), str(item.node), str(item.local_index), ", ".join(item.uses)) for item in plan.devices]
    return _table("Devices", ["device", "node", "index on node", "used by"], rows)


def _memory(plan: Plan) -> Table:
    rows: list[tuple[str, str, str, str]] = []
    for memory in plan.memory:
        rows += [
            (memory.role if not i else "", line.name, gibibytes(line.bytes), line.formula)
            for i, line in enumerate(memory.lines)
        ]
        rows.append(("", "total", gibibytes(memory.total), memory.where))
    return _table("Memory per device", ["role", "", "", "formula"], rows)

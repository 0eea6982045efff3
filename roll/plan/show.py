"""Prints the plan of a run: what stops it, warnings, and then devices, batch sizes and memory."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import TextWrapper
from typing import TextIO

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from roll.base.terminal import make_console
from roll.base.text import format_count, gibibytes
from roll.configs.devices.parallel_layout import spans
from roll.plan.plan import Plan, needed_memory, shared_device_memory, what_stops

KINDS = {
    ": has no effect": "keys without effect",
    " read as ": "keys read as others",
    ": is read under its name": "keys read under their names here",
}
"""Words of a warning that make its kind -> what warnings of the kind are about."""

FOLDED = 4
"""Keys with warnings of one kind from which on only the first warning is printed, and this many keys are named."""


def print_plan(
    plan: Plan, file: TextIO | None = None, device_gib: float | None = None, elsewhere: bool = False
) -> None:
    """Writes the plan to `file`, or to standard output; a run `elsewhere` may find what is missing here."""
    console = make_console(file)
    nodes = f"{format_count(plan.nodes, 'node')} x {format_count(plan.devices_per_node, 'device')}"
    source = f"  ({plan.source})" if plan.source else ""
    _print(console, f"{plan.exp_name}: {plan.pipeline} on {plan.platform}, {nodes}{source}", "bold", "")
    _print_list(console, "This stops the run", "bold red", what_stops(plan, device_gib, elsewhere))
    _print_list(console, "Missing here", "bold yellow", plan.stops if elsewhere else [])
    warnings = fold(plan.warnings)
    hint = "; --json prints each" if len(warnings) < len(plan.warnings) else ""
    _print_list(console, f"{format_count(len(plan.warnings), 'warning')}{hint}", "bold yellow", warnings)
    if not plan.warnings and not plan.stops:
        console.print("No warnings.", style="green")
    console.print(_roles(plan))
    _print_list(console, "Models", "bold", _models(plan))
    batch = [
        (line.name, f"{line.value:,}" if isinstance(line.value, int) else str(line.value), line.formula)
        for line in plan.batch
    ]
    console.print(_table("Batch", batch))
    if plan.memory:
        console.print(_memory(plan))
    for sentence in shared_device_memory(plan):
        _print(console, sentence)
    for roles, size in needed_memory(plan).items():
        if device_gib is not None and size <= device_gib * 2**30:
            enough = f"{roles} need on one device at least {gibibytes(size)} at once, of {device_gib:g} GiB"
            _print(console, enough, "green")
    _print_list(console, "Models and data by name", "bold", _downloads(plan))


def fold(warnings: Sequence[str]) -> list[str]:
    """The warnings with one line for each of KINDS that has many keys: its first warning, a count, and more keys."""
    kinds: dict[str, list[tuple[str, str, str]]] = {}
    for line in warnings:
        kinds.setdefault(next((words for words in KINDS if words in line), line), []).append(line.partition(": "))
    folded: list[str] = []
    for kind, parts in kinds.items():
        keys = list(dict.fromkeys(key for path, _, _ in parts for key in path.split(", ")))
        if kind not in KINDS or len(keys) < FOLDED:
            folded += map("".join, parts)
        else:
            named = ", ".join(keys[1:FOLDED]) + (", ..." if keys[FOLDED:] else "")
            folded.append(f"{keys[0]}: {parts[0][2]}; {len(keys) - 1} more {KINDS[kind]}: {named}")
    return folded


def _print(console: Console, text: str, style: str = "", indent: str = "  ", bullet: str = "") -> None:
    """Wraps between words only, so that a path can be copied."""
    wrap = TextWrapper(console.width, indent, indent, break_long_words=False, break_on_hyphens=False)
    lines = "\n".join(map(wrap.fill, text.splitlines()))
    console.print(f"{bullet}{lines.lstrip()}" if bullet else lines, style=style, markup=False, soft_wrap=True)


def _print_list(console: Console, title: str, style: str, lines: Sequence[str]) -> None:
    if lines:
        console.print(title, style=style)
    for line in lines:
        _print(console, line, indent="    ", bullet="  - ")


def _table(title: str, rows: Sequence[Sequence[RenderableType]], columns: Sequence[str] = ("", "", "")) -> Table:
    """A table; one without names of columns has numbers in the second."""
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_header=any(columns),
        title_style="bold",
        pad_edge=False,
    )
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index == 1 and not any(columns) else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _roles(plan: Plan) -> Table:
    rows = [
        (
            role.role,
            spans(role.devices).replace(",", ", "),
            spans(role.nodes).replace(",", ", "),
            format_count(role.workers, "engine" if role.strategy == "sglang" else "rank"),
            f"tp{role.tensor}{f' cp{role.context}' if role.context > 1 else ''} pp{role.pipeline} dp{role.data}"
            + (f" | {role.experts}" if role.experts else ""),
            f"{role.strategy} {role.dtype}",
        )
        for role in plan.roles
    ]
    return _table("Roles", rows, ["role", "devices", "nodes", "workers", "layout", "engine"])


def _models(plan: Plan) -> list[str]:
    models: dict[str, list[str]] = {}
    for role in plan.roles:
        models.setdefault(role.model or "-", []).append(role.role)
    return [f"{model}: {', '.join(roles)}" for model, roles in models.items()]


def _memory(plan: Plan) -> Table:
    rows: list[tuple[RenderableType, str, str]] = []
    for memory in plan.memory:
        rows += [(Text(memory.role, "bold"), "", "")]
        rows += [(line.name, gibibytes(line.bytes), line.formula) for line in memory.lines]
        rows += [("total", gibibytes(memory.total), memory.where)]
        rows += [(line.name, gibibytes(line.bytes), line.formula) for line in memory.host]
    return _table("Memory per device", rows)


def _downloads(plan: Plan) -> list[str]:
    lines = []
    for item in plan.downloads:
        there = f"{gibibytes(item.missing_bytes)} to fetch" if item.missing_bytes else "on this machine"
        files = f"{format_count(item.files, 'file')}, {gibibytes(item.bytes)}, {there}"
        lines.append(f"{item.name}: {files} ({', '.join(item.used_by)})")
    return lines

"""`roll explain`: says who moved the weights in a step of a run, after checking itself against the log."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from roll.base.errors import RunError
from roll.base.terminal import make_console
from roll.report.read import Run, read_run
from roll.report.samples import token_pieces
from roll.report.text import digits, percent
from roll.tools.show.samples import choose_step
from roll.tools.terminal import option_error

if TYPE_CHECKING:
    from roll.report.explain import Explained

GROUPS, TOKENS, UNUSUAL = 5, 5, 8
"""Groups, tokens and metrics that are printed."""

CONTEXT = 8
"""Tokens shown on both sides of one."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `roll explain`."""
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="output_dir of a run")
    parser.add_argument("--step", type=int, metavar="N", help="a step whose samples were kept (default: the last)")


def run(arguments: argparse.Namespace) -> int:
    """Prints the explanation; exit code 1 where the loss is not the one that the run logged."""
    from roll.report.explain import explain

    found = read_run(arguments.run)
    step = choose_step(found.dumped, arguments.step, found.dump or arguments.run)
    try:
        explained = explain(found, step)
    except (RunError, ValueError, KeyError) as error:
        raise option_error("--step", str(error)) from None
    console = make_console()
    if explained.differences:
        console.print(f"step {step}: its loss cannot be computed again, so nothing is explained")
        for name, (again, logged) in explained.differences.items():
            console.print(f"  actor/{name}: {again:.8g} again, {logged:.8g} logged")
        return 1
    for part in (_sentences(explained), _shares(explained), *_examples(found, explained), _unusual(found, step)):
        console.print(part, highlight=False)
    return 0


def _sentences(explained: Explained) -> str:
    from roll.report.explain import half_of

    samples, tokens = len(explained.rows), sum(len(row["response_ids"]) for row in explained.rows)
    moved = explained.moved != 0
    checked = explained.unchecked or "loss and metrics equal the logged ones"
    if not bool(moved.any()):
        return f"Step {explained.step}: no token has a gradient: the samples of each group have equal scores."
    return (
        f"Step {explained.step}: half of the weight is in {half_of(explained.weights.sum(-1)):,} of {samples:,} "
        f"samples and {half_of(explained.weights):,} of {tokens:,} tokens. {int(moved.any(-1).sum()):,} samples and "
        f"{int(moved.sum()):,} tokens have a gradient.\nChecked: {checked}.\n"
    )


def _shares(explained: Explained) -> Table:
    from roll.report.explain import shares

    table = Table("by", "", "share of weight", "share of tokens", title="Who carried the weight", title_justify="left")
    for way, parts in shares(explained).items():
        if len(parts) > 1 or way in ("advantage", "loss"):
            label = way
            for part, (weight, tokens) in list(parts.items())[:6]:
                table.add_row(label, escape(part), percent(weight), percent(tokens))
                label = ""
    return table


def _examples(found: Run, explained: Explained) -> list[Table]:
    """The groups and the tokens with the most weight."""
    pieces, rows, weights = token_pieces(found), explained.rows, explained.weights
    total = float(weights.sum()) or 1.0
    by_group: dict[int, float] = {}
    for row, weight in zip(rows, weights.sum(-1).tolist(), strict=True):
        by_group[row["group"]] = by_group.get(row["group"], 0.0) + weight / total
    groups = Table("weight", "scores", "prompt", title="Groups", title_justify="left")
    for number in sorted(by_group, key=lambda each: -by_group[each])[:GROUPS]:
        samples = [row for row in rows if row["group"] == number]
        scores = " ".join(digits(row["score"]) for row in samples[:8]) + (" ..." if len(samples) > 8 else "")
        groups.add_row(percent(by_group[number]), scores, _one_line(pieces(samples[0]["prompt_ids"][-60:])))
    tokens = Table("weight", "p", "advantage", "token in its response", title="Tokens", title_justify="left")
    width = weights.shape[1]
    for flat in weights.flatten().argsort(descending=True)[:TOKENS].tolist():
        row, at = rows[flat // width], flat % width
        if at >= len(row["response_ids"]) or not float(weights[flat // width, at]):
            continue
        first = max(0, at - CONTEXT)
        shown = pieces(row["response_ids"][first : at + CONTEXT])
        text = f"{_one_line(shown[: at - first])}[bold]»{_one_line(shown[at - first :][:1])}«[/]"
        tokens.add_row(
            percent(float(weights[flat // width, at]) / total),
            f"{explained.probability(flat // width, at):.2g}",
            digits(row["advantages"][at]),
            text + _one_line(shown[at - first + 1 :]),
        )
    return [groups, tokens]


def _one_line(pieces: Sequence[str]) -> str:
    return escape("".join(pieces).replace("\n", "\\n")[-120:])


def _unusual(found: Run, step: int) -> Table | str:
    from roll.report.explain import unusual

    metrics = unusual(found, step)
    if not metrics:
        return "No metric is unusual against the ten steps before."
    table = Table("metric", "this step", "mean of ten before", title="Unusual in this step", title_justify="left")
    for name, value, mean in metrics[:UNUSUAL]:
        table.add_row(name, digits(value), digits(mean))
    return table

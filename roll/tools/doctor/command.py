"""`roll doctor`: options, and the table of speeds."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from roll.base.terminal import end_now, handle_interrupt, make_console
from roll.tools.doctor.comparison import MEASURES, RankSpeeds, medians, slow_nodes, slow_speeds
from roll.tools.terminal import number

SLOWER_THAN = 0.8
"""Default of --slower-than: equal devices differ by a few per cent, and a throttled or misplaced one by more."""

SECONDS = 2.0
"""Default of --seconds."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `roll doctor`."""
    parser.add_argument(
        "--slower-than",
        type=fraction,
        default=SLOWER_THAN,
        metavar="X",
        help=f"a rank is slow below this fraction of the median (default: {SLOWER_THAN})",
    )
    parser.add_argument(
        "--seconds",
        type=number(0.1, "seconds"),
        default=SECONDS,
        metavar="S",
        help=f"duration of each measurement on a device (default: {SECONDS:g})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def fraction(text: str) -> float:
    """Argument type for numbers above 0 and up to 1."""
    value = number(0)(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction; use a number above 0 and up to 1")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Runs `roll doctor`.

    Returns:
        Exit code: 0 if no rank is slow, 1 if one is.

    Raises:
        ConfigError: the configuration cannot be used on this machine.
        RunError: a measurement failed.
    """
    from roll.envs.registry import try_environment
    from roll.loading.load import load_config
    from roll.plan.hardware import prepare_devices

    config = load_config(arguments.config, arguments.overrides, try_environment=try_environment)
    prepare_devices(config)
    print("starting Ray and a process on each device", file=sys.stderr, flush=True)
    from roll.tools.doctor.measure import measure  # imports torch and Ray

    with handle_interrupt(end_now, signal.SIGTERM):  # Ctrl-C does the same for every command
        ranks, all_reduce = measure(config, arguments.seconds, arguments.slower_than)
    slow = slow_speeds(ranks, arguments.slower_than)
    if arguments.json:
        print(json.dumps(speeds_as_dict(ranks, all_reduce, arguments.slower_than), indent=2))
    else:
        console = make_console()
        dtype = config.actor_train.model_args.dtype
        console.print(f"{config.exp_name}: {len(ranks)} ranks, {dtype} on {config.platform}", markup=False)
        console.print(speed_table(ranks, slow))
        for line in summary(ranks, all_reduce, arguments.slower_than):
            console.print(line, markup=False, soft_wrap=True)
    return 1 if slow else 0


def speeds_as_dict(ranks: Sequence[RankSpeeds], all_reduce: float, slower_than: float) -> dict[str, Any]:
    """What the command prints, as values for JSON."""
    slow = slow_speeds(ranks, slower_than)
    return {
        "ranks": [
            {"rank": r.rank, "node": r.node, "address": r.address, "device": r.device, **r.speeds,
             "slow": slow.get(r.rank, [])}
            for r in ranks
        ],
        "median": medians(ranks),
        "all_reduce": all_reduce,
        "slower_than": slower_than,
        "slow_nodes": sorted({rank.node for rank in ranks if rank.rank in slow}),
    }  # fmt: skip


def speed_table(ranks: Sequence[RankSpeeds], slow: dict[int, list[str]]) -> Table:
    """One row for each rank, and their medians; columns that apply to no rank are left out."""
    middle = medians(ranks)
    table = Table(box=box.SIMPLE_HEAD, show_footer=True)
    table.add_column("rank", "median")
    table.add_column("node")
    table.add_column("device", justify="right")
    for name, median in middle.items():
        table.add_column(MEASURES[name], f"{median:.3g}", justify="right")
    for rank in ranks:
        cells = [
            "" if name not in rank.speeds
            else f"[red]slow {rank.speeds[name]:.3g}[/]" if name in slow.get(rank.rank, ())
            else f"{rank.speeds[name]:.3g}"
            for name in middle
        ]  # fmt: skip
        table.add_row(str(rank.rank), f"{rank.node} ({rank.address})", str(rank.device), *cells)
    return table


def summary(ranks: Sequence[RankSpeeds], all_reduce: float, slower_than: float) -> list[str]:
    """Bandwidth over all ranks, and the slow nodes."""
    lines = [f"all-reduce over {len(ranks)} ranks: {all_reduce:.3g} GB/s bus bandwidth"] if len(ranks) > 1 else []
    slow = slow_nodes(ranks, slow_speeds(ranks, slower_than))
    if not slow:
        return [*lines, f"no rank is slower than {slower_than:g} of the median"]
    return [*lines, *(f"slow: node {node} at {text}" for node, text in slow.items())]

"""Options of `roll ablate` and their checks."""

from __future__ import annotations

import argparse
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add_options(command: argparse.ArgumentParser) -> None:
    """Gives the command its options."""
    command.add_argument("--variants", type=_list_of(str), required=True, help="values of actor_train.pg_variant: a,b")
    command.add_argument("--ratios", type=_list_of(float), required=True, help="values of async_generation_ratio: 0,2")
    command.add_argument("--seeds", type=_list_of(int), required=True, help="seeds: 1,2")
    command.add_argument("--out", type=Path, default=Path("output/ablation"), help="folder (default: output/ablation)")
    command.add_argument("--target", type=_finite, help="validation score whose first step is reported")


def ablate(arguments: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    from roll.ablation.ablate import Ablation
    from roll.ablation.grid import cells

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    grid = cells(arguments.variants, arguments.ratios, arguments.seeds)
    return Ablation(arguments.config, grid, arguments.out, arguments.overrides, arguments.target).run()


def _finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


def _list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """A parser of `a,b,c`."""

    def parse(text: str) -> list[Any]:
        items = [item.strip() for item in text.split(",")]
        if "" in items:
            raise argparse.ArgumentTypeError(f"{text!r} has an empty entry; leave out the comma too many")
        try:
            return [kind(item) for item in items]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 1,2") from None

    return parse

"""Options of `roll show` and their checks."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path


def add_options(command: argparse.ArgumentParser) -> None:
    """Gives the command its arguments."""
    command.add_argument("run", type=Path, metavar="RUN_DIR", help="output_dir of a run, which may still be going")
    command.add_argument("--step", type=_whole(0), metavar="N", help="step (default: the last one there is)")
    command.add_argument("--group", type=_whole(0), metavar="G", help="this group alone, with all its samples")
    command.add_argument("--limit", type=_whole(1), metavar="K", help="most samples (default: 16)")
    command.add_argument("--html", type=Path, metavar="FILE", help="write a page instead of printing")


def show(arguments: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    from roll.show import command

    options = command.Options(arguments.step, arguments.group, arguments.limit, arguments.html)
    return command.show(arguments.run, options)


def _whole(least: int) -> Callable[[str], int]:
    """A parser of whole numbers of at least this."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return value

    return parse

"""`roll explain`: says who moved the weights in a step of a run, after checking itself against the log."""

from __future__ import annotations

import argparse
from pathlib import Path

from roll.base.errors import RunError
from roll.base.terminal import make_console
from roll.report.read import of_policy, read_run
from roll.report.text import said
from roll.tools.show.samples import choose_step
from roll.tools.terminal import option_error


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `roll explain`."""
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="output_dir of a run")
    parser.add_argument("--step", type=int, metavar="N", help="a step whose samples were kept (default: the last)")
    parser.add_argument("--policy", metavar="NAME", help="of several policies, the one that is explained")


def run(arguments: argparse.Namespace) -> int:
    """Prints the explanation; exit code 1 where the loss is not the one that the run logged."""
    from roll.report.explain import explain, views

    found = of_policy(read_run(arguments.run), arguments.policy)
    step = choose_step(found.dumped, arguments.step, found.dump or arguments.run)
    try:
        explained = explain(found, step)
    except (RunError, ValueError, KeyError) as error:
        raise option_error("--step", str(error)) from None
    console = make_console()
    if explained.differences:
        console.print(said("e_differs", step=step))
        for name, (again, logged) in explained.differences.items():
            console.print("  " + said("e_again", name=name, again=f"{again:.8g}", logged=f"{logged:.8g}"))
        return 1
    for part in views(found, explained):
        console.print(part, highlight=False)
    return 0

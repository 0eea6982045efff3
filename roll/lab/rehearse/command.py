"""`roll rehearse`: its options; the rehearsal is imported when it runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from roll.tools.terminal import integer

FEWEST_STEPS = 2
"""The resumed run repeats the last step from the checkpoint of the one before."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `roll rehearse`."""
    parser.add_argument(
        "--steps", type=integer(FEWEST_STEPS), default=FEWEST_STEPS, metavar="N", help="training steps (default: 2)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="output folder (default: output/rehearsal/FOLDER-NAME of the recipe)"
    )


def run(arguments: argparse.Namespace) -> int:
    from roll.lab.rehearse.rehearsal import rehearse

    return rehearse(arguments.config, arguments.overrides, arguments.steps, arguments.out)

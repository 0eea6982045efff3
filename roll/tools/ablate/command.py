"""`roll ablate`: its options; the grid itself is imported when it runs."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

from roll.tools.terminal import comma_separated, number


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `roll ablate`."""
    parser.add_argument(
        "--variants", type=comma_separated(str), required=True, help="policy losses (actor_train.pg_variant): a,b"
    )
    parser.add_argument("--ratios", type=comma_separated(float), required=True, help="async_generation_ratio: 0,2")
    parser.add_argument("--seeds", type=comma_separated(int), required=True, help="seeds: 1,2")
    parser.add_argument(
        "--out", type=Path, default=Path("output/ablation"), help="output folder (default: output/ablation)"
    )
    parser.add_argument("--target", type=number(), help="validation score; report the first step that reaches it")


def run(arguments: argparse.Namespace) -> int:
    """Runs the trials; SIGTERM ends the one that runs as Ctrl-C does."""
    from roll.tools.ablate.ablation import Ablation
    from roll.tools.ablate.grid import make_grid

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    trials = make_grid(arguments.variants, arguments.ratios, arguments.seeds)
    return Ablation(arguments.config, trials, arguments.out, arguments.overrides, arguments.target).run()

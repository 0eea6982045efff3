"""Options of `roll simulate` and their checks."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

SHORTEST_S = 1e-6
"""Generating a batch takes at least this long: a simulated engine cannot be infinitely fast."""


def add_options(command: argparse.ArgumentParser) -> None:
    """Gives the command its options."""
    command.add_argument(
        "--from", dest="from_run", type=Path, metavar="RUN_DIR", help="synchronous run to take times from"
    )
    command.add_argument(
        "--overlap", type=Path, metavar="RUN_DIR", help="run ahead to take the slowdown of overlap from"
    )
    for name, text in (
        ("generate", "generating a batch on the configured engines"),
        ("train", "learning from it on the configured devices"),
        ("log-probs", "its log-probs"),
        ("reward", "scoring it"),
        ("publish", "publishing weights"),
    ):
        kind = some_seconds if name == "generate" else seconds
        command.add_argument(f"--{name}", type=kind, metavar="S", help=f"seconds of {text}")
    command.add_argument(
        "--response-length", type=response_length, metavar="MEAN[:MAX]", help="tokens; MAX is the longest of a batch"
    )
    command.add_argument(
        "--doubling-batch", type=positive, metavar="N", help="batch at which a decode iteration takes twice as long"
    )
    command.add_argument(
        "--slowdown", type=positive, metavar="X", help="how much longer both sides take while both run"
    )
    command.add_argument("--json", action="store_true", help="print JSON")


def simulate(arguments: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    from roll.pipeline.simulate.run import Options, simulate_config

    options = Options(
        from_run=arguments.from_run,
        overlap_run=arguments.overlap,
        generate=arguments.generate,
        train=arguments.train,
        log_probs=arguments.log_probs,
        reward=arguments.reward,
        publish=arguments.publish,
        response_length=arguments.response_length,
        doubling_batch=arguments.doubling_batch,
        slowdown=arguments.slowdown,
    )
    return simulate_config(arguments.config, arguments.overrides, options, as_json=arguments.json)


def seconds(text: str) -> float:
    """A time.

    Raises:
        argparse.ArgumentTypeError: it is not a number of at least 0.
    """
    return _number(text, least=0.0, what="seconds, a number of at least 0")


def some_seconds(text: str) -> float:
    """A time that passes.

    Raises:
        argparse.ArgumentTypeError: it is not a number of at least SHORTEST_S.
    """
    return _number(text, least=SHORTEST_S, what=f"seconds, a number of at least {SHORTEST_S:g}")


def positive(text: str) -> float:
    """A number of at least 1.

    Raises:
        argparse.ArgumentTypeError: it is not.
    """
    return _number(text, least=1.0, what="a number of at least 1")


def response_length(text: str) -> tuple[float, float]:
    """`MEAN` or `MEAN:MAX`.

    Raises:
        argparse.ArgumentTypeError: it is neither, or the mean is the larger.
    """
    first, _, second = text.partition(":")
    mean = positive(first)
    longest = positive(second) if second else mean
    if longest < mean:
        raise argparse.ArgumentTypeError(f"{text!r} has a mean beyond its longest; write MEAN:MAX with MEAN <= MAX")
    return mean, longest


def _number(text: str, least: float, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value

"""`roll simulate`: its options; the simulation is imported when it runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from roll.tools.terminal import number

MIN_GENERATE_S = 1e-6
"""Smallest value of --generate: a simulated engine cannot be infinitely fast."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `roll simulate`."""
    parser.add_argument(
        "--from", dest="from_run", type=Path, metavar="RUN_DIR", help="measure this synchronous run (output_dir)"
    )
    parser.add_argument(
        "--overlap",
        dest="overlap_run",
        type=Path,
        metavar="RUN_DIR",
        help="measure the slowdown of overlap in this asynchronous run",
    )
    for name, minimum, text in (
        ("generate", MIN_GENERATE_S, "generate a batch on the configured engines"),
        ("train", 0.0, "train on a batch on the configured devices"),
        ("log-probs", 0.0, "compute the log-probs of a batch"),
        ("reward", 0.0, "score a batch"),
        ("weight-update", 0.0, "update the weights of the engines"),
    ):
        parser.add_argument(f"--{name}", type=number(minimum, "seconds"), metavar="S", help=f"seconds to {text}")
    parser.add_argument(
        "--response-length",
        type=response_length,
        metavar="MEAN[:MAX]",
        help="response length in tokens; MAX is the longest of a batch",
    )
    parser.add_argument(
        "--doubling-batch",
        type=number(1),
        metavar="N",
        help="batch size at which a decode iteration takes twice as long as with an empty batch",
    )
    parser.add_argument(
        "--slowdown", type=number(1), metavar="X", help="factor on both sides while training and generation overlap"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def response_length(text: str) -> tuple[float, float]:
    """Argument type for `MEAN` or `MEAN:MAX`.

    Raises:
        argparse.ArgumentTypeError: a part is not a number >= 1, or the mean is above the maximum.
    """
    first, _, second = text.partition(":")
    mean = number(1)(first)
    longest = number(1)(second) if second else mean
    if longest < mean:
        raise argparse.ArgumentTypeError(f"{text!r} has a mean above its maximum; use MEAN:MAX with MEAN <= MAX")
    return mean, longest


def run(arguments: argparse.Namespace) -> int:
    """Prints the prediction for a configuration and returns the exit code.

    Raises:
        ConfigError: the configuration, a run or an option cannot be used.
    """
    from roll.lab.simulate.options_model import build_cost_model, check_simulated
    from roll.lab.simulate.report import prediction_as_dict, print_prediction
    from roll.lab.simulate.search import predict
    from roll.loading.load import load_config
    from roll.plan.hardware import this_machine

    config = load_config(arguments.config, arguments.overrides)
    model, notes = build_cost_model(check_simulated(config), arguments, this_machine())
    prediction = predict(model)
    if arguments.json:
        print(json.dumps(prediction_as_dict(prediction, model, notes), indent=2))
    else:
        print_prediction(prediction, model, notes, config.exp_name)
    return 0

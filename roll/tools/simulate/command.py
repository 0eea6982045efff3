"""The command `roll simulate`: what is known of the speed comes from runs, from options, or from both."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from roll.configs.agentic import AgenticConfig
from roll.configs.errors import ConfigError, Problem, Report
from roll.configs.load import load_config
from roll.configs.machine import Machine, this_machine
from roll.configs.pipeline import RLConfig
from roll.configs.plan import place
from roll.tools.simulate.calibration import Measured, Shape, Times, doubling_batch, overlapping, read_run, synchronous
from roll.tools.simulate.cost_model import Model, make_model, with_slowdown_of
from roll.tools.simulate.report import as_dict, print_prediction
from roll.tools.simulate.search import check_size, configured_split, predict


@dataclass(frozen=True)
class Options:
    """What the command line says beside the configuration; None where it says nothing. Times are seconds of a batch."""

    from_run: Path | None = None
    overlap_run: Path | None = None
    generate: float | None = None
    train: float | None = None
    log_probs: float | None = None
    reward: float | None = None
    publish: float | None = None
    response_length: tuple[float, float] | None = None
    """Mean, and longest of a batch, in tokens."""
    doubling_batch: float | None = None
    slowdown: float | None = None


def simulate_config(
    config: str | Path,
    overrides: Sequence[str],
    options: Options,
    as_json: bool = False,
    machine: Machine | None = None,
) -> int:
    """Prints what the simulation predicts for a configuration; returns the exit code.

    Raises:
        ConfigError: the configuration, a run or an option cannot be used.
    """
    loaded = load_config(config, overrides)
    if not isinstance(loaded, RLConfig):
        raise ConfigError(
            [Problem("pipeline", "nothing is generated in this pipeline; simulate an RL one")], str(config)
        )
    if isinstance(loaded, AgenticConfig):
        raise ConfigError(
            [Problem("pipeline", "responses of several turns are not simulated; simulate an rlvr one")], str(config)
        )
    if not loaded.actor_train.device_mapping or not loaded.actor_infer.device_mapping:
        raise ConfigError(
            [Problem("device_mapping", "actor_train and actor_infer need devices to be simulated")], str(config)
        )
    model, notes = build_model(loaded, options, machine or this_machine())
    prediction = predict(model)
    if as_json:
        print(json.dumps(as_dict(prediction, model, notes), indent=2))
    else:
        print_prediction(prediction, model, notes, loaded.exp_name)
    return 0


def build_model(config: RLConfig, options: Options, machine: Machine) -> tuple[Model, list[str]]:
    """The model of a configuration's speed, and what was assumed because nothing said otherwise.

    Raises:
        ConfigError: options contradict each other or the configuration, a run cannot be used, or it takes too long.
    """
    _check(config, options)
    notes: list[str] = []
    platform = place(config, machine, Report())[0]
    measured = _measured(config, options, notes)
    if options.doubling_batch is None and doubling_batch(measured) is None:
        notes.append(
            f"no run tells what a larger decode batch costs: assumed as usual on {platform} (--doubling-batch)"
        )
    model = make_model(config, measured, platform, options.doubling_batch, config.seed)
    if options.overlap_run is not None:
        run = overlapping(read_run(options.overlap_run, "--overlap"), options.overlap_run)
        samples = Shape.of_config(config).samples
        if run.shape.samples != samples:
            raise ConfigError(
                [Problem("--overlap", f"{options.overlap_run} had {run.shape.samples} samples per step, not {samples}")]
            )
        return with_slowdown_of(model, run), notes
    if options.slowdown is not None:
        return replace(model, slowdown=options.slowdown), notes
    slowdown = _shared_cores(config, platform, machine)
    if slowdown > 1:
        notes.append(
            f"both sides are taken to run {slowdown:.3g} times slower at once, as their slots by the {machine.cores} "
            f"cores say; give a run with overlap (--overlap) or --slowdown"
        )
    return replace(model, slowdown=slowdown), notes


def _check(config: RLConfig, options: Options) -> None:
    check_size(config)
    if options.overlap_run is not None and options.slowdown is not None:
        raise ConfigError([Problem("--slowdown", "is what --overlap takes from a run; keep one")])
    longest, limit = (options.response_length or (0, 0))[1], config.response_length
    if limit is not None and longest > limit:
        raise ConfigError(
            [Problem("--response-length", f"{longest:g} is above response_length {limit}; give at most that")]
        )


def _measured(config: RLConfig, options: Options, notes: list[str]) -> Measured:
    measured = None
    if options.from_run is not None:
        measured = synchronous(read_run(options.from_run, "--from"), options.from_run)
    elif options.generate is None or options.train is None:
        missing = "--generate" if options.generate is None else "--train"
        raise ConfigError(
            [
                Problem(
                    missing, "is not given; name a finished run with --from, or give --generate and --train in seconds"
                )
            ]
        )
    if measured is None:
        assert options.generate is not None and options.train is not None
        longest = float(config.response_length or 1)
        mean, longest = options.response_length or (longest, longest)
        if options.response_length is None:
            notes.append(f"all responses are taken to be {longest:g} tokens, response_length (--response-length)")
        return Measured(_shape(config), _given(Times(options.generate, options.train), options), mean, longest)
    times = _given(measured.times, options)
    if times != measured.times:
        times = replace(times, step=None)
        notes.append("times given replace those of the run; its driver overhead is left out")
    mean, longest = options.response_length or (measured.mean_length, measured.longest)
    return replace(measured, times=times, mean_length=mean, longest=longest)


def _shape(config: RLConfig) -> Shape:
    """The configuration's own; times that are given are those of its devices."""
    return replace(Shape.of_config(config), ratio=0.0)


def _given(times: Times, options: Options) -> Times:
    named = {
        "generate": options.generate,
        "train": options.train,
        "log_probs": options.log_probs,
        "reward": options.reward,
        "publish": options.publish,
        "publish_pause": options.publish,
    }
    return replace(times, **{name: value for name, value in named.items() if value is not None})


def _shared_cores(config: RLConfig, platform: str, machine: Machine) -> float:
    """Slots of both sides by cores, where there are more slots; 1 where every device is its own."""
    if platform != "cpu" or configured_split(config).shared:
        return 1.0
    slots = len(config.actor_train.device_mapping) + len(config.actor_infer.device_mapping)
    return max(1.0, slots / machine.cores)


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


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
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

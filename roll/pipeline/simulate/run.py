"""The command `roll simulate`: what is known of the speed comes from runs, from options, or from both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from roll.configs.agentic import AgenticConfig
from roll.configs.errors import ConfigError, Problem, Report
from roll.configs.hardware import Hardware, resolve_platform, this_machine
from roll.configs.load import load_config
from roll.configs.pipeline import RLConfig
from roll.pipeline.simulate.calibration import overlapping, read_run, synchronous
from roll.pipeline.simulate.measured import Measured, Shape, Times, doubling_batch
from roll.pipeline.simulate.model import Model, make_model, with_slowdown_of
from roll.pipeline.simulate.search import configured_split, predict
from roll.pipeline.simulate.size import check_size
from roll.pipeline.simulate.text import as_dict, print_prediction


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
    machine: Hardware | None = None,
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


def build_model(config: RLConfig, options: Options, machine: Hardware) -> tuple[Model, list[str]]:
    """The model of a configuration's speed, and what was assumed because nothing said otherwise.

    Raises:
        ConfigError: options contradict each other or the configuration, a run cannot be used, or it takes too long.
    """
    _check(config, options)
    notes: list[str] = []
    platform = resolve_platform(config, machine, Report())[0]
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


def _shared_cores(config: RLConfig, platform: str, machine: Hardware) -> float:
    """Slots of both sides by cores, where there are more slots; 1 where every device is its own."""
    if platform != "cpu" or configured_split(config).shared:
        return 1.0
    slots = len(config.actor_train.device_mapping) + len(config.actor_infer.device_mapping)
    return max(1.0, slots / machine.cores)

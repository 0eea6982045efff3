"""The cost model of a configuration by the options of `roll simulate`: from the measurements of runs, from options."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from roll.base.errors import ConfigError, Problem, Report
from roll.configs.agentic import AgenticConfig
from roll.configs.pipeline import RLConfig
from roll.lab.simulate.calibration import (
    Measurements,
    RunShape,
    StepTimes,
    fit_doubling_batch,
    read_measurements,
)
from roll.lab.simulate.cost_model import CostModel, fit_cost_model, fit_slowdown
from roll.lab.simulate.search import check_size, configured_split
from roll.plan.hardware import Hardware, resolve_platform
from roll.tools.terminal import option_error

if TYPE_CHECKING:
    from roll.configs.pipeline import BaseConfig


def check_simulated(config: BaseConfig) -> RLConfig:
    """The configuration, if it is one of a run that can be simulated, in a few minutes.

    Raises:
        ConfigError: it has no generation, several turns per sample, no devices, or is too large.
    """
    path = "pipeline"
    if not isinstance(config, RLConfig):
        message = "has no generation to simulate; use an rlvr configuration"
    elif isinstance(config, AgenticConfig):
        message = "agentic runs, with several turns per sample, cannot be simulated; use an rlvr configuration"
    elif not config.actor_train.device_mapping or not config.actor_infer.device_mapping:
        path, message = "device_mapping", "is empty for actor_train or actor_infer; a simulation needs devices for both"
    else:
        check_size(config)
        return config
    raise ConfigError([Problem(path, message)], config.source.file)


def build_cost_model(config: RLConfig, options: argparse.Namespace, hardware: Hardware) -> tuple[CostModel, list[str]]:
    """The cost model of a configuration with the `options` of the command, and notes on what is assumed.

    Raises:
        ConfigError: options contradict each other or the configuration, or a run cannot be used.
    """
    _check_options(config, options)
    notes: list[str] = []
    platform = resolve_platform(config, hardware, Report())[0]
    measured = _measurements(config, options, notes, platform)
    if options.doubling_batch is None and fit_doubling_batch(measured) is None:
        notes.append(
            f"cost of a larger decode batch: not measured, default of {platform} assumed (set it with --doubling-batch)"
        )
    model = fit_cost_model(config, measured, platform, options.doubling_batch, config.seed)
    if options.overlap_run is not None:
        run, samples = read_measurements(options.overlap_run, "--overlap"), model.shape.samples
        if run.shape.samples != samples:
            had = f"{options.overlap_run} had {run.shape.samples} samples per step"
            raise option_error("--overlap", f"{had}, not {samples}; give a run of this batch size")
        return fit_slowdown(model, run), notes
    if options.slowdown is not None:
        return replace(model, slowdown=options.slowdown), notes
    slowdown = _core_sharing(config, platform, hardware)
    if slowdown > 1:
        notes.append(
            f"slowdown of overlap: not measured, {slowdown:.3g} assumed, which is the number of devices divided by "
            f"{hardware.cores} cores (measure it with --overlap, or set --slowdown)"
        )
    return replace(model, slowdown=slowdown), notes


def _check_options(config: RLConfig, options: argparse.Namespace) -> None:
    if options.overlap_run is not None and options.slowdown is not None:
        raise option_error("--slowdown", "cannot be combined with --overlap, which measures it; use one of them")
    longest, limit = (options.response_length or (0, 0))[1], config.response_length
    if limit is not None and longest > limit:
        raise option_error("--response-length", f"{longest:g} is above response_length {limit}; use at most that")
    if options.from_run is None and (options.generate is None or options.train is None):
        missing = "--generate" if options.generate is None else "--train"
        message = "is missing; give a run with --from, or give both --generate and --train in seconds"
        raise option_error(missing, message)


def _measurements(config: RLConfig, options: argparse.Namespace, notes: list[str], platform: str) -> Measurements:
    """Measurements of --from, with options in place of single values; or all from options."""
    given = {name: getattr(options, name) for name in ("generate", "train", "log_probs", "reward", "weight_update")}
    given["weight_update_pause"] = options.weight_update
    given = {name: seconds for name, seconds in given.items() if seconds is not None}
    if options.from_run is None:
        limit = float(config.response_length or 1)
        if options.response_length is None:
            message = f"response lengths: not measured, all assumed to be response_length = {limit:g} tokens"
            notes.append(f"{message} (set them with --response-length)")
        lengths = options.response_length or (limit, limit)
        times = _without_pause(StepTimes(**given), config, platform)
        return Measurements(replace(RunShape.of(asdict(config)), ratio=0.0), times, *lengths)
    measured = read_measurements(options.from_run, "--from")
    times = replace(measured.times, **given)
    if times != measured.times:
        times = replace(times, step=None)
        notes.append("driver overhead: 0 assumed, because options replace times of the run")
    mean, longest = options.response_length or (measured.mean_length, measured.max_length)
    times = _without_pause(times, config, platform)
    return replace(measured, times=times, mean_length=mean, max_length=longest)


def _without_pause(times: StepTimes, config: RLConfig, platform: str) -> StepTimes:
    """Engines that get adapters go on generating."""
    return times if config.adapters(platform) is None else replace(times, weight_update_pause=0.0)


def _core_sharing(config: RLConfig, platform: str, hardware: Hardware) -> float:
    """Devices of both sides per CPU core, at least 1; 1 on GPUs, or if both sides run in turns."""
    if platform != "cpu" or configured_split(config).shared:
        return 1.0
    devices = len(config.actor_train.device_mapping) + len(config.actor_infer.device_mapping)
    return max(1.0, devices / hardware.cores)

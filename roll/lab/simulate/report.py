"""A prediction as text and as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, TextIO

from rich import box
from rich.table import Table

from roll.base.terminal import make_console
from roll.lab.simulate.cost_model import CostModel
from roll.lab.simulate.search import Candidate, DeviceSplit, Prediction


def prediction_as_dict(prediction: Prediction, model: CostModel, notes: list[str]) -> dict[str, Any]:
    """Everything that `print_prediction` prints, as values for JSON."""
    return {
        "devices": prediction.devices,
        "generate_seconds_on_all_devices": prediction.generate_seconds,
        "train_seconds_on_all_devices": prediction.train_seconds,
        "configured": _entry(prediction.configured),
        "best": _entry(prediction.best),
        "candidates": [_entry(candidate) for candidate in prediction.candidates],
        "assumed": {
            "seconds_per_iteration": model.speed.seconds,
            "doubling_batch": None if math.isinf(model.speed.doubling_batch) else model.speed.doubling_batch,
            "slowdown": model.slowdown,
            "overhead_seconds": model.overhead,
            "response_length_mean": model.measured.mean_length,
            "response_length_max": model.measured.max_length,
        },
        "notes": notes,
    }


def _entry(candidate: Candidate) -> dict[str, Any]:
    return {
        **asdict(candidate.split),
        "generate_seconds_alone": candidate.generate_seconds,
        "train_seconds_alone": candidate.train_seconds,
        "async_generation_ratio": candidate.ratio,
        **asdict(candidate.outcome),
        "staleness": {str(age): share for age, share in candidate.outcome.staleness.items()},
    }


def print_prediction(
    prediction: Prediction, model: CostModel, notes: list[str], title: str, file: TextIO | None = None
) -> None:
    """Prints the configured run, all candidates, the recommendation and the assumptions."""
    console = make_console(file)
    console.print(f"{title}: simulation", style="bold", markup=False)
    console.print(_configured_table(prediction.configured))
    console.print(_candidate_table(prediction))
    for line in _recommendation(prediction):
        console.print(line, markup=False, soft_wrap=True)
    speed = model.speed
    assumptions = (
        f"Model: a decode iteration takes {speed.seconds * 1e3:.3g} ms x (1 + batch / {speed.doubling_batch:g}); "
        f"responses have {model.measured.mean_length:.4g} tokens on average, {model.measured.max_length:.4g} in the "
        f"longest of a batch; overlap slows both sides by a factor of {model.slowdown:.3g}"
    )
    console.print(assumptions, markup=False, soft_wrap=True)
    for note in notes:
        console.print(f"  - {note}", markup=False, soft_wrap=True)


def _configured_table(candidate: Candidate) -> Table:
    table = Table(title="As configured", title_justify="left", box=box.SIMPLE_HEAD, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    split, ratio, seconds, trainer, rollout, staleness = _cells(candidate)
    table.add_row("devices, generation : training", split)
    table.add_row("async_generation_ratio", ratio)
    table.add_row("step time", seconds)
    table.add_row("  waiting for generation", f"{candidate.outcome.wait_seconds:.4g} s")
    table.add_row("trainer idle", trainer)
    table.add_row("rollout idle", rollout)
    table.add_row("staleness (versions: samples)", staleness)
    return table


def _candidate_table(prediction: Prediction) -> Table:
    table = Table(title="Device splits and ratios, fastest first", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("generation : training", "ratio", "step time", "trainer idle", "rollout idle", "staleness", ""):
        table.add_column(column, justify="left" if column in ("staleness", "") else "right")
    for candidate in prediction.candidates:
        marks = ["best"] * (candidate == prediction.best) + ["as configured"] * (candidate == prediction.configured)
        table.add_row(*_cells(candidate), ", ".join(marks))
    return table


def _cells(candidate: Candidate) -> list[str]:
    """Split, ratio, step time, idle time of both sides, and staleness without fractions below half a percent."""
    outcome = candidate.outcome
    return [
        split_text(candidate.split),
        f"{candidate.ratio:g}",
        f"{outcome.step_seconds:.4g} s",
        f"{outcome.trainer_idle:.0%}",
        f"{outcome.rollout_idle:.0%}",
        ", ".join(f"{age}: {share:.0%}" for age, share in outcome.staleness.items() if share >= 0.005),
    ]


def split_text(split: DeviceSplit) -> str:
    return f"{split.infer_devices} shared" if split.shared else f"{split.infer_devices} : {split.train_devices}"


def _recommendation(prediction: Prediction) -> list[str]:
    """Bounds from the times of each side alone, and the best candidate."""
    best, configured = prediction.best, prediction.configured
    generate, train = prediction.generate_seconds, prediction.train_seconds
    bounds = (
        f"On all {prediction.devices} devices, generating a batch takes G = {generate:.4g} s and training on it "
        f"T = {train:.4g} s; a synchronous step takes G + T = {generate + train:.4g} s."
    )
    split = best if configured.split.shared else configured
    if not split.split.shared:
        generate, train = split.generate_seconds, split.train_seconds
        bound_by = "generation" if generate > train else "training"
        bounds += (
            f" With split {split_text(split.split)} at ratio {split.ratio:g}, generation takes {generate:.4g} s and "
            f"training {train:.4g} s; with full overlap a step takes {max(generate, train):.4g} s, bound by {bound_by}."
        )
    gain = configured.outcome.step_seconds / best.outcome.step_seconds - 1
    if best == configured:
        conclusion = "The configured split and ratio are the best of these."
    elif gain <= 0:
        conclusion = f"Ratio {best.ratio:g} with split {split_text(best.split)} is as fast, with less stale samples."
    else:
        conclusion = (
            f"Best: split {split_text(best.split)} with ratio {best.ratio:g}, {gain:.0%} faster than configured."
        )
    return [bounds, conclusion]

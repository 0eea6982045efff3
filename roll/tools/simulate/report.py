"""A prediction as text for people and as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from roll.tools.simulate.cost_model import Model
from roll.tools.simulate.search import Candidate, Prediction, Split

WIDTH = 120
"""Columns where the output is not a terminal."""


def as_dict(prediction: Prediction, model: Model, notes: list[str]) -> dict[str, Any]:
    """Everything that is printed, as JSON takes it."""
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
            "response_length_max": model.measured.longest,
        },
        "notes": notes,
    }


def _entry(candidate: Candidate) -> dict[str, Any]:
    outcome = asdict(candidate.outcome)
    staleness = {str(age): share for age, share in outcome.pop("staleness").items()}
    alone = {"generate_seconds_alone": candidate.generate_seconds, "train_seconds_alone": candidate.train_seconds}
    return {
        **asdict(candidate.split),
        **alone,
        "async_generation_ratio": candidate.ratio,
        **outcome,
        "staleness": staleness,
    }


def print_prediction(
    prediction: Prediction, model: Model, notes: list[str], title: str, file: TextIO | None = None
) -> None:
    """Writes the prediction to `file`, or to standard output."""
    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console = Console(file=file, highlight=False, width=WIDTH)
    own = prediction.configured
    console.print(f"{title}: simulated", style="bold", markup=False)
    console.print(_configured(own))
    console.print(_candidates(prediction))
    for line in _sentences(prediction):
        console.print(line, markup=False, soft_wrap=True)
    speed = model.speed
    console.print(
        f"One decode iteration: {speed.seconds * 1e3:.3g} ms x (1 + batch / {speed.doubling_batch:g}); "
        f"responses: mean {model.measured.mean_length:.4g}, longest of a batch {model.measured.longest:.4g} tokens; "
        f"slowdown while both sides run: {model.slowdown:.3g}",
        markup=False,
        soft_wrap=True,
    )
    for note in notes:
        console.print(f"  - {note}", markup=False, soft_wrap=True)


def _configured(own: Candidate) -> Table:
    table = Table(title="As configured", title_justify="left", box=box.SIMPLE_HEAD, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    outcome = own.outcome
    rows = [
        ("devices, generation : training", split_text(own.split)),
        ("async_generation_ratio", f"{own.ratio:g}"),
        ("step", f"{outcome.step_seconds:.4g} s"),
        ("  of it waiting for generation", f"{outcome.wait_seconds:.4g} s"),
        ("trainer idle", f"{outcome.trainer_idle:.0%}"),
        ("rollout idle", f"{outcome.rollout_idle:.0%}"),
        ("staleness of samples", staleness_text(own)),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _candidates(prediction: Prediction) -> Table:
    table = Table(title="Splits and ratios, fastest first", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("generation : training", "ratio", "step", "trainer idle", "rollout idle", "staleness", ""):
        table.add_column(column, justify="left" if column in ("staleness", "") else "right")
    for candidate in prediction.candidates:
        outcome = candidate.outcome
        marks = ["best"] * (candidate == prediction.best) + ["as configured"] * (candidate == prediction.configured)
        table.add_row(
            split_text(candidate.split),
            f"{candidate.ratio:g}",
            f"{outcome.step_seconds:.4g} s",
            f"{outcome.trainer_idle:.0%}",
            f"{outcome.rollout_idle:.0%}",
            staleness_text(candidate),
            ", ".join(marks),
        )
    return table


def split_text(split: Split) -> str:
    """Devices of each side."""
    return f"{split.infer_devices} shared" if split.shared else f"{split.infer_devices} : {split.train_devices}"


def staleness_text(candidate: Candidate) -> str:
    """Share of samples by age, those of less than half a percent left out."""
    return ", ".join(f"{age}: {share:.0%}" for age, share in candidate.outcome.staleness.items() if share >= 0.005)


def _sentences(prediction: Prediction) -> list[str]:
    """The closed form beside what was simulated, and the advice."""
    best, own = prediction.best, prediction.configured
    generate, train = prediction.generate_seconds, prediction.train_seconds
    lines = [
        f"On all {prediction.devices} devices a batch takes G = {generate:.4g} s to generate and T = {train:.4g} s to "
        f"learn from: in turns G + T = {generate + train:.4g} s."
    ]
    beside = best if own.split.shared else own
    if not beside.split.shared:
        generate, train = beside.generate_seconds, beside.train_seconds
        side = "generation" if generate > train else "training"
        lines[0] += (
            f" Split {split_text(beside.split)} at ratio {beside.ratio:g}: {generate:.4g} s and {train:.4g} s, one "
            f"beside the other at best {max(generate, train):.4g} s, bound by {side}."
        )
    gain = own.outcome.step_seconds / best.outcome.step_seconds - 1
    if best == own:
        lines.append("The configured split and ratio are the best of these.")
    elif gain <= 0:
        lines.append(f"Ratio {best.ratio:g} with {split_text(best.split)} is as fast, and its samples are less stale.")
    else:
        lines.append(f"Best: {split_text(best.split)} with ratio {best.ratio:g}, {gain:.0%} faster than configured.")
    return lines

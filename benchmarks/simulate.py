"""Accuracy of `roll simulate`: predicts step times at ratio 0, 1 and 2 from calibration runs at ratio 0 and 1.

    python -m benchmarks.simulate --json FILE

The calibration run at ratio 0 gives the time of each part, the one at ratio 1 the slowdown of overlap. Each prediction
is compared with another run at its ratio; no calibration run has ratio 2. Figures are medians over rounds. A prediction
is not expected to be nearer to a run than another run of the same recipe is: where two of them differ by more than the
tolerance, that difference is the limit.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.common import Measurement, at_most, main, median
from benchmarks.overlap_runs import mean, run_at, write_recipe

TOLERANCE = 0.15
ROUNDS = 3
RATIOS, CALIBRATION = (0, 1, 2), (0, 1)


def measure() -> Measurement:
    """Predicted and measured step time at each ratio in each round, and the medians of their errors."""
    with tempfile.TemporaryDirectory() as folder:
        rounds = []
        for number in range(ROUNDS):
            part = Path(folder, str(number))
            part.mkdir()
            rounds.append(measure_round(write_recipe(part)))
    errors, noise = (
        {ratio: median([each[name][ratio] for each in rounds]) for ratio in rounds[0][name]}
        for name in ("error", "noise")
    )
    return {"rounds": rounds, "noise": noise}, [
        at_most(
            f"simulate: error of the step time at ratio {ratio}",
            errors[ratio],
            max(TOLERANCE, noise[min(ratio, max(CALIBRATION))]),
        )
        for ratio in RATIOS
    ]


def measure_round(config: Path) -> dict[str, dict[int, float]]:
    """By ratio: seconds of a step of the runs and the prediction, its error, and the difference between two runs."""
    calibration, measured = {}, {}
    for ratio in RATIOS:  # alternately, so that other load on the machine affects both
        if ratio in CALIBRATION:
            calibration[ratio] = mean(run_at(config, ratio, f"calibration-{ratio}"), "time/step")
        measured[ratio] = mean(run_at(config, ratio, f"ratio-{ratio}"), "time/step")
    predicted = {ratio: predicted_step_seconds(config, ratio) for ratio in RATIOS}
    return {
        "calibration_seconds": calibration,
        "measured_seconds": measured,
        "predicted_seconds": predicted,
        "error": {ratio: abs(predicted[ratio] / measured[ratio] - 1) for ratio in RATIOS},
        "noise": {ratio: abs(calibration[ratio] / measured[ratio] - 1) for ratio in CALIBRATION},
    }


def predicted_step_seconds(config: Path, ratio: float) -> float:
    """Step time of the configured split in the simulation."""
    from roll.configs.pipeline import RLConfig
    from roll.lab.simulate.command import add_options
    from roll.lab.simulate.options_model import build_cost_model
    from roll.lab.simulate.search import predict
    from roll.loading.load import load_config
    from roll.plan.hardware import this_machine

    loaded = load_config(config, [f"async_generation_ratio={ratio}"])
    assert isinstance(loaded, RLConfig)
    parser = argparse.ArgumentParser()
    add_options(parser)
    runs = ("--from", str(config.parent / "calibration-0"), "--overlap", str(config.parent / "calibration-1"))
    options = parser.parse_args(runs)
    model, _ = build_cost_model(loaded, options, this_machine())
    return predict(model).configured.outcome.step_seconds


if __name__ == "__main__":
    main(measure, __doc__ or "")

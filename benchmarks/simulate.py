"""Accuracy of `roll simulate`: predicts step times at ratio 0, 1 and 2 from calibration runs at ratio 0 and 1.

    python -m benchmarks.simulate --json FILE

The calibration run at ratio 0 gives the time of each part, the one at ratio 1 the slowdown of overlap. Each prediction
is compared with another run at its ratio; no calibration run has ratio 2.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.common import Measurement, at_most, main
from benchmarks.overlap_runs import mean, run_at, write_recipe

TOLERANCE = 0.15
RATIOS, CALIBRATION = (0, 1, 2), (0, 1)


def measure() -> Measurement:
    """Predicted and measured step time at each ratio."""
    with tempfile.TemporaryDirectory() as folder:
        config = write_recipe(Path(folder))
        calibration, measured = {}, {}
        for ratio in RATIOS:  # alternately, so that other load on the machine affects both
            if ratio in CALIBRATION:
                calibration[ratio] = run_at(config, ratio, f"calibration-{ratio}")
            measured[ratio] = mean(run_at(config, ratio, f"ratio-{ratio}"), "time/step")
        predicted = {ratio: predicted_step_seconds(config, ratio) for ratio in RATIOS}
    errors = {ratio: abs(predicted[ratio] / measured[ratio] - 1) for ratio in RATIOS}
    raw = {
        "predicted_seconds": predicted,
        "measured_seconds": measured,
        "calibration_seconds": {ratio: mean(lines, "time/step") for ratio, lines in calibration.items()},
    }
    return raw, [
        at_most(f"simulate: error of the step time at ratio {ratio}", errors[ratio], TOLERANCE) for ratio in RATIOS
    ]


def predicted_step_seconds(config: Path, ratio: float) -> float:
    """Step time of the configured split in the simulation."""
    from roll.configs.hardware import this_machine
    from roll.configs.load import load_config
    from roll.configs.pipeline import RLConfig
    from roll.tools.simulate.command import Options, build_cost_model
    from roll.tools.simulate.search import predict

    loaded = load_config(config, [f"async_generation_ratio={ratio}"])
    assert isinstance(loaded, RLConfig)
    options = Options(from_run=config.parent / "calibration-0", overlap_run=config.parent / "calibration-1")
    model, _ = build_cost_model(loaded, options, this_machine())
    return predict(model).configured.outcome.step_seconds


if __name__ == "__main__":
    main(measure, __doc__ or "")

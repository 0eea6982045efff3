"""Whether `roll simulate` foretells step times: from two runs at ratio 0 and 1, those at ratio 0, 1 and 2.

    python -m benchmarks.simulate --json FILE

The run at ratio 0 gives the times of each part, the one at ratio 1 how much both sides slow each other down; ratio 2 is
foretold from these alone. Each is compared with a run of its own.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.common import Measurement, at_most, main
from benchmarks.overlap_runs import mean, run_at, write_recipe

TOLERANCE = 0.15
RATIOS, CALIBRATION = (0, 1, 2), (0, 1)


def measure() -> Measurement:
    """Foretold and measured seconds of a step at each ratio."""
    with tempfile.TemporaryDirectory() as folder:
        config = write_recipe(Path(folder))
        calibration, measured = {}, {}
        for ratio in RATIOS:  # turn by turn, so that what else the machine does falls on both
            if ratio in CALIBRATION:
                calibration[ratio] = run_at(config, ratio, f"calibration-{ratio}")
            measured[ratio] = mean(run_at(config, ratio, f"ratio-{ratio}"), "time/step")
        foretold = {ratio: foretell(config, ratio) for ratio in RATIOS}
    errors = {ratio: abs(foretold[ratio] / measured[ratio] - 1) for ratio in RATIOS}
    raw = {
        "foretold_seconds": foretold,
        "measured_seconds": measured,
        "calibration_seconds": {ratio: mean(lines, "time/step") for ratio, lines in calibration.items()},
    }
    return raw, [
        at_most(f"simulate: error of the step time at ratio {ratio}", errors[ratio], TOLERANCE) for ratio in RATIOS
    ]


def foretell(config: Path, ratio: float) -> float:
    """Seconds of a step that the simulation gives for the configured split."""
    from roll.configs.hardware import this_machine
    from roll.configs.load import load_config
    from roll.configs.pipeline import RLConfig
    from roll.pipeline.simulate.run import Options, build_model
    from roll.pipeline.simulate.search import predict

    loaded = load_config(config, [f"async_generation_ratio={ratio}"])
    assert isinstance(loaded, RLConfig)
    options = Options(from_run=config.parent / "calibration-0", overlap_run=config.parent / "calibration-1")
    model, _ = build_model(loaded, options, this_machine())
    return predict(model).configured.outcome.step_seconds


if __name__ == "__main__":
    main(measure, __doc__ or "")

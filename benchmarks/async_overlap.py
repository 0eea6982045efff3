"""Speed-up of asynchronous training: steps per hour at ratio 0, 1 and 2, against ideal overlap.

    python -m benchmarks.async_overlap --json FILE

With G the time to generate a batch and T the rest of a step, a synchronous step takes G + T. With ideal overlap it
takes max(G', T'), where G' and T' are measured with the other core busy, because cores share caches, memory and clock.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.common import Measurement, at_least, at_most, main
from benchmarks.overlap_runs import GENERATE_CORE, TRAIN_CORE, busy_core, mean, run_at, write_recipe

EFFICIENCY = 0.9
"""Required fraction of the ideal speed-up at ratio 1."""
BALANCE = 1.2
"""Largest factor between G and T; with a larger one there is little to overlap."""
NOISE = 0.97
"""Ratio of steps per hour by which two runs of the same recipe may differ."""


def measure() -> Measurement:
    """Steps per hour, speed-ups, and their fraction of the ideal speed-up."""
    with tempfile.TemporaryDirectory() as folder:
        config = write_recipe(Path(folder))
        lines = {ratio: run_at(config, ratio, f"ratio-{ratio}") for ratio in (0, 1, 2)}
        with busy_core(TRAIN_CORE):
            busy_generate, _ = _parts(run_at(config, 0, "train-core-busy"))
        with busy_core(GENERATE_CORE):
            _, busy_rest = _parts(run_at(config, 0, "generate-core-busy"))
    generate, rest = _parts(lines[0])
    seconds = {ratio: mean(found, "time/step") for ratio, found in lines.items()}
    ideal = (generate + rest) / max(busy_generate, busy_rest)
    speed_up = {ratio: seconds[0] / seconds[ratio] for ratio in (1, 2)}
    longest = max(line["rollout/response_length_max"] for line in lines[0])
    raw = {
        "seconds_per_step": seconds,
        "steps_per_hour": {ratio: 3600 / value for ratio, value in seconds.items()},
        "generate_seconds": {"alone": generate, "other_core_busy": busy_generate},
        "rest_seconds": {"alone": rest, "other_core_busy": busy_rest},
        "ideal_speed_up": ideal,
        "speed_up": speed_up,
        "fraction_of_ideal": {ratio: value / ideal for ratio, value in speed_up.items()},
        "response_length": {"mean": mean(lines[0], "rollout/response_length_mean"), "longest": longest},
        "staleness_mean": {ratio: mean(found, "staleness/mean") for ratio, found in lines.items()},
    }
    return raw, [
        at_most("async_overlap: longer of G and T over the shorter", _ratio(generate, rest), BALANCE),
        at_least("async_overlap: speed-up at ratio 1 over the ideal", speed_up[1] / ideal, EFFICIENCY),
        at_least("async_overlap: steps per hour, ratio 2 over ratio 1", seconds[1] / seconds[2], NOISE),
    ]


def _parts(lines: list[dict[str, float]]) -> tuple[float, float]:
    """Seconds of a synchronous step that wait for generation, and the rest."""
    waiting = mean(lines, "time/wait_prev_gen")
    return waiting, mean(lines, "time/step") - waiting


def _ratio(first: float, second: float) -> float:
    return max(first, second) / min(first, second)


if __name__ == "__main__":
    main(measure, __doc__ or "")

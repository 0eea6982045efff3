"""Speed-up of asynchronous training: steps at ratio 0, 1 and 2, against ideal overlap.

    python -m benchmarks.async_overlap --json FILE

With G the time to generate a batch and T the rest of a step, a synchronous step takes G + T. With ideal overlap it
takes max(G', T'), where G' and T' are measured with the other core busy, because cores share caches, memory and clock.
All runs of a round follow one another, and each figure is the median over the rounds, because other machines that share
the memory make the same run up to a fifth slower from one minute to the next.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.common import Measurement, at_least, at_most, main, median
from benchmarks.overlap_runs import GENERATE_CORE, SLOTS, TRAIN_CORE, busy_core, mean, run_at, write_recipe

ROUNDS = 3
EFFICIENCY = 0.9
"""Required fraction of the ideal speed-up at ratio 1."""
BALANCE = 1.2
"""Largest factor between G and T; with a larger one there is little to overlap."""
NOISE = 0.97
"""Ratio of steps per hour by which two runs of the same recipe may differ."""


def measure() -> Measurement:
    """Seconds of a step and fractions of the ideal speed-up of each round, and the medians over the rounds."""
    with tempfile.TemporaryDirectory() as folder:
        config = write_recipe(Path(folder))
        rounds = [measure_round(config, str(number)) for number in range(ROUNDS)]
    balance, fraction, more = (
        median([each[name] for each in rounds]) for name in ("balance", "fraction_of_ideal_1", "ratio_2_over_1")
    )
    return {"rounds": rounds}, [
        at_most("async_overlap: longer of G and T over the shorter", balance, BALANCE),
        at_least("async_overlap: speed-up at ratio 1 over the ideal", fraction, EFFICIENCY),
        at_least("async_overlap: steps per hour, ratio 2 over ratio 1", more, NOISE),
    ]


def measure_round(config: Path, name: str) -> dict[str, float]:
    """One run at each ratio, one at ratio 1 without a limit of newer requests, and one at ratio 0 with each core busy.

    Seconds are those of a step; `rest` is all of it but waiting for generation.
    """
    lines = {ratio: run_at(config, ratio, f"{name}-ratio-{ratio}") for ratio in (0, 1)}
    unlimited = run_at(config, 1, f"{name}-unlimited", f"actor_infer.max_newer_requests={SLOTS}")
    lines[2] = run_at(config, 2, f"{name}-ratio-2")
    with busy_core(TRAIN_CORE):
        busy_generate, _ = _parts(run_at(config, 0, f"{name}-train-core-busy"))
    with busy_core(GENERATE_CORE):
        _, busy_rest = _parts(run_at(config, 0, f"{name}-generate-core-busy"))
    generate, rest = _parts(lines[0])
    seconds = {ratio: mean(found, "time/step") for ratio, found in lines.items()}
    ideal = (generate + rest) / max(busy_generate, busy_rest)
    return {
        **{f"seconds_{ratio}": value for ratio, value in seconds.items()},
        "seconds_1_without_limit": mean(unlimited, "time/step"),
        "generate_seconds": generate,
        "generate_seconds_other_core_busy": busy_generate,
        "rest_seconds": rest,
        "rest_seconds_other_core_busy": busy_rest,
        "ideal_speed_up": ideal,
        **{f"fraction_of_ideal_{ratio}": seconds[0] / seconds[ratio] / ideal for ratio in (1, 2)},
        "balance": max(generate, rest) / min(generate, rest),
        "ratio_2_over_1": seconds[1] / seconds[2],
        "response_length": mean(lines[0], "rollout/response_length_mean"),
        "longest_response": max(line["rollout/response_length_max"] for line in lines[0]),
        "staleness_1": mean(lines[1], "staleness/mean"),
    }


def _parts(lines: list[dict[str, float]]) -> tuple[float, float]:
    """Seconds of a synchronous step that wait for generation, and the rest."""
    waiting = mean(lines, "time/wait_prev_gen")
    return waiting, mean(lines, "time/step") - waiting


if __name__ == "__main__":
    main(measure, __doc__ or "")

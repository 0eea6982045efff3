"""Time that a step takes with its spans, groups and samples recorded, relative to the same step without.

    python -m benchmarks.recording --json FILE

Runs the steps of benchmarks.overhead, in one process but for engine and trainer, and adds up the seconds of every call
that records something. Samples are written on a thread while the weights are sent; their seconds are reported, and
count only as far as the step waits for them. The log-probs that ranks return with an optimizer step are not in it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import Check, Measurement, at_most, main, median
from benchmarks.overhead import WARM_UP_STEPS, run_demo_steps
from roll.pipeline.learning import actor_learner, learner
from roll.pipeline.learning.dump import dump_samples
from roll.pipeline.progress import RunProgress
from roll.rollout.recording import RolloutRecording


class Stopwatch:
    """Adds up the seconds of calls."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds.append(time.perf_counter() - start)

        return timed

    def around_coroutine(self, call: Callable[..., Any]) -> Callable[..., Any]:
        async def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return await call(*args, **kwargs)
            finally:
                self.seconds.append(time.perf_counter() - start)

        return timed


def measure() -> Measurement:
    """The median step, and the seconds a step records."""
    recorded, written, waited, memory = (Stopwatch() for _ in range(4))
    RunProgress._record = recorded.around(RunProgress._record)  # type: ignore[method-assign]
    RolloutRecording.taken = recorded.around(RolloutRecording.taken)  # type: ignore[method-assign]
    learner.dump_samples = written.around(dump_samples)  # type: ignore[attr-defined]
    finish = actor_learner.ActorLearner.finish_step
    actor_learner.ActorLearner.finish_step = memory.around_coroutine(finish)  # type: ignore[method-assign]
    whole = learner.RLLearner.finish_step
    learner.RLLearner.finish_step = waited.around_coroutine(whole)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        steps = run_demo_steps(Path(folder))
    seconds = median([step["time/step"] for step in steps[WARM_UP_STEPS:]])
    waits = [all_of_it - rest for all_of_it, rest in zip(waited.seconds, memory.seconds, strict=True)]
    own = sum(recorded.seconds) / len(steps) + median(waits)
    raw = {
        "seconds_of_a_step": seconds,
        "recording_seconds": own,
        "waiting_for_samples_seconds": median(waits),
        "writing_samples_seconds": median(written.seconds),
    }
    checks: list[Check] = [at_most("recording: step with it over step without", seconds / (seconds - own), 1.005)]
    return raw, checks


if __name__ == "__main__":
    main(measure, __doc__ or "")

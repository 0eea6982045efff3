"""Cost of admission alone: a million prompts on a thousand simulated engines.

    python -m benchmarks.scheduler --json FILE

Engines are a heap of finish times. A prompt goes to the engine with the fewest outstanding tokens and finishes after
the earlier prompts of that engine. One in a hundred fails and is replaced. The trainer takes a batch as soon as one is
ready, trains for a fixed time and updates the weights. The time covers admission, balancer and heap; lengths are drawn
before.
"""

from __future__ import annotations

import heapq
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common import Check, Measurement, at_most, main, median
from roll.rollout.admission import Admission, AdmissionSettings
from roll.rollout.engine_pool import Balancer
from roll.rollout.ledger import PromptRequest

ENGINES = 1000
BATCH_SIZE = 1000
RATIO = 2.0
FAILURE_RATE = 0.01
SECONDS_PER_TOKEN = 0.01
SIZES = (10_000, 100_000, 1_000_000)
"""Prompts of each run."""

SHORT_RUNS = 10
"""Repeats of the shortest run before and after the longest, to average over other load on the machine."""

LENGTHS = 65_536
"""Number of response lengths, log-normal, drawn once and used cyclically."""


@dataclass
class SimulatedRun:
    """One run with simulated time."""

    admission: Admission[int]
    lengths: list[int]
    now: float = 0.0
    balancer: Balancer = field(default_factory=lambda: Balancer(ENGINES))
    free_at: list[float] = field(default_factory=lambda: [0.0] * ENGINES)
    running: list[tuple[float, int, int, PromptRequest]] = field(default_factory=list)

    def submit(self) -> None:
        """Sends all admissible prompts to engines."""
        for request in self.admission.submit(self.admission.admissible()):
            tokens = self.lengths[request.number % LENGTHS]
            engine = self.balancer.choose()
            self.balancer.add(engine, tokens)
            self.free_at[engine] = end = max(self.now, self.free_at[engine]) + tokens * SECONDS_PER_TOKEN
            heapq.heappush(self.running, (end, request.number, engine, request))

    def finish_next(self) -> None:
        """Finishes the prompt that ends next."""
        self.now, number, engine, request = heapq.heappop(self.running)
        self.balancer.remove(engine, self.lengths[number % LENGTHS])
        if number % round(1 / FAILURE_RATE) == 7:
            self.admission.drop(number, "generation_failed")
            self.submit()
        else:
            self.admission.finish(number, number, request.version)

    def step(self, train_seconds: float) -> None:
        """Waits for a batch, trains on it while generation continues, and updates the weights."""
        while not self.admission.ready():
            self.finish_next()
        self.admission.take()
        trained = self.now + train_seconds
        while self.running and self.running[0][0] <= trained:
            self.finish_next()
        self.now = trained
        self.admission.advance(self.admission.learning_version)
        self.submit()


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def run(prompts: int, lengths: list[int]) -> dict[str, float]:
    """Seconds and memory growth of a run of this many prompts; memory growth starts after a tenth of the batches."""
    admission: Admission[int] = Admission(AdmissionSettings(BATCH_SIZE, RATIO, total=prompts))
    simulated = SimulatedRun(admission, lengths)
    batches = prompts // BATCH_SIZE
    mean = sum(lengths) / len(lengths)
    warm = peak = 0
    start, processor = time.perf_counter(), time.process_time()
    simulated.submit()
    for batch in range(batches):
        simulated.step(mean * SECONDS_PER_TOKEN * BATCH_SIZE / ENGINES)
        if batch == batches // 10:
            warm = resident_bytes()
        peak = max(peak, resident_bytes())
    seconds, processor = time.perf_counter() - start, time.process_time() - processor
    if admission.ledger.consumed != prompts or admission.ledger.dropped["stale"]:
        raise AssertionError(f"prompts are missing or stale: {admission.ledger}")
    return {
        "prompts": prompts,
        "submitted": admission.ledger.submitted,
        "seconds": seconds,
        "processor_seconds": processor,
        "microseconds_per_prompt": 1e6 * processor / prompts,
        "memory_growth_bytes": peak - warm,
    }


def measure() -> Measurement:
    """Time, memory and cost per prompt of runs of different lengths."""
    draw = random.Random(1)
    lengths = [min(32_768, 1 + int(draw.lognormvariate(6.0, 1.0))) for _ in range(LENGTHS)]
    before = [run(SIZES[0], lengths) for _ in range(SHORT_RUNS)]
    runs = [run(size, lengths) for size in SIZES[1:]]
    after = [run(SIZES[0], lengths) for _ in range(SHORT_RUNS)]
    short, longest = [made["microseconds_per_prompt"] for made in before + after], runs[-1]
    growth = longest["microseconds_per_prompt"] / median(short)
    checks: list[Check] = [
        at_most("scheduler: seconds for 1,000,000 prompts", longest["seconds"], 60.0),
        at_most("scheduler: cost per prompt, 1,000,000 over 10,000 prompts", growth, 1.5),
        at_most("scheduler: memory growth after warm-up (MiB)", longest["memory_growth_bytes"] / 2**20, 8.0),
    ]
    runs = before + runs + after
    return {"engines": ENGINES, "batch_size": BATCH_SIZE, "ratio": RATIO, "runs": runs}, checks


if __name__ == "__main__":
    main(measure, __doc__ or "")

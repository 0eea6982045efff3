from __future__ import annotations

from benchmarks.scheduler import BATCH_SIZE, LENGTHS, RATIO, run


def test_short_run_consumes_every_prompt_and_replaces_failed_ones() -> None:
    made = run(5 * BATCH_SIZE, [100] * LENGTHS)
    assert made["prompts"] == 5 * BATCH_SIZE
    assert made["prompts"] < made["submitted"] < (1.05 + RATIO) * made["prompts"]

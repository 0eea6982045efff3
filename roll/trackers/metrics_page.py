"""Writes docs/metrics.md: `python -m roll.trackers.metrics_page docs/metrics.md`."""

from __future__ import annotations

import sys
from pathlib import Path

from roll.trackers.metrics import sections

HEAD = """\
# Metrics

What a run writes to `metrics.jsonl`, one line per step, and to the trackers. A metric is there when the run has it: an
SFT run has no rewards. This page is made from `roll/trackers/metrics.py` by `make docs`.
"""


def markdown() -> str:
    """The page: a table for each section."""
    parts = [HEAD]
    for title, metrics in sections().items():
        rows = "".join(f"| `{metric.name}` | {metric.unit} | {metric.meaning} |\n" for metric in metrics)
        parts.append(f"\n## {title}\n\n| name | unit | meaning |\n|---|---|---|\n{rows}")
    return "".join(parts)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(markdown())

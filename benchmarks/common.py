"""What every benchmark shares: medians, checks against a target, the machine, and the report."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypedDict


class Check(TypedDict):
    """One figure against its target."""

    name: str
    value: float
    target: float
    ok: bool


Measurement = tuple[dict[str, Any], list[Check]]
"""What a benchmark finds: the raw figures, and the checks they must pass."""


def median(values: Sequence[float]) -> float:
    """The middle of repeated measurements."""
    return statistics.median(values)


def at_least(name: str, value: float, target: float) -> Check:
    """A check that holds when `value` reaches `target`."""
    return Check(name=name, value=value, target=target, ok=value >= target)


def at_most(name: str, value: float, target: float) -> Check:
    """A check that holds when `value` stays within `target`."""
    return Check(name=name, value=value, target=target, ok=value <= target)


def machine() -> dict[str, Any]:
    """What the figures were measured on: processor, cores this process may use, memory, and the engines' versions."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "processor": names[0].partition(":")[2].strip() if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average_1min": os.getloadavg()[0],
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "megatron-core", "sglang", "transformers", "ray")},
    }


def write_report(path: str | Path, raw: dict[str, Any], checks: list[Check]) -> None:
    """Writes `{**raw, "machine": ..., "checks": checks}` as JSON and prints the checks."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**raw, "machine": machine(), "checks": checks}, indent=2) + "\n")
    for check in checks:
        verdict = "ok" if check["ok"] else "MISSED"
        print(f"{check['name']:<60} {check['value']:>12.4g} {check['target']:>12.4g}  {verdict}")


def main(measure: Callable[[], Measurement], description: str) -> None:
    """Command line of a benchmark: `--json FILE` is where the report of `measure()` goes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, help="file the report is written to")
    arguments = parser.parse_args()
    write_report(arguments.json, *measure())

"""Shared by all benchmarks: medians, checks against a target, a description of the machine, and the report."""

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
    """A figure and its target; both are None if the benchmark failed."""

    name: str
    value: float | None
    target: float | None
    ok: bool


Measurement = tuple[dict[str, Any], list[Check]]
"""Raw figures of a benchmark, and its checks."""


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def at_least(name: str, value: float, target: float) -> Check:
    """A check that passes if `value >= target`."""
    return Check(name=name, value=value, target=target, ok=value >= target)


def at_most(name: str, value: float, target: float) -> Check:
    """A check that passes if `value <= target`."""
    return Check(name=name, value=value, target=target, ok=value <= target)


def machine() -> dict[str, Any]:
    """The machine of the figures: processor, usable cores, memory, load, and versions of the main packages."""
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
        result = "ok" if check["ok"] else "MISSED"
        print(f"{check['name']:<60} {check['value']:>12.4g} {check['target']:>12.4g}  {result}")


def main(
    measure: Callable[[], Measurement],
    description: str,
    lora: Callable[[], Measurement] | None = None,
    moe: Callable[[], Measurement] | None = None,
) -> None:
    """Command line of a benchmark: writes its report to `--json FILE`.

    Args:
        measure: what it measures.
        description: of the benchmark.
        lora: what it measures with `--lora`.
        moe: what it measures with `--model moe`.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, help="file for the report")
    if lora is not None:
        parser.add_argument("--lora", action="store_true", help="measure adapters against all weights")
    if moe is not None:
        parser.add_argument("--model", choices=("dense", "moe"), default="dense", help="moe: a mixture of experts")
    arguments = parser.parse_args()
    if lora is not None and arguments.lora:
        measure = lora
    elif moe is not None and arguments.model == "moe":
        measure = moe
    write_report(arguments.json, *measure())

"""Runs all benchmarks, each in its own process, and prints a table: `python -m benchmarks --json-dir DIR`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.table import Table

from benchmarks.common import Check
from roll.base.terminal import make_console

BENCHMARKS = (
    "scheduler",
    "generate",
    "weight_sync",
    "delta_updates",
    "train_step",
    "long_context",
    "balance",
    "overhead",
    "recording",
    "async_overlap",
    "simulate",
    "agentic_rollout",
    "gateway",
    "rewards",
    "code_sandbox",
    "losses",
    "logprob_rounding",
    "routing",
    "routing_agreement",
    "against_trl",
    "recovery",
    "checkpoint",
    "faults",
)

TIMEOUT_S = 1800.0
"""Seconds after which a benchmark is killed with all its processes."""

LONGER = {"against_trl": 5400.0}
"""Time limits of benchmarks that take longer; against_trl makes 33 runs."""


def run(name: str, report: Path) -> tuple[list[Check], float]:
    """Checks and seconds of one benchmark; a failed benchmark gives one failed check, and its output is printed."""
    start = time.perf_counter()
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(report)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=LONGER.get(name, TIMEOUT_S))
        outcome = f"failed with exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        outcome = f"took longer than {LONGER.get(name, TIMEOUT_S):.0f} s"
    seconds = time.perf_counter() - start
    if process.returncode == 0 and report.exists():
        checks: list[Check] = json.loads(report.read_text())["checks"]
        return checks, seconds
    print(output, file=sys.stderr)
    return [Check(name=f"{name} {outcome}", value=None, target=None, ok=False)], seconds


def table_of(results: dict[str, tuple[list[Check], float]]) -> Table:
    """A table with one row per check."""
    table = Table(title="Benchmarks", title_justify="left")
    for header in ("benchmark", "check"):
        table.add_column(header)
    for header in ("value", "target"):
        table.add_column(header, justify="right")
    table.add_column("")
    for name, (checks, seconds) in results.items():
        label = f"{name} ({seconds:.0f} s)"
        for check in checks:
            numbers = ["" if value is None else f"{value:.4g}" for value in (check["value"], check["target"])]
            table.add_row(label, check["name"], *numbers, "[green]ok" if check["ok"] else "[bold red]missed")
            label = ""
        table.add_section()
    return table


def main() -> int:
    """Returns exit code 0 if all checks pass."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json-dir", type=Path, required=True, help="folder for the reports")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=BENCHMARKS, help="run only these")
    arguments = parser.parse_args()
    arguments.json_dir.mkdir(parents=True, exist_ok=True)
    console = make_console()
    results = {}
    for name in arguments.only:
        console.print(f"running {name} ...")
        results[name] = run(name, arguments.json_dir / f"{name}.json")
    console.print(table_of(results))
    return 0 if all(check["ok"] for checks, _ in results.values() for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Shared by recipes of several stages: runs a stage, writes the summary, and parses the command line."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from roll.base.terminal import EXIT_INTERRUPTED, make_console

if TYPE_CHECKING:
    from roll.pipeline.summary import RunSummary

console = make_console()


def heading(text: str) -> None:
    """Prints the heading of a stage, with a rule on a terminal."""
    if console.is_terminal:
        console.rule(text)
    else:
        console.print(text)


def train(file: Path, overrides: list[str]) -> RunSummary:
    """Runs the training of one YAML file; ends the recipe with its exit code where it does not finish."""
    from roll.cli import run
    from roll.loading.load import load_config
    from roll.pipeline.summary import RunSummary
    from roll.trackers.files import RUN_FILE

    code = run(file, overrides)
    if code:
        sys.exit(code)
    record = json.loads((Path(load_config(file, overrides).output_dir) / RUN_FILE).read_text())
    return RunSummary(**record["summary"])


def environment(folder: Path, packages: str) -> Path:
    """The interpreter of an environment in `folder` with `packages` of its own, which is made where it is missing."""
    python = folder / "bin" / "python"
    if not (folder / packages.replace(" ", "+")).exists():
        heading(f"Installs {packages} in {folder}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages.split()], check=True)
        (folder / packages.replace(" ", "+")).touch()
    return python


def summarise(
    out: Path, seed: int, start: float, warm: RunSummary | None, rl: RunSummary, metric: str
) -> dict[str, float]:
    """Writes `summary.json` below `out` and returns it.

    Args:
        out: output folder of all stages.
        seed: seed of all stages.
        start: `time.perf_counter()` before the first stage.
        warm: summary of the supervised stage, if there was one.
        rl: summary of the reinforcement learning stage.
        metric: validation metric, such as `val/score`; its first value is `val_before`, its last `val_after`. Both are
            left out where `eval_steps: 0` turned validation off.
    """
    scores = {int(step): metrics[metric] for step, metrics in rl.validation.items()}
    summary = {
        **({"val_before": scores[min(scores)], "val_after": scores[max(scores)]} if scores else {}),
        "seconds": round(time.perf_counter() - start, 1),
        "peak_rss_bytes": max(run.peak_memory_bytes for run in (warm, rl) if run is not None),
        "seed": seed,
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def main(
    description: str, default_out: str, what: str, demo: Callable[[Path, int, list[str]], dict[str, float]]
) -> None:
    """Command line of a recipe: runs it and prints the summary.

    Args:
        description: of the recipe, for --help.
        default_out: output folder without --out.
        what: what the metric measures, with `...` in place of both values: `validation accuracy ... on new problems`.
        demo: f(out, seed, overrides) -> summary.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(default_out), help="output folder")
    parser.add_argument("--seed", type=int, default=42, help="random seed")
    parser.add_argument("overrides", nargs="*", help="overrides for the reinforcement learning stage")
    arguments = parser.parse_args()
    try:
        summary = demo(arguments.out, arguments.seed, arguments.overrides)
    except KeyboardInterrupt:
        console.print("interrupted")
        sys.exit(EXIT_INTERRUPTED)
    figures = "(not validated)"
    if "val_after" in summary:
        figures = f"[bold]{summary['val_before']:.3f} -> {summary['val_after']:.3f}[/bold]"
    memory = summary["peak_rss_bytes"] / 2**30
    console.print(f"{what.replace('...', figures)}, in {summary['seconds']:.0f} s, peak memory {memory:.1f} GiB")
    console.print(f"{arguments.out}/summary.json   {arguments.out}/curves.png   tensorboard --logdir {arguments.out}")

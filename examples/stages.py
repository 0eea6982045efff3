"""What the recipes that run in one command share: one stage after another, then a summary and a picture."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from roll.pipeline.run import RunSummary

console = Console()


def train(file: Path, overrides: list[str]) -> RunSummary:
    """Runs one YAML to its end."""
    from roll.configs.load import load_config
    from roll.pipeline.run import configure_logging, run

    config = load_config(file, overrides)
    configure_logging(config)
    return asyncio.run(run(config))


def summarise(out: Path, seed: int, start: float, warm: RunSummary, rl: RunSummary, metric: str) -> dict[str, float]:
    """Writes `summary.json` and `curves.png` below `out`.

    Args:
        out: output folder of all stages.
        seed: of all stages.
        start: when they began, by `time.perf_counter`.
        warm: of the supervised stage.
        rl: of the reinforcement learning.
        metric: of its validations, such as `val/score`: the first is `val_before`, the last `val_after`.
    """
    scores = {int(step): metrics[metric] for step, metrics in rl.validation.items()}
    summary = {
        "val_before": scores[min(scores)],
        "val_after": scores[max(scores)],
        "seconds": round(time.perf_counter() - start, 1),
        "peak_rss_bytes": max(warm.peak_memory_bytes, rl.peak_memory_bytes),
        "seed": seed,
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def main(
    description: str, default_out: str, what: str, demo: Callable[[Path, int, list[str]], dict[str, float]]
) -> None:
    """Reads the command line, runs the recipe and prints what came of it.

    Args:
        description: of the recipe, for --help.
        default_out: folder to write where --out names none.
        what: what the two figures say, such as `validation accuracy ... on problems not trained on`; dots for them.
        demo: the recipe: f(out, seed, overrides) -> summary.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(default_out), help="folder to write")
    parser.add_argument("--seed", type=int, default=42, help="seed of everything random")
    parser.add_argument("overrides", nargs="*", help="key=value for the reinforcement learning run")
    arguments = parser.parse_args()
    summary = demo(arguments.out, arguments.seed, arguments.overrides)
    figures = f"[bold]{summary['val_before']:.3f} -> {summary['val_after']:.3f}[/bold]"
    memory = summary["peak_rss_bytes"] / 2**30
    console.print(f"{what.replace('...', figures)}, in {summary['seconds']:.0f} s, at most {memory:.1f} GiB of memory")
    console.print(f"{arguments.out}/summary.json   {arguments.out}/curves.png   tensorboard --logdir {arguments.out}")

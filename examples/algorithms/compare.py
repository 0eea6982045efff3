"""Runs the recipes of this folder from the same warm starts and writes a table of what each learned.

    python -m examples.algorithms.compare --out output/algorithms --seeds 1,2 --ratios 0,1 [NAME ...]

A recipe runs once for every seed and `async_generation_ratio`, in a process of its own. What is finished is not run
again, so an interrupted comparison continues where it stopped. Writes `results.json` and `results.md`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples import stages
from roll.configs.pipeline import BaseConfig, RLConfig

HERE = Path(__file__).parent
BASE = "base"
ACCURACY = ("val/math_rule/math_rule", "val/FrozenLake/success", "val/accuracy", "val/score")
"""Metrics that are the accuracy of a recipe; the first that a run has."""


@dataclass(frozen=True)
class Trial:
    """One run of a recipe; `ratio` is None where nothing is generated."""

    recipe: str
    ratio: float | None
    seed: int

    def folder(self, out: Path) -> Path:
        """Folder of the run's output."""
        ratio = "" if self.ratio is None else f"-ratio{self.ratio:g}"
        return out / "runs" / f"{self.recipe}{ratio}-seed{self.seed}"


def recipes() -> list[str]:
    """Names of the recipes of this folder."""
    return sorted(file.stem for file in HERE.glob("*.yaml") if file.stem != BASE)


def load(recipe: str, overrides: Sequence[str] = ()) -> BaseConfig:
    """The configuration of a recipe."""
    from roll.loading.load import load_config

    return load_config(HERE / f"{recipe}.yaml", list(overrides))


def accuracies(trial: Trial, out: Path) -> list[float] | None:
    """Validation accuracy of a finished run, in the order of its validations; None if it has not finished.

    Where the score is the sum of several rewards, accuracy is that of `math_rule` alone. For an agent it is the share
    of episodes that reach the goal, for preferences the share of held-out pairs whose better response gained more.
    """
    from roll.trackers.files import RUN_FILE

    file = trial.folder(out) / RUN_FILE
    record: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    summary = record.get("summary") or {}
    if summary.get("status") != "finished":
        return None
    scores = {
        int(step): next(metrics[name] for name in ACCURACY if name in metrics)
        for step, metrics in summary["validation"].items()
    }
    return [scores[step] for step in sorted(scores)]


def run_trials(trials: Sequence[Trial], out: Path, overrides: Sequence[str]) -> None:
    """Runs what is not finished; a trial that fails is reported and does not stop the others."""
    from roll.tools.processes import CONSOLE_LOG, run_process

    for number, trial in enumerate(trials, 1):
        if accuracies(trial, out) is None:
            folder = trial.folder(out)
            inputs = [f"output_dir={folder}", *inputs_of(trial.recipe, out, trial.seed)]
            if trial.ratio is not None:
                inputs.append(f"async_generation_ratio={trial.ratio:g}")
            command = [sys.executable, "-m", "roll", "run", str(HERE / f"{trial.recipe}.yaml"), *inputs, *overrides]
            run_process(command, folder / CONSOLE_LOG)
        found = accuracies(trial, out)
        shown = f"failed, see {trial.folder(out) / CONSOLE_LOG}" if found is None else show(found)
        stages.console.print(f"{number}/{len(trials)}  {trial.folder(out).name}  {shown}")
        write_results(trials, out)


def inputs_of(recipe: str, out: Path, seed: int) -> list[str]:
    """The overrides of a recipe: its warm start, made below `out` unless it is there, and what else it begins with."""
    from examples.tiny_distill.demo import make_teacher
    from examples.tiny_dpo.demo import make_pairs
    from examples.tiny_frozen_lake import demo as tiny_frozen_lake
    from examples.tiny_math import demo as tiny_math

    config = load(recipe)
    agentic = config.pipeline == "agentic"
    task = tiny_frozen_lake if agentic else tiny_math
    start = out / f"{'lake-' if agentic else ''}warm-start-seed{seed}"
    if not (start / "sft" / "hf_model" / "config.json").is_file():
        task.warm_start(start, seed)
    inputs: list[str] = task.warm_inputs(start, seed)
    if config.pipeline == "dpo":
        return [inputs[0], inputs[-1], *make_pairs(start, seed)]
    if isinstance(config, RLConfig) and config.uses_teacher:
        return [*inputs, make_teacher(start, inputs)]
    return inputs


def show(found: Sequence[float]) -> str:
    """First and last accuracy."""
    return f"{found[0]:.2f} -> {found[-1]:.2f}"


def table(trials: Sequence[Trial], out: Path) -> Iterator[str]:
    """Lines of a markdown table: recipes by ratio and seed."""
    columns = list(dict.fromkeys((trial.ratio, trial.seed) for trial in trials))
    yield "| recipe | " + " | ".join(heading(*column) for column in columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for recipe in dict.fromkeys(trial.recipe for trial in trials):
        cells = [accuracies(Trial(recipe, *column), out) for column in columns]
        yield f"| `{recipe}` | " + " | ".join("" if cell is None else show(cell) for cell in cells) + " |"


def heading(ratio: float | None, seed: int) -> str:
    """Heading of a column."""
    return f"seed {seed}" if ratio is None else f"ratio {ratio:g}, seed {seed}"


def write_results(trials: Sequence[Trial], out: Path) -> None:
    """Writes every accuracy to results.json, and the table to results.md."""
    rows = [{**vars(trial), "accuracy": accuracies(trial, out)} for trial in trials]
    (out / "results.json").write_text(json.dumps(rows, indent=1) + "\n")
    (out / "results.md").write_text("\n".join(table(trials, out)) + "\n")


def main() -> int:
    """The command line; 1 if a run failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"recipes; default: all of {', '.join(recipes())}")
    parser.add_argument("--out", type=Path, default=Path("output/algorithms"), help="output folder")
    parser.add_argument("--seeds", default="1,2", help="seeds, such as 1,2")
    parser.add_argument("--ratios", default="0,1", help="values of async_generation_ratio, such as 0,1,4")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides for every run")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(recipes())
    if unknown:
        parser.error(f"no recipe {', '.join(sorted(unknown))}; there are {', '.join(recipes())}")
    seeds, ratios = [int(part) for part in arguments.seeds.split(",")], list(map(float, arguments.ratios.split(",")))
    trials = [
        Trial(name, ratio, seed)
        for name in arguments.names or recipes()
        for ratio in (ratios if isinstance(load(name), RLConfig) else [None])
        for seed in seeds
    ]
    arguments.out.mkdir(parents=True, exist_ok=True)
    run_trials(trials, arguments.out, arguments.set)
    print("\n".join(table(trials, arguments.out)))
    return int(any(accuracies(trial, arguments.out) is None for trial in trials))


if __name__ == "__main__":
    sys.exit(main())

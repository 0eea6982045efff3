"""`roll rehearse`: a recipe in miniature on this CPU, through the real engines, and a report on what it showed."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from roll.base.errors import RunError
from roll.base.terminal import make_console
from roll.configs.hardware import prepare_run
from roll.configs.load import build_config, load_config
from roll.configs.pipeline import BaseConfig
from roll.models.families.hf_config import UnsupportedModel
from roll.tools.processes import CONSOLE_LOG
from roll.tools.show.command import tokenizer_decode
from roll.tools.terminal import integer, option_error

if TYPE_CHECKING:
    from roll.tools.rehearse.runs import RunRecord
    from roll.tools.rehearse.shrink import Rehearsal

CONFIG_FILE, REPORT_FILE = "rehearsal.yaml", "rehearsal.json"
"""Files of a rehearsal: its configuration, which `roll run` accepts too, and its report."""

LEAST_STEPS = 2
"""The resumed run repeats the last step from the checkpoint of the one before."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `roll rehearse`."""
    parser.add_argument(
        "--steps", type=integer(LEAST_STEPS), default=LEAST_STEPS, metavar="N", help="training steps (default: 2)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="output folder (default: output/rehearsal/FOLDER-NAME of the recipe)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs `roll rehearse` and returns its exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    file = Path(arguments.config)
    out = arguments.out or Path("output", "rehearsal", f"{file.resolve().parent.name}-{file.stem}")
    return Rehearser(arguments.config, arguments.overrides, out, arguments.steps).run()


@dataclass
class Rehearser:
    """One rehearsal and its folder."""

    file: str
    overrides: Sequence[str]
    out: Path
    steps: int = LEAST_STEPS
    _start: float = field(default_factory=time.monotonic)

    def run(self) -> int:
        """Rehearses and prints the report.

        Returns:
            Exit code: 0 if every part of the recipe was exercised, 1 if not.

        Raises:
            ConfigError: the recipe cannot be loaded or started, or the output folder cannot be used.
        """
        self.say(f"rehearsing {self.file} in {self.out}")
        recipe = load_config(self.file, self.overrides)
        prepare_folder(self.out)
        try:
            rehearsal, small = self.shrink(recipe)
            return self.report(recipe, small, rehearsal, self.start(small, rehearsal))
        except (RunError, UnsupportedModel) as error:
            print(error, file=sys.stderr)
            return 1

    def shrink(self, recipe: BaseConfig) -> tuple[Rehearsal, BaseConfig]:
        """Writes model, data and configuration of the run in miniature, and loads the configuration."""
        from roll.tools.rehearse.inputs import make_inputs  # imports torch and transformers
        from roll.tools.rehearse.shrink import shrink

        inputs = make_inputs(recipe, self.out, self.steps, self.say)
        rehearsal = shrink(recipe, inputs, str(self.out / "run"), self.steps)
        file = self.out / CONFIG_FILE
        head = f"# {self.file} in miniature, written by `roll rehearse`.\n"
        file.write_text(head + yaml.safe_dump(rehearsal.tree, sort_keys=False), encoding="utf-8")
        small = build_config(rehearsal.tree, source=str(file))
        prepare_run(small)
        return rehearsal, small

    def start(self, small: BaseConfig, rehearsal: Rehearsal) -> list[RunRecord]:
        """Runs the miniature twice: from the start, and from its checkpoint."""
        from roll.tools.rehearse.runs import run_twice

        layouts = rehearsal.placement.layouts
        parts = [f"{role} on {layouts[role].world_size} of {rehearsal.placement.slots} CPU slots" for role in layouts]
        self.say(f"starting Ray, {', '.join(parts)}; this takes about a minute")
        modules = Path(self.file).parent
        return run_twice(self.out / CONFIG_FILE, Path(small.output_dir), modules, self.steps, self.say)

    def report(self, recipe: BaseConfig, small: BaseConfig, rehearsal: Rehearsal, records: Sequence[RunRecord]) -> int:
        """Prints the report, writes it as JSON, and returns the exit code."""
        from roll.tools.rehearse.report import findings, sample_view, summary_of, tables
        from roll.tools.rehearse.runs import cause_of_failure

        made = findings(recipe, small, rehearsal.placement, records)
        summary = summary_of(made, rehearsal.changes, time.monotonic() - self._start)
        (self.out / REPORT_FILE).write_text(json.dumps(summary, indent=2, default=str) + "\n")
        console = make_console()
        if not all(record.finished for record in records):
            console.print(cause_of_failure(self.out / CONSOLE_LOG), style="red", markup=False, soft_wrap=True)
        console.print(tables(made, rehearsal.changes))
        decode = tokenizer_decode(small.actor_train.model_args.model_name_or_path)
        view = sample_view(small, records[0], decode)
        if view is not None:
            console.print("", view)
        verdict = "every part was exercised" if summary["passed"] else "not every part was exercised"
        lost = [f"{text} ({finding.name})" for finding in made for text in finding.not_exercised]
        verdict += f", except {', '.join(lost)}" if lost else ""
        self.say(f"{verdict}; the run is in {self.out}: {CONFIG_FILE}, {REPORT_FILE}, {CONSOLE_LOG}, run/")
        return 0 if summary["passed"] else 1

    def say(self, text: str) -> None:
        """Prints one line with the time since the command was given."""
        minutes, seconds = divmod(int(time.monotonic() - self._start), 60)
        print(f"{minutes}:{seconds:02d}  {text}", flush=True)


def prepare_folder(out: Path) -> None:
    """Makes the folder of a rehearsal, or empties that of an earlier one; no other folder is touched.

    Raises:
        ConfigError: it holds something else, or cannot be written.
    """
    if out.exists() and not out.is_dir():
        raise option_error("--out", f"{out} is a file; use a folder")
    if out.is_dir() and any(out.iterdir()) and not (out / CONFIG_FILE).is_file():
        raise option_error("--out", f"{out} holds something other than a rehearsal; use a new folder")
    try:
        if out.is_dir():
            shutil.rmtree(out)
        out.mkdir(parents=True)
        (out / CONFIG_FILE).touch()
    except OSError as error:
        raise option_error("--out", f"{out} cannot be written: {error.strerror}; use another folder") from None

"""A recipe in miniature on this CPU, through the real engines, and a report on what it showed."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import yaml

from roll.base.errors import RunError
from roll.base.terminal import make_console
from roll.envs.registry import try_environment
from roll.loading.load import build_config, load_config
from roll.models.families.hf_config import UnsupportedModel
from roll.plan.hardware import prepare_run
from roll.tools.processes import CONSOLE_LOG
from roll.tools.show.tokens import model_pieces
from roll.tools.terminal import option_error

CONFIG_FILE, REPORT_FILE = "rehearsal.yaml", "rehearsal.json"
"""Files of a rehearsal: its configuration, which `roll run` accepts too, and its report."""


def rehearse(config: str, overrides: Sequence[str], steps: int, out: Path | None) -> int:
    """Rehearses and prints the report.

    Returns:
        Exit code: 0 if every part of the recipe was exercised, 1 if not.

    Raises:
        ConfigError: the recipe cannot be loaded or started, or the output folder cannot be used.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    start, file = time.monotonic(), Path(config)

    def say(text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - start), 60)
        print(f"{minutes}:{seconds:02d}  {text}", flush=True)

    out = out or Path("output", "rehearsal", f"{file.resolve().parent.name}-{file.stem}")
    say(f"rehearsing {file} in {out}")
    recipe = load_config(file, overrides, try_environment=try_environment)
    prepare_folder(out)
    from roll.lab.rehearse.inputs import make_inputs  # imports torch and transformers
    from roll.lab.rehearse.overrides import shrink
    from roll.lab.rehearse.report import findings, sample_view, summary_of, tables, verdict
    from roll.lab.rehearse.runs import cause_of_failure, run_twice

    try:
        rehearsal = shrink(recipe, make_inputs(recipe, out, steps, say), str(out / "run"), steps)
        text = yaml.safe_dump(rehearsal.tree, sort_keys=False)
        head = f"# {recipe.source.file} in miniature, written by `roll rehearse`.\n"
        (out / CONFIG_FILE).write_text(head + text, encoding="utf-8")
        small = build_config(rehearsal.tree, source=str(out / CONFIG_FILE), try_environment=try_environment)
        prepare_run(small)
        slots, layouts = rehearsal.placement.slots, rehearsal.placement.layouts
        parts = [f"{role} on {layout.world_size} of {slots} CPU slots" for role, layout in layouts.items()]
        say(f"starting Ray, {', '.join(parts)}; this takes about a minute")
        records = run_twice(out / CONFIG_FILE, Path(small.output_dir), file.parent, steps, say)
    except (RunError, UnsupportedModel) as error:
        print(error, file=sys.stderr)
        return 1
    made = [*findings(recipe, small, rehearsal.placement, records)]
    summary = summary_of(made, rehearsal.changes, time.monotonic() - start)
    (out / REPORT_FILE).write_text(json.dumps(summary, indent=2, default=str) + "\n")
    console = make_console()
    if not all(record.finished for record in records):
        console.print(cause_of_failure(out / CONSOLE_LOG), style="red", markup=False, soft_wrap=True)
    console.print(tables(made, rehearsal.changes))
    pieces = model_pieces(small.actor_train.model_args.model_name_or_path)
    console.print(sample_view(small, records[0], pieces))
    say(f"{verdict(made)}; the run is in {out}: {CONFIG_FILE}, {REPORT_FILE}, {CONSOLE_LOG}, run/")
    return 0 if summary["passed"] else 1


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

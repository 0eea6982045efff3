"""`roll report`: writes the page of one or several runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from roll.base.errors import RunError
from roll.tools.terminal import option_error

FILE = "report.html"
"""File in the folder of the first run, without --out."""

MOST_RUNS = 8


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `roll report`."""
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN_DIR", help="output_dir of a run; several are compared"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"page to write (default: RUN_DIR/{FILE})")


def run(arguments: argparse.Namespace) -> int:
    print(f"written: {report(arguments.runs, arguments.out)}")
    return 0


def report(folders: list[Path], out: Path | None = None) -> Path:
    """Writes the page of runs by their `output_dir` and returns the file.

    Raises:
        ConfigError: a folder is not that of a run, there are too many, or the page cannot be written.
    """
    from roll.report.page import make_page
    from roll.report.read import read_run
    from roll.trackers.files import explain_write_errors

    if len(folders) > MOST_RUNS:
        raise option_error(
            "RUN_DIR", f"{len(folders)} runs; at most {MOST_RUNS} fit a page, `roll ablate` reports more"
        )
    runs = [read_run(folder) for folder in folders]
    policies = [each for run in runs for each in (run, *run.policies)]
    page = make_page(policies if len(policies) <= MOST_RUNS else runs)
    out = out or folders[0] / FILE
    try:
        with explain_write_errors(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(page, encoding="utf-8", errors="replace")
    except RunError as error:
        raise option_error("--out", str(error)) from None
    return out

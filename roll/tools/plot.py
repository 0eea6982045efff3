"""`roll plot`: draws the curves of a run as a picture."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from roll.base.errors import RunError
from roll.configs.trackers import METRICS_FILE
from roll.tools.terminal import option_error
from roll.trackers.files import RUN_FILE, explain_write_errors

PICTURE = "curves.png"
"""File in the folder of the run, without --out."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="output_dir of a run, finished or still running")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"PNG to write (default: RUN_DIR/{PICTURE})")
    parser.add_argument("--title", metavar="TEXT", help="title of the picture (default: exp_name of the run)")


def run(arguments: argparse.Namespace) -> int:
    print(f"written: {plot(arguments.run, arguments.out, arguments.title)}")
    return 0


def plot(folder: Path, out: Path | None = None, title: str | None = None) -> Path:
    """Draws the curves of the run with this `output_dir` and returns the file.

    Raises:
        ConfigError: the folder is not that of a run, or has no step yet, or the file cannot be written.
    """
    if not (folder / METRICS_FILE).is_file():
        reason = f"has no {METRICS_FILE}" if folder.is_dir() else "is not a folder"
        hint = (
            "wait until the first step has finished"
            if (folder / RUN_FILE).is_file()
            else "give the output_dir of a run"
        )
        raise option_error("RUN_DIR", f"{folder} {reason}; {hint}")
    out = out or folder / PICTURE
    if out.suffix.lower() != ".png":
        raise option_error("--out", f"{out} must end in .png")
    from roll.trackers.curves import draw_curves  # imports matplotlib

    try:
        with explain_write_errors(out):
            return draw_curves(folder, out, _name(folder) if title is None else title)
    except (RunError, ValueError) as error:
        raise option_error("RUN_DIR" if isinstance(error, ValueError) else "--out", str(error)) from None


def _name(folder: Path) -> str:
    """`exp_name` of the run; the name of its folder where there is no run.json."""
    try:
        name = json.loads((folder / RUN_FILE).read_text())["config"]["exp_name"]
    except (OSError, ValueError, KeyError, TypeError):
        return folder.resolve().name
    return str(name)

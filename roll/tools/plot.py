"""`roll plot`: draws the curves of a run, or those of several runs over each other, as a picture."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from roll.base.errors import RunError
from roll.configs.trackers import METRICS_FILE
from roll.tools.terminal import option_error
from roll.trackers.files import RUN_FILE, explain_write_errors

PICTURE, COMPARISON = "curves.png", "compared.png"
"""Files in the folder of the only or the first run, without --out."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `roll plot`."""
    help_text = "output_dir of a run, finished or still running; several are compared"
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR", help=help_text)
    help_text = f"PNG to write (default: RUN_DIR/{PICTURE}, or {COMPARISON} there for several)"
    parser.add_argument("--out", type=Path, metavar="FILE", help=help_text)
    parser.add_argument("--title", metavar="TEXT", help="title of the picture (default: exp_name of the run)")


def run(arguments: argparse.Namespace) -> int:
    """Draws the curves of the runs and prints the file.

    Raises:
        ConfigError: a folder is not that of a run, or has no step yet, or the file cannot be written.
    """
    folders, title = arguments.runs, arguments.title
    for folder in folders:
        _check_run(folder)
    one = len(folders) == 1
    out = arguments.out or folders[0] / (PICTURE if one else COMPARISON)
    if out.suffix.lower() != ".png":
        raise option_error("--out", f"{out}; use a name that ends in .png")
    names = [_name(folder) for folder in folders]
    if len({*names}) < len(names):
        names = [str(folder) for folder in folders]
    if title is None:
        title = names[0] if one else ""
    from roll.trackers.curves import draw_curves  # imports matplotlib

    try:
        with explain_write_errors(out):
            print(f"written: {draw_curves(folders, out, title, names)}")
    except (RunError, ValueError) as error:
        raise option_error("RUN_DIR" if isinstance(error, ValueError) else "--out", str(error)) from None
    return 0


def _check_run(folder: Path) -> None:
    if not (folder / METRICS_FILE).is_file():
        reason = f"has no {METRICS_FILE}" if folder.is_dir() else "is not a folder"
        started = (folder / RUN_FILE).is_file()
        hint = "wait until the first step has finished" if started else "give the output_dir of a run"
        raise option_error("RUN_DIR", f"{folder} {reason}; {hint}")


def _name(folder: Path) -> str:
    """`exp_name` of the run; the name of its folder where there is no run.json."""
    try:
        name = json.loads((folder / RUN_FILE).read_text())["config"]["exp_name"]
    except (OSError, ValueError, KeyError, TypeError):
        return folder.resolve().name
    return str(name)

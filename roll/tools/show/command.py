"""`roll show`: prints the samples of a training step, or writes them to an HTML page."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.text import Text

from roll.base.errors import RunError
from roll.base.terminal import make_console
from roll.tools.show.formatting import sanitize_line
from roll.tools.show.layout import LEGEND, step_view
from roll.tools.show.samples import SampleGroup, choose_step, find_dump, read_groups
from roll.tools.show.tokens import Pieces, model_pieces, token_numbers
from roll.tools.terminal import integer, option_error
from roll.trackers.sample_files import dumped_steps

DEFAULT_LIMIT = 16
"""Samples shown without --limit and --group; a step may have thousands."""

PAGE_WIDTH = 120
"""Columns of an HTML page."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `roll show`."""
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="output_dir of a run, finished or still running")
    parser.add_argument("--step", type=integer(0), metavar="N", help="training step (default: the last one)")
    parser.add_argument("--group", type=integer(0), metavar="G", help="show only this group, with all its samples")
    help_text = f"most samples to show, equal ones count once (default: {DEFAULT_LIMIT})"
    parser.add_argument("--limit", type=integer(1), metavar="K", help=help_text)
    parser.add_argument("--policy", help="of several policies, the one whose samples are shown")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write an HTML page instead of printing")


def run(arguments: argparse.Namespace) -> int:
    return show(arguments.run, arguments.step, arguments.group, arguments.limit, arguments.html, arguments.policy)


def show(
    run: Path,
    step: int | None = None,
    group: int | None = None,
    limit: int | None = None,
    html: Path | None = None,
    policy: str | None = None,
) -> int:
    """Prints samples of a step, or writes them to the page `html`, and returns the exit code.

    Raises:
        ConfigError: the run, policy, step or group does not exist, or the page cannot be written.
    """
    folder, model = find_dump(run)
    folder = _of_policy(folder, policy)
    step = choose_step(dumped_steps(folder), step, folder)
    groups = read_groups(folder, step)
    if group is not None:
        groups = [_find_group(groups, group)]
        limit = limit or len(groups[0].samples)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    console = make_console()
    pieces: Pieces = token_numbers
    responses = any(sample.episode is None for shown in groups for sample in shown.samples)
    if responses:
        try:
            pieces = model_pieces(model)
        except RunError as error:
            message = Text.assemble("showing token ids, no tokenizer: ", sanitize_line(str(error)), style="yellow")
            console.print(message)
    colors = html is not None or (console.color_system is not None and not console.no_color)
    view = Group(*([LEGEND] if responses and colors else []), step_view(step, groups, limit or DEFAULT_LIMIT, pieces))
    if html is None:
        console.print(view)
        return 0
    write_page(view, html)
    console.print(sanitize_line(f"written: {html}"), soft_wrap=True)
    return 0


def _of_policy(folder: Path, policy: str | None) -> Path:
    """The folder with the samples of a policy; of the only one, `folder`."""
    known = sorted(each.name for each in folder.iterdir() if dumped_steps(each)) if folder.is_dir() else []
    if policy in known or (policy is None and not known):
        return folder / (policy or "")
    there = f"there are samples of {', '.join(known)}; give one" if known else "the run has one policy; leave it out"
    raise option_error("--policy", f"{policy}: {there}" if policy else there)


def write_page(view: RenderableType, file: Path) -> None:
    """Writes the view as an HTML page with colors.

    Raises:
        ConfigError: the file cannot be written.
    """
    console = Console(file=io.StringIO(), record=True, highlight=False, width=PAGE_WIDTH, force_terminal=True)
    console.print(view)
    try:
        console.save_html(str(file))
    except OSError as error:
        raise option_error("--html", f"{file} cannot be written: {error}; use a file in an existing folder") from None


def _find_group(groups: Sequence[SampleGroup], number: int) -> SampleGroup:
    found = next((group for group in groups if group.number == number), None)
    if found is None:
        numbers = [group.number for group in groups]
        existing = f"this step has groups {min(numbers)} to {max(numbers)}" if numbers else "this step has no samples"
        raise option_error("--group", f"{number} does not exist; {existing}")
    return found

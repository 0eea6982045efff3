"""`roll show`: prints the samples of a training step, or writes them to an HTML page."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from roll.base.errors import RunError
from roll.base.terminal import make_console
from roll.tools.show.formatting import sanitize_line
from roll.tools.show.layout import Decode, step_view
from roll.tools.show.samples import SampleGroup, choose_step, find_dump, read_groups
from roll.tools.terminal import integer, option_error
from roll.trackers.files import dumped_steps

DEFAULT_LIMIT = 16
"""Samples shown without --limit and --group; a step may have thousands."""

PAGE_WIDTH = 120
"""Columns of an HTML page."""


@dataclass(frozen=True)
class ShowOptions:
    """Options of `roll show`.

    Attributes:
        step: step to show; None for the last one.
        group: show only this group; None for all groups.
        limit: most samples to show; None for DEFAULT_LIMIT, or for all samples of `group`.
        html: page to write; None to print.
    """

    step: int | None = None
    group: int | None = None
    limit: int | None = None
    html: Path | None = None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `roll show`."""
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="output_dir of a run, finished or still running")
    parser.add_argument("--step", type=integer(0), metavar="N", help="training step (default: the last one)")
    parser.add_argument("--group", type=integer(0), metavar="G", help="show only this group, with all its samples")
    parser.add_argument(
        "--limit", type=integer(1), metavar="K", help=f"most samples to show (default: {DEFAULT_LIMIT})"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write an HTML page instead of printing")


def run(arguments: argparse.Namespace) -> int:
    return show(arguments.run, ShowOptions(arguments.step, arguments.group, arguments.limit, arguments.html))


def show(run: Path, options: ShowOptions) -> int:
    """Shows samples of the run with this `output_dir` and returns the exit code.

    Raises:
        ConfigError: the run, step or group does not exist, or the page cannot be written.
    """
    dump = find_dump(run)
    step = choose_step(dumped_steps(dump.folder), options.step, dump.folder)
    groups = read_groups(dump.folder, step)
    limit = options.limit or DEFAULT_LIMIT
    if options.group is not None:
        groups = [_find_group(groups, options.group)]
        limit = options.limit or len(groups[0].samples)
    console = _standard_output()
    decode: Decode = token_numbers
    if any(sample.episode is None for group in groups for sample in group.samples):
        try:
            decode = tokenizer_decode(dump.model)
        except RunError as error:
            message = Text.assemble("showing token ids, no tokenizer: ", sanitize_line(str(error)), style="yellow")
            console.print(message)
    view = step_view(step, groups, limit, decode)
    if options.html is None:
        console.print(view)
        return 0
    write_page(view, options.html)
    console.print(sanitize_line(f"written: {options.html}"), soft_wrap=True)
    return 0


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


def token_numbers(ids: Sequence[int]) -> str:
    return " ".join(str(token) for token in ids)


def _standard_output() -> Console:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return make_console()


def tokenizer_decode(model: str | None) -> Decode:
    """Decodes with the tokenizer of a model.

    Raises:
        RunError: it cannot be read.
    """
    from roll.datasets.tokenizer import load_tokenizer  # imports transformers

    tokenizer = load_tokenizer(model)
    return lambda ids: str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


def _find_group(groups: Sequence[SampleGroup], number: int) -> SampleGroup:
    found = next((group for group in groups if group.number == number), None)
    if found is None:
        numbers = [group.number for group in groups]
        existing = f"this step has groups {min(numbers)} to {max(numbers)}" if numbers else "this step has no samples"
        raise option_error("--group", f"{number} does not exist; {existing}")
    return found

"""From a run's folder to the screen or a page."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from roll.pipeline.errors import RunError
from roll.pipeline.rollout_dump import dumped_steps
from roll.tools.show.formatting import safe_line
from roll.tools.show.layout import Decode, step_view
from roll.tools.show.samples import SampleGroup, choose_step, find_dump, read_groups, wrong

WIDTH = 120
"""Columns of a page, and of output that is not a terminal."""

FIRST_SAMPLES = 16
"""Samples shown where neither a limit nor a group is asked for: a step may have thousands."""


@dataclass(frozen=True)
class Options:
    """What to show; None: the last step, every group, FIRST_SAMPLES samples (of one group all), the screen."""

    step: int | None = None
    group: int | None = None
    limit: int | None = None
    html: Path | None = None


def show(run: Path, options: Options) -> int:
    """Shows samples of the run whose `output_dir` this is; gives the exit code.

    Raises:
        ConfigError: there is no such run, step or group, or the page cannot be written.
    """
    dump = find_dump(run)
    step = choose_step(dumped_steps(dump.folder), options.step, dump.folder)
    groups = read_groups(dump.folder, step)
    limit = options.limit or FIRST_SAMPLES
    if options.group is not None:
        groups = _only(groups, options.group)
        limit = options.limit or len(groups[0].samples)
    console = screen()
    decode: Decode = token_numbers
    if any(sample.episode is None for group in groups for sample in group.samples):
        try:
            decode = _decoder(dump.model)
        except RunError as error:
            console.print(Text.assemble("no texts, since ", safe_line(str(error)), style="yellow"))
    view = step_view(step, groups, limit, decode)
    if options.html is None:
        console.print(view)
        return 0
    write_page(view, options.html)
    console.print(safe_line(f"written: {options.html}"), soft_wrap=True)
    return 0


def screen() -> Console:
    """Standard output; what its encoding lacks is escaped."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)


def write_page(view: RenderableType, file: Path) -> None:
    """The view as HTML, in colour.

    Raises:
        ConfigError: the file cannot be written.
    """
    console = Console(file=io.StringIO(), record=True, highlight=False, width=WIDTH, force_terminal=True)
    console.print(view)
    try:
        console.save_html(str(file))
    except OSError as error:
        raise wrong("--html", f"{file} cannot be written: {error}; name a file in a folder that is there") from None


def token_numbers(ids: Sequence[int]) -> str:
    """What is shown of tokens without a tokenizer."""
    return " ".join(str(token) for token in ids)


def _decoder(model: str | None) -> Decode:
    from roll.pipeline.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model)
    return lambda ids: str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


def _only(groups: Sequence[SampleGroup], wanted: int) -> list[SampleGroup]:
    """The group of that number alone.

    Raises:
        ConfigError: there is none.
    """
    found = [group for group in groups if group.number == wanted]
    if not found:
        numbers = [group.number for group in groups]
        there = f"this step has {min(numbers)} to {max(numbers)}" if numbers else "this step has no samples"
        raise wrong("--group", f"{wanted} is not there; {there}")
    return found


def add_options(command: argparse.ArgumentParser) -> None:
    """Gives the command its arguments."""
    command.add_argument("run", type=Path, metavar="RUN_DIR", help="output_dir of a run, which may still be going")
    command.add_argument("--step", type=_whole(0), metavar="N", help="step (default: the last one there is)")
    command.add_argument("--group", type=_whole(0), metavar="G", help="this group alone, with all its samples")
    command.add_argument("--limit", type=_whole(1), metavar="K", help="most samples (default: 16)")
    command.add_argument("--html", type=Path, metavar="FILE", help="write a page instead of printing")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    return show(arguments.run, Options(arguments.step, arguments.group, arguments.limit, arguments.html))


def _whole(least: int) -> Callable[[str], int]:
    """A parser of whole numbers of at least this."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return value

    return parse

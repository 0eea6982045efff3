"""What people see of a command: its log with the elapsed time, tables that a pipe does not wrap, and its end by Ctrl-C.

Every module may import this one, and it imports neither torch nor Ray, so a command can say what it does before it
imports them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, TextIO

import psutil
from rich.console import Console

from roll.base.errors import ConfigError, Problem
from roll.base.redaction import redact

EXIT_INTERRUPTED = 128 + signal.SIGINT
"""Exit code after Ctrl-C, as shells define it."""

TERMINATION = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a run in order, as a scheduler or a closed terminal sends them."""

UNWRAPPED_WIDTH = 10_000
"""Width of output that is not a terminal: lines are not wrapped."""

COLORS = {logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m"}
"""Colors of log messages on a terminal."""

END_TIMEOUT_S = 1.0
"""Longest wait for killed processes to be gone; it takes milliseconds."""

_started = time.monotonic()


def make_console(file: TextIO | None = None) -> Console:
    """A console on `file`, or on standard output, that wraps lines only on a terminal."""
    console = Console(file=file, highlight=False)
    return console if console.is_terminal else Console(file=file, highlight=False, width=UNWRAPPED_WIDTH)


class RedactedLines(logging.Formatter):
    """Formats messages, also those with a traceback, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return str(redact(super().format(record)))


class ConsoleLog(logging.Handler):
    """Prints messages to standard output, each after the seconds since the command started."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints one message; a closed standard output is not an error."""
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        line = f"{time.monotonic() - _started:7.1f} s  {level}{self.format(record)}"
        color = COLORS.get(record.levelno) if sys.stdout.isatty() else None
        with contextlib.suppress(OSError, ValueError):
            print(f"{color}{line}\x1b[0m" if color else line, flush=True)


class FileLog(logging.FileHandler):
    """Appends messages to a file; on a full disk it stops, and says so once on the console."""

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        self.setFormatter(RedactedLines("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (logging's name)
        """Removes this handler from the log."""
        error = sys.exc_info()[1]
        logging.getLogger("roll").removeHandler(self)
        logging.getLogger(__name__).warning("%s ends here: %s", self.baseFilename, error)


def log_to_console() -> None:
    """Prints the log of the project."""
    root = logging.getLogger("roll")
    root.setLevel(logging.INFO)
    console = ConsoleLog()
    console.setFormatter(RedactedLines())
    root.handlers = [console]


def configure_logging(folder: Path, file: str | None = None) -> None:
    """Prints the log of the project, and appends it to `driver.log` of `folder`.

    Args:
        folder: `logging_dir` of a run.
        file: configuration, for the error.

    Raises:
        ConfigError: that file cannot be written.
    """
    log_to_console()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        logging.getLogger("roll").addHandler(FileLog(folder / "driver.log"))
    except OSError as error:
        problem = Problem("logging_dir", f"{folder} cannot be written: {error.strerror or error}")
        raise ConfigError([problem], file or "") from None


@contextlib.contextmanager
def handle_interrupt(handler: Callable[[], None], *signals: signal.Signals) -> Iterator[None]:
    """Calls `handler` at Ctrl-C, or at each of `signals`, while the block runs.

    The handler runs between two instructions of the main thread, in whatever module that is. A signal that the process
    was started to ignore stays ignored, as a shell wants it in the background. Without effect outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in signals or (signal.SIGINT,)}
    before = {number: old for number, old in handlers.items() if old is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, lambda *_: handler())
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def end_now(message: str = "interrupted") -> NoReturn:
    """Ends this process and all below it at once, in the middle of whatever they do."""
    say(message)
    try:
        children = psutil.Process().children(recursive=True)
    except psutil.Error:
        children = []
    for child in children:
        with contextlib.suppress(psutil.Error):
            child.kill()
    with contextlib.suppress(psutil.Error):
        psutil.wait_procs(children, timeout=END_TIMEOUT_S)
    os._exit(EXIT_INTERRUPTED)


def say(message: str) -> None:
    """Writes a line to standard error from a signal handler, where `print` may be in progress already."""
    restore_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""
    with contextlib.suppress(OSError):
        os.write(2, f"{restore_cursor}\n{message}\n".encode())

"""The command line: `roll run`, `roll plan`, those of `roll/tools` and `roll/lab`, the launchers of `examples/`."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from roll import __version__
from roll.base.errors import ConfigError, RunError
from roll.base.redaction import redact
from roll.base.terminal import (
    EXIT_INTERRUPTED,
    TERMINATION,
    configure_logging,
    end_now,
    handle_interrupt,
    log_to_console,
)
from roll.configs.user_code import search_modules_beside
from roll.distributed.processes import gc_paused

if TYPE_CHECKING:
    from roll.pipeline.health import HealthFile

logger = logging.getLogger(__name__)

EXIT_CONFIG_ERROR = 2
"""Exit code for a configuration or option that cannot be used; argparse exits with the same code."""

HELP = {
    "run": "train as configured in a YAML file",
    "plan": "show what stops a configuration, its devices, batch sizes and memory, without starting it",
    "convert": "print a file of ROLL or verl with the keys of this project, with a comment on every change",
    "compare": "recompute advantages, loss and gradient of a batch that verl, slime or TRL has written",
    "doctor": "measure every device and link of a configuration, and name the nodes that are slow",
    "rehearse": "run a configuration in miniature on this CPU, and report what was exercised",
    "simulate": "predict step time, idle time and staleness, and search for a better device split and ratio",
    "ablate": "run a grid of policy losses, ratios and seeds; run it again to resume unfinished runs",
    "show": "print the samples of a training step, those with the most gradient first",
    "plot": "draw the curves of a run, or of several over each other, as a picture",
    "report": "write the page of one or several runs: findings, curves, time, samples, configuration",
    "watch": "serve the page of a run on this machine, up to date while the run goes on",
    "explain": "say which samples and tokens moved the weights in a step",
    "serve": "serve Tinker's API: training and sampling for programs with its client",
}
"""What each command does, for --help."""

TOOLS = {
    "plan": "roll.plan.command",
    "convert": "roll.tools.convert",
    "compare": "roll.tools.compare.command",
    "doctor": "roll.tools.doctor.command",
    "rehearse": "roll.lab.rehearse.command",
    "simulate": "roll.lab.simulate.command",
    "ablate": "roll.tools.ablate.command",
    "show": "roll.tools.show.command",
    "plot": "roll.tools.plot",
    "report": "roll.report.command",
    "watch": "roll.report.watch",
    "explain": "roll.report.explain_command",
    "serve": "roll.serve.command",
}
"""Command -> the module that defines it, with `run(arguments)` and, but for convert, `add_options(parser)`."""

HANDLE_INTERRUPT = ("run", "ablate", "watch", "serve")
"""Commands with something to end in order at Ctrl-C; it ends the others at once."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    argv = (sys.argv[1:] if argv is None else argv) or ["--help"]
    with handle_interrupt(end_now):
        arguments = _parse(_parser(argv), argv)
        if hasattr(arguments, "config"):
            search_modules_beside(arguments.config)
        if arguments.command not in HANDLE_INTERRUPT:
            return _exit_code(lambda: _tool(arguments.command).run(arguments))
    if arguments.command == "run":
        return _exit_code(lambda: run(arguments.config, arguments.overrides))
    return _exit_code(lambda: _tool(arguments.command).run(arguments))


def launch(pipeline: str | None, argv: Sequence[str] | None = None, defaults: Sequence[str] = ()) -> int:
    """Runs a `start_<pipeline>_pipeline.py` script: finds the configuration, then does the same as `roll run`.

    The file must have `pipeline`, unless it is None; `defaults` are overrides before those of the command line.
    """
    parser = argparse.ArgumentParser(description=f"Run {f'the {pipeline}' if pipeline else 'a'} pipeline.")
    parser.add_argument("--config_path", required=True, help="folder, relative to the current one or to examples/")
    parser.add_argument("--config_name", required=True, help="file in that folder, with or without .yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override values of the file")
    arguments = _parse(parser, argv)
    file = find_config(arguments.config_path, arguments.config_name)
    search_modules_beside(file)
    return _exit_code(lambda: run(file, [*defaults, *arguments.overrides], pipeline))


def find_config(folder: str, name: str) -> Path:
    """The file that a launcher's two flags name: below the current folder, else below examples/.

    Returns the first of these paths if neither is a file, so that the error names it.
    """
    file = name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"
    examples = Path(__file__).resolve().parents[1] / "examples"
    candidates = [Path(folder) / file, examples / folder / file]
    return next((path for path in candidates if os.path.isfile(path)), candidates[0])


def run(config: str | Path, overrides: Sequence[str], pipeline: str | None = None) -> int:
    """Checks the configuration and this machine, then trains; returns the exit code of the run.

    Until the run itself handles signals there is nothing to keep, and an exception in the middle of an import might be
    swallowed there: so a signal ends the process at once.
    """
    report: HealthFile | None = None

    def interrupt() -> None:
        if report is not None:
            report.end("interrupted")
        end_now("interrupted before anything was started")

    with handle_interrupt(interrupt), handle_interrupt(interrupt, *TERMINATION), contextlib.ExitStack() as held:
        log_to_console()
        logger.info("reading %s", config)
        from roll.envs.registry import try_environment
        from roll.loading.load import load_config
        from roll.pipeline.checkpoint import finished_run
        from roll.pipeline.health import HealthFile, lock_folders
        from roll.plan.hardware import prepare_run
        from roll.plan.inputs import fetch_inputs, look_up

        loaded = load_config(config, overrides, pipeline, try_environment)
        problems = look_up(loaded).problems
        if problems:
            raise ConfigError(problems, loaded.source.file)
        warnings = prepare_run(loaded)
        held.enter_context(lock_folders(loaded))
        configure_logging(Path(str(loaded.logging_dir)), loaded.source.file)
        if (finished := finished_run(loaded)) is not None:
            logger.info("%s", finished)
            return 0
        report = HealthFile(loaded)
        report.begin("importing")
        logger.info(
            "%s: %s on %s, %d steps, output in %s",
            loaded.exp_name, loaded.pipeline, loaded.platform, loaded.max_steps, loaded.output_dir,
        )  # fmt: skip
        for warning in warnings:
            logger.warning("%s", warning)
        try:
            fetch_inputs(loaded)
            logger.info("trying data, tokenizers, rewards and environments")
            from roll.plan.check_inputs import check_inputs

            inputs = check_inputs(loaded)
            if inputs.errors or inputs.missing:
                raise ConfigError(inputs.errors + inputs.missing)
            for remark in inputs.warnings:
                logger.warning("%s", remark)
        except (ConfigError, RunError):
            report.end("failed")
            raise
        logger.info("importing torch, transformers and Ray")
        with gc_paused():
            from roll.pipeline.launch import run_pipeline

        given = [text for text in overrides if not text.startswith("resume_from_checkpoint=")]
        return run_pipeline(loaded, shlex.join(["roll", "run", str(config), *given]))


def _tool(name: str) -> ModuleType:
    return importlib.import_module(TOOLS[name])


def _exit_code(command: Callable[[], int]) -> int:
    """Exit code of a command; a configuration error, a failed download and Ctrl-C print no traceback."""
    try:
        return command()
    except (ConfigError, RunError) as error:
        print(redact(str(error)), file=sys.stderr)
        return EXIT_CONFIG_ERROR if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses arguments; `key=value` is accepted after flags too, which argparse alone would reject."""
    arguments, rest = parser.parse_known_args(argv)
    overrides = getattr(arguments, "overrides", None)
    unknown = [text for text in rest if overrides is None or text.startswith("-") or "=" not in text]
    if unknown:
        hint = "" if overrides is None else f"; {_override_hint(argv)}"
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if overrides is not None:
        arguments.overrides = [*overrides, *rest]
    return arguments


def _override_hint(argv: Sequence[str] | None) -> str:
    from roll.loading.load import FOREIGN

    words = sys.argv[1:] if argv is None else argv
    flags = {"--json", "--config_path", "--config_name"}
    written = []
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--") and word not in flags:
            key, equals, value = word.lstrip("-").partition("=")
            value = value if equals else "true" if following.startswith("-") else following
            key = key.replace("-", "_")
            ours = FOREIGN.ours.get(key, (key,))
            written.append(f"{(ours[0] if len(ours) == 1 else key).replace('<role>', 'actor_train')}={value}")
    example = " ".join(written) or "max_steps=100"
    return f"keys of the configuration are written as key=value, without dashes: {example}"


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of all commands; only the tool that `argv` names is imported, so that the others start fast."""
    parser = argparse.ArgumentParser(prog="roll", description="Post-training of language models.")
    parser.add_argument("--version", action="version", version=f"roll {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in HELP.items():
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name not in ("show", "plot", "report", "watch", "explain"):
            command.add_argument("config", help="YAML file")
            help_text = "override values of the file"
            command.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=help_text)
        if name in TOOLS and name in argv and name != "convert":
            _tool(name).add_options(command)
    return parser


if __name__ == "__main__":
    sys.exit(main())

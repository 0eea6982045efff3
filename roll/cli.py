"""The command line: `roll run`, `roll plan`, the tools of `roll/tools`, and the launchers of `examples/`."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from roll.configs.errors import ConfigError
from roll.configs.user_code import search_modules_beside

if TYPE_CHECKING:
    from roll.configs.pipeline import BaseConfig

EXIT_CONFIG_ERROR = 2
"""Exit code for a configuration or option that cannot be used; argparse exits with the same code."""

HELP = {
    "run": "train as configured in a YAML file",
    "plan": "show devices, batch sizes and memory of a configuration without starting it",
    "simulate": "predict step time, idle time and staleness, and search for a better device split and ratio",
    "ablate": "run a grid of policy losses, ratios and seeds; run it again to resume unfinished runs",
    "show": "print the samples of a training step",
}
"""What each command does, for --help."""

TOOLS = ("simulate", "ablate", "show")
"""Commands defined in `roll/tools/<name>/command.py`, as `add_options(parser)` and `run(arguments)`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parse(_parser(argv), argv)
    search_modules_beside(getattr(arguments, "config", ""))
    if arguments.command == "plan":
        return _exit_code(lambda: plan(arguments.config, arguments.overrides, as_json=arguments.json))
    if arguments.command == "run":
        return _exit_code(lambda: run(arguments.config, arguments.overrides))
    return _exit_code(lambda: _tool(arguments.command).run(arguments))


def launch(pipeline: str, argv: Sequence[str] | None = None) -> int:
    """Runs a `start_<pipeline>_pipeline.py` script: finds the configuration, then does the same as `roll run`."""
    parser = argparse.ArgumentParser(description=f"Run the {pipeline} pipeline.")
    parser.add_argument("--config_path", required=True, help="folder, relative to the current one or to examples/")
    parser.add_argument("--config_name", required=True, help="file in that folder, with or without .yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override values of the file")
    arguments = _parse(parser, argv)
    file = find_config(arguments.config_path, arguments.config_name)
    search_modules_beside(file)
    return _exit_code(lambda: run(file, arguments.overrides, pipeline))


def find_config(folder: str, name: str) -> Path:
    """The file that a launcher's two flags name: below the current folder, else below examples/.

    Returns the first of these paths if neither is a file, so that the error names it.
    """
    file = name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"
    examples = Path(__file__).resolve().parents[1] / "examples"
    candidates = [Path(folder) / file, examples / folder / file]
    return next((path for path in candidates if os.path.isfile(path)), candidates[0])


def plan(config: str | Path, overrides: Sequence[str], as_json: bool = False) -> int:
    """Prints the plan of a run without starting it."""
    from roll.configs.hub.inputs import look_up
    from roll.configs.load import load_config
    from roll.configs.plan import make_plan

    loaded = load_config(config, overrides)
    made = make_plan(loaded, hub=look_up(loaded, _say))
    made.warnings.extend(check_user_inputs(loaded, may_miss=True))
    if as_json:
        print(json.dumps(made.as_dict(), indent=2))
        return 0
    from roll.configs.plan import print_plan

    print_plan(made)
    return 0


def run(config: str | Path, overrides: Sequence[str], pipeline: str | None = None) -> int:
    """Checks the configuration and this machine, then trains; returns the exit code of the run."""
    from roll.configs.hardware import prepare_run
    from roll.configs.hub.inputs import look_up
    from roll.configs.load import load_config

    loaded = load_config(config, overrides, pipeline)
    problems = look_up(loaded, _say).problems
    if problems:
        raise ConfigError(problems, loaded.source.file)
    for warning in prepare_run(loaded) + check_user_inputs(loaded, may_miss=False):
        print(f"warning: {warning}", file=sys.stderr)
    from roll.pipeline.run import run_pipeline

    return run_pipeline(loaded)


def check_user_inputs(config: BaseConfig, may_miss: bool) -> list[str]:
    """Tries data, tokenizer, rewards and environments, and returns warnings.

    Raises:
        ConfigError: one of them fails, or is not on this machine unless it `may_miss`.
    """
    from roll.pipeline.check_inputs import check_inputs

    report = check_inputs(config)
    problems = report.errors + ([] if may_miss else report.missing)
    if problems:
        raise ConfigError(problems)
    return [*map(str, report.warnings), *(f"{problem} (this stops a run, not a plan)" for problem in report.missing)]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _tool(name: str) -> ModuleType:
    return importlib.import_module(f"roll.tools.{name}.command")


def _exit_code(command: Callable[[], int]) -> int:
    """Exit code of a command; a configuration error is printed without a traceback."""
    try:
        return command()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_CONFIG_ERROR


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses arguments; `key=value` is accepted after flags too, which argparse alone would reject."""
    arguments, rest = parser.parse_known_args(argv)
    overrides = getattr(arguments, "overrides", None)
    unknown = [text for text in rest if overrides is None or text.startswith("-") or "=" not in text]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if overrides is not None:
        arguments.overrides = [*overrides, *rest]
    return arguments


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of all commands; only the tool that `argv` names is imported, so that the others start fast."""
    parser = argparse.ArgumentParser(prog="roll", description="Post-training of language models.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in HELP.items():
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name != "show":
            command.add_argument("config", help="YAML file")
            command.add_argument("overrides", nargs="*", metavar="key=value", help="override values of the file")
        if name == "plan":
            command.add_argument("--json", action="store_true", help="print JSON")
        elif name in TOOLS and name in argv:
            _tool(name).add_options(command)
    return parser


if __name__ == "__main__":
    sys.exit(main())

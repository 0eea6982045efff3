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

from roll.configs.errors import ConfigError

EXIT_CONFIG_ERROR = 2
"""Exit code for a configuration or option that cannot be used; argparse exits with the same code."""

HELP = {
    "run": "train as configured in a YAML file",
    "plan": "show devices, batch sizes and memory of a configuration without starting it",
    "rehearse": "run a configuration in miniature on this CPU, and report what was exercised",
    "simulate": "predict step time, idle time and staleness, and search for a better device split and ratio",
    "ablate": "run a grid of policy losses, ratios and seeds; run it again to resume unfinished runs",
    "show": "print the samples of a training step",
}
"""What each command does, for --help."""

TOOLS = ("rehearse", "simulate", "ablate", "show")
"""Commands defined in `roll/tools/<name>/command.py`, as `add_options(parser)` and `run(arguments)`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    _import_from_current_folder()
    arguments = _parse(_parser(argv), argv)
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
    _import_from_current_folder()
    file = find_config(arguments.config_path, arguments.config_name)
    return _exit_code(lambda: run(file, arguments.overrides, pipeline))


def _import_from_current_folder() -> None:
    """Lets a configuration name modules of the current folder, which Python does not search for the `roll` script.

    The processes of a run search where this one does.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


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
    from roll.configs.load import load_config
    from roll.configs.plan import make_plan

    made = make_plan(load_config(config, overrides))
    if as_json:
        print(json.dumps(made.as_dict(), indent=2))
        return 0
    from roll.configs.plan import print_plan

    print_plan(made)
    return 0


def run(config: str | Path, overrides: Sequence[str], pipeline: str | None = None) -> int:
    """Checks the configuration and this machine, then trains; returns the exit code of the run."""
    from roll.configs.hardware import prepare_run
    from roll.configs.load import load_config

    loaded = load_config(config, overrides, pipeline)
    for warning in prepare_run(loaded):
        print(f"warning: {warning}", file=sys.stderr)
    from roll.pipeline.run import run_pipeline

    return run_pipeline(loaded)


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

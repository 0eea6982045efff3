"""The command line: `roll run | plan | simulate | ablate CONFIG`, `roll show RUN_DIR`, the launchers of `examples/`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from roll import cli_ablate, cli_show, cli_simulate
from roll.configs.errors import ConfigError

BAD_CONFIGURATION = 2
"""Exit code of a configuration that cannot be planned or run, as argparse uses for bad arguments."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    arguments = _parse(_parser(), argv)
    try:
        if arguments.command == "plan":
            return plan(arguments.config, arguments.overrides, as_json=arguments.json)
        if arguments.command == "simulate":
            return cli_simulate.simulate(arguments)
        if arguments.command == "ablate":
            return cli_ablate.ablate(arguments)
        if arguments.command == "show":
            return cli_show.show(arguments)
        return run(arguments.config, arguments.overrides)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return BAD_CONFIGURATION


def launch(pipeline: str, argv: Sequence[str] | None = None) -> int:
    """What the `start_<pipeline>_pipeline.py` scripts do: find the file, then the same as `roll run`."""
    parser = argparse.ArgumentParser(description=f"Runs the {pipeline} pipeline.")
    parser.add_argument("--config_path", required=True, help="folder, relative to here or to examples/")
    parser.add_argument("--config_name", required=True, help="file in it, with or without .yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace those of the file")
    arguments = _parse(parser, argv)
    try:
        return run(find_config(arguments.config_path, arguments.config_name), arguments.overrides, pipeline)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return BAD_CONFIGURATION


def find_config(folder: str, name: str) -> Path:
    """The file that a launcher's two flags name; where there is none, the path looked for first."""
    file = name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"
    examples = Path(__file__).resolve().parents[1] / "examples"
    candidates = [Path(folder) / file, examples / folder / file]
    return next((path for path in candidates if os.path.isfile(path)), candidates[0])


def plan(config: str | Path, overrides: Sequence[str], as_json: bool = False) -> int:
    """Prints the plan of a run without starting anything."""
    from roll.configs.load import load_config
    from roll.configs.plan import make_plan

    made = make_plan(load_config(config, overrides))
    if as_json:
        print(json.dumps(made.as_dict(), indent=2))
        return 0
    from roll.configs.plan_text import print_plan

    print_plan(made)
    return 0


def run(config: str | Path, overrides: Sequence[str], pipeline: str | None = None) -> int:
    """Checks everything that can be checked, then trains; returns the run's exit code."""
    from roll.configs.hardware import prepare_run
    from roll.configs.load import load_config

    loaded = load_config(config, overrides, pipeline)
    for warning in prepare_run(loaded):
        print(f"warning: {warning}", file=sys.stderr)
    from roll.pipeline.run import run_pipeline

    return run_pipeline(loaded)


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, with `key=value` also after flags, where argparse by itself knows none."""
    arguments, rest = parser.parse_known_args(argv)
    overrides = getattr(arguments, "overrides", None)
    unknown = [text for text in rest if overrides is None or text.startswith("-") or "=" not in text]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if overrides is not None:
        arguments.overrides = [*overrides, *rest]
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="roll", description="Post-training of language models.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("run", "train as a YAML file says"),
        ("plan", "show what a YAML file means; starts nothing"),
        ("simulate", "predict step times, idle shares and staleness, and look for the best split and ratio"),
        ("ablate", "run a grid of policy losses, ratios and seeds; the same command again runs what is missing"),
    ):
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        command.add_argument("config", help="YAML file")
        command.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace those of the file")
        if name == "plan":
            command.add_argument("--json", action="store_true", help="print JSON")
        elif name == "simulate":
            cli_simulate.add_options(command)
        elif name == "ablate":
            cli_ablate.add_options(command)
    text = "show the samples of a step: trajectories turn by turn, or responses"
    cli_show.add_options(commands.add_parser("show", help=text, description=text[0].upper() + text[1:] + "."))
    return parser


if __name__ == "__main__":
    sys.exit(main())

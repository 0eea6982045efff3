"""The command line: `roll run CONFIG`, `roll plan CONFIG`, `roll ablate CONFIG`, and the launchers of `examples/`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from roll.configs.errors import ConfigError

BAD_CONFIGURATION = 2
"""Exit code of a configuration that cannot be planned or run, as argparse uses for bad arguments."""

COMMANDS = {
    "run": "train as a YAML file says",
    "plan": "show what a YAML file means; starts nothing",
    "ablate": "run a grid of policy losses, ratios and seeds; the same command goes on where it was cut off",
}
"""Commands and what they do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    arguments = _parse(argv)
    try:
        if arguments.command == "plan":
            return plan(arguments.config, arguments.overrides, as_json=arguments.json)
        if arguments.command == "ablate":
            return ablate(arguments)
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
    arguments = parser.parse_args(argv)
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
    return next((path for path in candidates if path.is_file()), candidates[0])


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
    from roll.configs.load import load_config
    from roll.configs.run_checks import prepare_run

    loaded = load_config(config, overrides, pipeline)
    for warning in prepare_run(loaded):
        print(f"warning: {warning}", file=sys.stderr)
    from roll.pipeline.run import run_pipeline

    return run_pipeline(loaded)


def ablate(arguments: argparse.Namespace) -> int:
    """Runs a grid of policy losses, ratios and seeds; returns the exit code."""
    from roll.ablation.ablate import Ablation
    from roll.ablation.grid import cells

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    grid = cells(arguments.variants, arguments.ratios, arguments.seeds)
    return Ablation(arguments.config, grid, arguments.out, arguments.overrides, arguments.target).run()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, with `key=value` also after flags, where argparse by itself knows none."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    flags = [text for text in rest if text.startswith("-") or "=" not in text]
    if flags:
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """A parser of `a,b,c`."""

    def parse(text: str) -> list[Any]:
        try:
            return [kind(item.strip()) for item in text.split(",") if item.strip()] or [kind(text)]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 1,2") from None

    return parse


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="roll", description="Post-training of language models.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        command.add_argument("config", help="YAML file")
        command.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace those of the file")
        if name == "plan":
            command.add_argument("--json", action="store_true", help="print JSON")
        if name == "ablate":
            _add_grid(command)
    return parser


def _add_grid(command: argparse.ArgumentParser) -> None:
    command.add_argument("--variants", type=_list_of(str), required=True, help="values of actor_train.pg_variant: a,b")
    command.add_argument("--ratios", type=_list_of(float), required=True, help="values of async_generation_ratio: 0,2")
    command.add_argument("--seeds", type=_list_of(int), required=True, help="seeds: 1,2")
    command.add_argument("--out", type=Path, default=Path("output/ablation"), help="folder (default: output/ablation)")
    command.add_argument("--target", type=float, help="validation score whose first step is reported")

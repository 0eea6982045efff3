"""`roll plan`: prints what a run would do, and what would stop it, without starting anything."""

from __future__ import annotations

import argparse
import json
import sys

from roll.base.errors import ConfigError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `roll plan`."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    help_text = "memory of a device, to compare with; exit code 1 if the run needs more"
    parser.add_argument("--device-memory", type=float, metavar="GIB", help=help_text)
    help_text = "the run is for another machine: what is missing here is a remark, not exit code 1"
    parser.add_argument("--elsewhere", action="store_true", help=help_text)
    parser.epilog = "Example: roll plan my_run.yaml rollout_batch_size=64 --device-memory 80"


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan; exit code 1 if the run cannot start here and is not for `--elsewhere`, or needs more memory."""
    from roll.envs.registry import try_environment
    from roll.loading.load import load_config

    loaded = load_config(arguments.config, arguments.overrides, try_environment=try_environment)
    from roll.plan.check_inputs import check_inputs
    from roll.plan.inputs import look_up
    from roll.plan.plan import make_plan, what_stops
    from roll.plan.show import print_plan

    found = look_up(loaded, lambda line: print(line, file=sys.stderr, flush=True))
    inputs = check_inputs(loaded)  # before the plan resets environments in this process
    if inputs.errors:
        raise ConfigError(inputs.errors)
    made = make_plan(loaded, hub=found)
    made.stops.extend(map(str, inputs.missing))
    made.warnings.extend(map(str, inputs.warnings))
    if arguments.json:
        print(json.dumps(made.as_dict(), indent=2))
    else:
        print_plan(made, device_gib=arguments.device_memory, elsewhere=arguments.elsewhere)
    return 1 if what_stops(made, arguments.device_memory, arguments.elsewhere) else 0

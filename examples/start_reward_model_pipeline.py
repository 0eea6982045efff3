"""Runs the reward_model pipeline: `--config_path DIR --config_name NAME [key=value ...]`, below here or examples/."""

import sys

from roll.cli import launch

if __name__ == "__main__":
    sys.exit(launch("reward_model"))

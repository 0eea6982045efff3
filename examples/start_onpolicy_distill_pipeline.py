"""Learns from a teacher alone, in rlvr or agentic: `--config_path DIR --config_name NAME [key=value ...]`."""

import sys

from roll.cli import launch

if __name__ == "__main__":
    sys.exit(launch(None, defaults=["is_pure_opd=true"]))

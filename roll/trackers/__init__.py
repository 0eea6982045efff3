"""Output of metrics: metrics.jsonl and run.json for every run, other trackers and the console if configured.

`metrics` describes every metric; `group` passes each step to all trackers; `files` writes metrics.jsonl and run.json;
`curves` plots a run. May import all folders above it in the import order (tests/test_architecture.py), not pipelines.
"""

from roll.trackers.base import Tracker
from roll.trackers.files import write_run_json
from roll.trackers.group import TrackerGroup, make_trackers

__all__ = ["Tracker", "TrackerGroup", "make_trackers", "write_run_json"]

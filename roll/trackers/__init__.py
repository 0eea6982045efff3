"""Metrics out: metrics.jsonl and run.json always, TensorBoard and a live console where asked for, and a picture.

`metrics` names and explains every number of a run; `group` hands each step to every tracker; `run_json` and `curves`
write the record and the picture of a run. May import anything above it in roll/, never a pipeline.
"""

from roll.trackers.base import Tracker
from roll.trackers.files import write_run_json
from roll.trackers.group import TrackerGroup, make_trackers

__all__ = ["Tracker", "TrackerGroup", "make_trackers", "write_run_json"]

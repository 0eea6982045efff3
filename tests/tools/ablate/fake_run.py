"""A fake `roll run` that writes the files of a run without training.

The environment variable FAIL names a variant that exits with an error, HANG one that never ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from roll.loading.load import load_config
from roll.plan.hardware import prepare_run
from roll.plan.inputs import fetch_inputs
from roll.trackers.files import JsonlTracker, write_run_json

config = load_config(sys.argv[1], sys.argv[2:])
prepare_run(config)
fetch_inputs(config)
folder = Path(config.output_dir)
metrics = JsonlTracker(folder / "metrics.jsonl")
write_run_json(folder, config, None, {})
with (folder / "starts.txt").open("a") as file:
    file.write(f"resume={config.resume_from_checkpoint}\n")
metrics.log(0, {"val/score": 0.1, "time/step": 1.0})
if config.actor_train.pg_variant == os.environ.get("FAIL"):
    checkpoint = folder / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "COMPLETE").touch()
    sys.exit("the engine ran out of memory")
if config.actor_train.pg_variant == os.environ.get("HANG"):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (folder / "child.pid").write_text(str(child.pid))
    time.sleep(600)
metrics.log(1, {"val/score": 0.2 + 0.1 * config.seed, "time/step": 2.0, "correction/ess": 0.9, "staleness/mean": 1.0})
write_run_json(folder, config, None, {}, {"status": "finished"})

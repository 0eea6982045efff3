"""The runs of a rehearsal: one from start to end, and one that resumes from its checkpoint, each with its processes."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roll.configs.trackers import METRICS_FILE
from roll.configs.user_code import is_users_file
from roll.pipeline.checkpoint import FOLDER, CheckpointManager
from roll.tools.ablate.process import read_run_json
from roll.tools.processes import CONSOLE_LOG, run_process, tail
from roll.trackers.files import read_metrics
from roll.trackers.sample_files import dumped_steps, read_samples

OFFLINE = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "SWANLAB_MODE": "offline", "MLFLOW_TRACKING_URI": ""}
"""Environment variables with which no tracker and no library needs a network."""

START = "import sys; sys.path.append(sys.argv.pop(1)); from roll.cli import main; sys.exit(main())"
"""`roll` with one more folder for modules: that of the recipe, whose modules the run needs too."""

FRAME = re.compile(r'File "([^"]+)", line (\d+)(?:, in (\S+))?')
"""A line of a traceback."""

PROGRESS_METRICS = {
    "val/score": "validation score",
    "val/loss": "validation loss",
    "rollout/reward_mean": "reward",
    "actor/loss": "loss",
    "actor/grad_norm": "gradient norm",
    "staleness/max": "staleness",
    "time/step": "seconds",
}
"""Metrics in the progress line of a step."""

Say = Callable[[str], None]
"""Prints one line of progress."""


@dataclass
class RunRecord:
    """What a run left behind: lines of metrics.jsonl, steps with a checkpoint, samples by step, names in its folder."""

    finished: bool
    lines: list[dict[str, float]] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    samples: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    entries: list[str] = field(default_factory=list)

    def values(self, metric: str) -> list[float]:
        return [line[metric] for line in self.lines if line.get(metric) is not None]


def run_twice(config: Path, folder: Path, modules: Path, steps: int, say: Say) -> list[RunRecord]:
    """Runs a rehearsal's configuration, then resumes it at the checkpoint before its last step.

    `folder`, the `output_dir`, is emptied first; modules of the user are found in `modules`. There is one record if the
    first run failed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    log = folder.parent / CONSOLE_LOG
    log.unlink(missing_ok=True)
    command = [sys.executable, "-c", START, str(modules.resolve()), "run", str(config)]
    first = _run(command, folder, log, say)
    if not first.finished or steps - 1 not in first.checkpoints:
        return [first]
    say(f"the run has finished; a new one resumes at step {steps - 1}")
    checkpoint = folder / FOLDER / f"step-{steps - 1:06d}"
    return [first, _run([*command, f'resume_from_checkpoint="{checkpoint}"'], folder, log, say)]


def _run(command: Sequence[str], folder: Path, log: Path, say: Say) -> RunRecord:
    poll = _progress(folder / METRICS_FILE, say)
    code = run_process(command, log, variables=OFFLINE, poll=poll)
    poll()
    summary = (read_run_json(folder) or {}).get("summary") or {}
    return RunRecord(
        code == 0 and summary.get("status") == "finished",
        read_metrics(folder / METRICS_FILE),
        [int(path.name.removeprefix("step-")) for path in CheckpointManager(folder / FOLDER, 0).complete()],
        _samples(folder / "samples"),
        [path.name for path in folder.glob("*")],
    )


def _samples(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Samples by step; several policies have a folder each."""
    found: dict[int, list[dict[str, Any]]] = {}
    for each in [folder, *sorted(path for path in folder.glob("*") if path.is_dir())]:
        for step in dumped_steps(each):
            found.setdefault(step, []).extend(read_samples(each, step))
    return found


def _progress(file: Path, say: Say) -> Callable[[], None]:
    """A function that prints the lines a run has added, without the lines that a resumed run kept."""
    said = read_metrics(file)

    def poll() -> None:
        for line in read_metrics(file):
            if line not in said:
                step = f"step {line['step']:g}" if line["step"] else "before the first step"
                values = [
                    f"{text} {line[key]:.3g}" for key, text in PROGRESS_METRICS.items() if line.get(key) is not None
                ]
                say(f"{step}: {', '.join(values)}")
                said.append(line)

    return poll


def cause_of_failure(log: Path) -> str:
    """Why a run failed: the last place in the user's own code that its output names, then its last lines."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    places = [match for match in FRAME.finditer(text) if is_users_file(match[1])]
    lines = [tail(log), f"(everything it printed: {log})"]
    if places:
        file, line, function = places[-1].groups()
        lines.insert(0, f"your code: {file}:{line}" + (f" in {function}" if function else ""))
    return "\n".join(lines)

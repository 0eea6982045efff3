"""The runs of a rehearsal: one from start to end, and one that resumes from its checkpoint, each with its processes."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from roll.configs.trackers import METRICS_FILE
from roll.configs.user_code import is_users_file
from roll.pipeline.checkpoint import FOLDER, CheckpointManager
from roll.tools.ablate.process import read_run_json
from roll.tools.processes import CONSOLE_LOG, run_process, tail
from roll.trackers.files import dumped_steps, read_metrics, read_samples

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "SWANLAB_MODE": "offline",
    "MLFLOW_TRACKING_URI": "",
}
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
    """What one run left behind.

    Attributes:
        status: in run.json; `not started` without one.
        lines: of metrics.jsonl.
        checkpoints: steps with a complete checkpoint.
        samples: dumped samples by step.
        entries: names in its output folder.
    """

    exit_code: int
    status: str
    seconds: float
    lines: list[dict[str, float]] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    samples: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    entries: list[str] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.exit_code == 0 and self.status == "finished"

    @property
    def all_samples(self) -> Iterator[dict[str, Any]]:
        return chain.from_iterable(self.samples.values())

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
    records = [_run(command, folder, log, say)]
    if not records[0].finished or steps - 1 not in records[0].checkpoints:
        return records
    say(f"the run has finished; a new one resumes at step {steps - 1}")
    checkpoint = folder / FOLDER / f"step-{steps - 1:06d}"
    records.append(_run([*command, f'resume_from_checkpoint="{checkpoint}"'], folder, log, say))
    return records


def _run(command: Sequence[str], folder: Path, log: Path, say: Say) -> RunRecord:
    start, progress = time.monotonic(), _Progress(folder / METRICS_FILE, say)
    code = run_process(command, log, variables=OFFLINE, poll=progress.poll)
    progress.poll()
    record = read_run_json(folder)
    samples = folder / "samples"
    return RunRecord(
        exit_code=code,
        status=((record or {}).get("summary") or {}).get("status", "not started"),
        seconds=time.monotonic() - start,
        lines=read_metrics(folder / METRICS_FILE),
        checkpoints=[int(path.name.removeprefix("step-")) for path in CheckpointManager(folder / FOLDER, 0).complete()],
        samples={step: read_samples(samples, step) for step in dumped_steps(samples)},
        entries=sorted(path.name for path in folder.iterdir()) if folder.is_dir() else [],
    )


class _Progress:
    """Prints the lines that a run adds to its metrics.jsonl.

    A resumed run first replaces the file by one with the lines up to its checkpoint; those are not printed again.
    """

    def __init__(self, file: Path, say: Say) -> None:
        self._file, self._say = file, say
        self._old = file.stat().st_ino if file.exists() else None
        self._next = max((int(line["step"]) for line in read_metrics(file)), default=0)

    def poll(self) -> None:
        """Says the steps that the run has written since the last call."""
        if not self._file.exists() or self._file.stat().st_ino == self._old:
            return
        for line in read_metrics(self._file):
            step = int(line["step"])
            if step < self._next:
                continue
            name = f"step {step}" if step else "before the first step"
            values = [f"{text} {line[key]:.3g}" for key, text in PROGRESS_METRICS.items() if line.get(key) is not None]
            self._say(f"{name}: {', '.join(values)}")
            self._next = step + 1


def cause_of_failure(log: Path) -> str:
    """Why a run failed: the last place in the user's own code that its output names, then its last lines."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    places = [match for match in FRAME.finditer(text) if is_users_file(match[1])]
    lines = [tail(log), f"(everything it printed: {log})"]
    if places:
        file, line, function = places[-1].groups()
        lines.insert(0, f"your code: {file}:{line}" + (f" in {function}" if function else ""))
    return "\n".join(lines)

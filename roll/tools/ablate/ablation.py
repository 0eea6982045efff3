"""Runs the trials of a grid one after the other, and writes the results after each."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from roll.base.terminal import EXIT_INTERRUPTED
from roll.configs.pipeline import RLConfig
from roll.configs.trackers import METRICS_FILE
from roll.pipeline import checkpoint
from roll.plan.inputs import fetch_inputs
from roll.tools.ablate.grid import Trial, check_grid
from roll.tools.ablate.process import lock_folder, read_progress, read_run_json
from roll.tools.ablate.report import Status, TrialResult, markdown_report, plot_curves, summarize_trial
from roll.tools.processes import CONSOLE_LOG, run_process, tail
from roll.trackers.files import read_metrics

CommandBuilder = Callable[[str, Sequence[str]], list[str]]
"""f(YAML file, overrides) -> command line of one run."""


def roll_run_command(config: str, overrides: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "roll", "run", config, *overrides]


@dataclass(frozen=True)
class Ablation:
    """A grid of runs and the folder of their results.

    Trials run in their order, each in a subfolder of `out`; the first step that reaches the score `target` is reported.
    """

    config: str
    trials: Sequence[Trial]
    out: Path
    overrides: Sequence[str] = ()
    target: float | None = None
    build_command: CommandBuilder = roll_run_command

    def run(self) -> int:
        """Checks all trials, then runs the unfinished ones; a failed trial does not stop the others.

        Returns:
            Exit code: 0, 1 if a trial failed, 130 if interrupted.

        Raises:
            ConfigError: a trial cannot start, or another `roll ablate` uses the folder.
            HubError: a model or dataset cannot be fetched.
        """
        configs, warnings = check_grid(self.config, self.trials, self.out, self.overrides)
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr)
        for config in configs.values():
            fetch_inputs(config)  # a run writes names with their commit, which progress is compared with
        with lock_folder(self.out) as lock:
            results = {trial: self._previous_result(trial, configs[trial]) for trial in self.trials}
            try:
                for count, trial in enumerate(self.trials, 1):
                    if results[trial].status != "finished":
                        print(f"[{count}/{len(self.trials)}] {trial.name}", flush=True)
                        results[trial] = self._run_trial(trial, configs[trial], lock)
                        write_results(self, list(results.values()))
                    print(f"[{count}/{len(self.trials)}] {trial.name}: {_outcome(results[trial])}", flush=True)
            except KeyboardInterrupt:
                print("interrupted; run the same command again to resume", file=sys.stderr)
                return EXIT_INTERRUPTED
            finally:
                write_results(self, list(results.values()))
        print(f"results: {self.out}/ablation.md   {self.out}/ablation.json   {self.out}/ablation.png")
        return int(any(result.status != "finished" for result in results.values()))

    def _run_trial(self, trial: Trial, config: RLConfig, lock: int) -> TrialResult:
        folder = self.out / trial.name
        overrides = trial.all_overrides(self.out, self.overrides)
        if read_progress(folder, config) == "resumable":
            overrides.append("resume_from_checkpoint=true")
        else:
            shutil.rmtree(folder / checkpoint.FOLDER, ignore_errors=True)  # those of another configuration
        exit_code = run_process(self.build_command(self.config, overrides), folder / CONSOLE_LOG, pass_fds=[lock])
        if exit_code == 0 and read_progress(folder, config) == "finished":
            return self._result(trial, "finished")
        cause = f"exit code {exit_code}\n{tail(folder / CONSOLE_LOG)}".rstrip()
        return self._result(trial, "failed", cause)

    def _previous_result(self, trial: Trial, config: RLConfig) -> TrialResult:
        """The result of an earlier `roll ablate`; metrics of a run with another configuration are ignored."""
        if read_progress(self.out / trial.name, config) == "finished":
            return self._result(trial, "finished")
        return summarize_trial(trial, "unfinished", ())

    def _result(self, trial: Trial, status: Status, cause: str = "") -> TrialResult:
        started = read_run_json(self.out / trial.name) is not None
        lines = read_metrics(self.out / trial.name / METRICS_FILE) if started else []
        return summarize_trial(trial, status, lines, self.target, cause)


def write_results(ablation: Ablation, results: Sequence[TrialResult]) -> None:
    """Writes `ablation.json`, `ablation.md` and, once a trial has finished, `ablation.png`."""
    ablation.out.mkdir(parents=True, exist_ok=True)
    record = {
        "config": ablation.config,
        "overrides": list(ablation.overrides),
        "target": ablation.target,
        "rows": [dataclasses.asdict(result) for result in results],
    }
    (ablation.out / "ablation.json").write_text(json.dumps(record, indent=2) + "\n")
    (ablation.out / "ablation.md").write_text(markdown_report(results, ablation.config, ablation.target))
    plot_curves(results, ablation.out / "ablation.png")


def _outcome(result: TrialResult) -> str:
    if result.status != "finished":
        return f"failed: {result.cause.splitlines()[-1]}"
    score = "no validation score" if result.final_score is None else f"val/score {result.final_score:.3f}"
    return f"{score}, {result.wall_s or 0:.0f} s"

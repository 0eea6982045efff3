"""Runs a grid, one run after the other, and writes what came of it after each."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from roll.ablation.grid import Cell, check_grid
from roll.ablation.picture import draw_ablation
from roll.ablation.process import held, last_lines, run_process
from roll.ablation.record import forget, progress, read_record
from roll.ablation.rows import Row, Status, make_row
from roll.ablation.table import markdown
from roll.configs.pipeline import RLConfig
from roll.trackers.files import METRICS_FILE, read_metrics

CONSOLE = "console.log"
"""Everything a run prints, in its folder."""

Command = Callable[[str, Sequence[str]], list[str]]
"""From the file and the overrides of a run to the command that runs it."""


def roll_run(config: str, overrides: Sequence[str]) -> list[str]:
    """`roll run` of the same installation."""
    return [sys.executable, "-m", "roll", "run", config, *overrides]


@dataclass(frozen=True)
class Ablation:
    """A grid to run.

    Attributes:
        config: YAML file of every run.
        cells: the runs, in order.
        out: folder of the results, and of each run below it.
        given: `key=value` of every run.
        target: validation score whose first step is reported.
        command: what runs one of them.
    """

    config: str
    cells: Sequence[Cell]
    out: Path
    given: Sequence[str] = ()
    target: float | None = None
    command: Command = roll_run

    def run(self) -> int:
        """Checks all runs, then runs those that are not done; a run that fails does not stop the others.

        Returns:
            The exit code: 0, 1 when a run failed, 130 when interrupted.

        Raises:
            ConfigError: a run of the grid could not start, or another grid is at work in the folder.
        """
        configs, warnings = check_grid(self.config, self.cells, self.out, self.given)
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr)
        with held(self.out) as lock:
            rows = {cell: self._found(cell, configs[cell]) for cell in self.cells}
            try:
                for number, cell in enumerate(self.cells, 1):
                    if rows[cell].status != "finished":
                        print(f"[{number}/{len(self.cells)}] {cell.name}", flush=True)
                        rows[cell] = self._run(cell, configs[cell], lock)
                        write_results(self, list(rows.values()))
                    print(f"[{number}/{len(self.cells)}] {cell.name}: {_told(rows[cell])}", flush=True)
            except KeyboardInterrupt:
                print("interrupted; the same command goes on", file=sys.stderr)
                return 130
            finally:
                write_results(self, list(rows.values()))
        print(f"{self.out}/ablation.md   {self.out}/ablation.json   {self.out}/ablation.png")
        return int(any(row.status != "finished" for row in rows.values()))

    def _run(self, cell: Cell, config: RLConfig, lock: int) -> Row:
        folder = self.out / cell.name
        overrides = cell.overrides(self.out, self.given)
        if progress(folder, config) == "resumable":
            overrides.append("resume_from_checkpoint=true")
        else:
            forget(folder)
        code = run_process(self.command(self.config, overrides), folder / CONSOLE, inherit=[lock])
        if code == 0 and progress(folder, config) == "finished":
            return self._row(cell, "finished")
        cause = f"exit code {code}\n{last_lines(folder / CONSOLE)}".rstrip()
        return self._row(cell, "failed", cause)

    def _found(self, cell: Cell, config: RLConfig) -> Row:
        """The row of what is there before anything runs; lines of another configuration are not read."""
        if progress(self.out / cell.name, config) == "finished":
            return self._row(cell, "finished")
        return make_row(cell, "open", ())

    def _row(self, cell: Cell, status: Status, cause: str = "") -> Row:
        started = read_record(self.out / cell.name) is not None
        lines = read_metrics(self.out / cell.name / METRICS_FILE) if started else []
        return make_row(cell, status, lines, self.target, cause)


def write_results(ablation: Ablation, rows: Sequence[Row]) -> None:
    """`ablation.json`, `ablation.md`, and `ablation.png` once a run has finished."""
    ablation.out.mkdir(parents=True, exist_ok=True)
    record = {
        "config": ablation.config,
        "overrides": list(ablation.given),
        "target": ablation.target,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    (ablation.out / "ablation.json").write_text(json.dumps(record, indent=2) + "\n")
    (ablation.out / "ablation.md").write_text(markdown(rows, ablation.config, ablation.target))
    draw_ablation(rows, ablation.out / "ablation.png")


def _told(row: Row) -> str:
    if row.status != "finished":
        return f"failed: {row.cause.splitlines()[-1]}"
    score = "no validation score" if row.final_score is None else f"val/score {row.final_score:.3f}"
    return f"{score}, {row.wall_s or 0:.0f} s"

"""What the benchmark of faults counts as a problem."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks import faults
from benchmarks.faults import GROUPS, STEPS, draw, history, play
from tests.integration.faults import workers_of


def learned() -> dict[int, set[int]]:
    """A run that learned from every prompt once, in order."""
    return {step: set(range((step - 1) * GROUPS, step * GROUPS)) for step in range(1, STEPS + 1)}


def test_a_round_follows_from_its_seed_and_all_processes_are_stopped_in_some() -> None:
    assert [draw(random.Random(seed)) for seed in range(20)] == [draw(random.Random(seed)) for seed in range(20)]
    drawn = {(each.fault, each.how) for each in (draw(random.Random(seed)) for seed in range(400))}
    assert drawn == {(fault, "kill") for fault in faults.FAULTS} | {(fault, "stop") for fault in faults.STOPPED}
    assert {*faults.FAULTS} - {*faults.STOPPED} == {faults.DRIVER, faults.CHECKPOINT}, "the driver may be stopped"


def test_the_watchdog_of_an_environment_worker_is_not_one_of_the_workers() -> None:
    """It is a fork of the worker, with the same command line."""
    code = "import os, time; child = os.fork(); print(child, flush=True) if child else None; time.sleep(600)"
    worker = subprocess.Popen([sys.executable, "-c", code, "roll.usercode.server"], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    watchdog = int(worker.stdout.readline())
    try:
        assert [process.pid for process in workers_of(psutil.Process())] == [worker.pid]
    finally:
        for number in (watchdog, worker.pid):
            os.kill(number, signal.SIGKILL)
        worker.communicate()


def test_every_prompt_learned_from_once_is_no_problem() -> None:
    assert history(learned(), STEPS * GROUPS, 0) == []
    later = {step: {number + 1 for number in numbers} for step, numbers in learned().items()}
    assert history(later, STEPS * GROUPS + 3, 3) == [], "the first was dropped, and two are in flight"


def test_a_prompt_that_is_learned_from_twice_or_lost_is_a_problem() -> None:
    twice = learned() | {3: {8, 9, 10, 0}}
    assert history(twice, STEPS * GROUPS, 0) == [
        "prompt 0 was learned from in steps [1, 3]",
        "prompts [11] were not learned from, and 0 were dropped or remain",
    ]


@pytest.mark.parametrize("code", [0, 1])
def test_a_round_whose_fault_did_not_happen_does_not_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A run that ends before the step of its fault."""
    monkeypatch.setattr(faults.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    monkeypatch.setattr(faults, "still_running", lambda folder, session, within_s: [])
    monkeypatch.setattr(
        faults, "start", lambda *_: subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"], text=True)
    )
    (tmp_path / "output.txt").touch()
    for number in range(3):
        assert play(number, tmp_path / "model", seed=5).problems[0].startswith("the fault did not happen: the run had")

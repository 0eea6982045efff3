"""A run starts again after a process of it died: from its newest checkpoint, and not for ever."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from roll.configs.errors import RunError
from roll.configs.pipeline import BaseConfig, SFTConfig
from roll.distributed.events import EVENTS_FILE, EventLog
from roll.distributed.remote_errors import PROCESS_DIED, TIMEOUT, ClusterError
from roll.pipeline import run as module
from roll.pipeline.checkpoint import CheckpointError, checkpoints_of
from roll.pipeline.run import RunningLoop, RunSummary
from roll.pipeline.session import Session


class Runs:
    """Raises what `errors` has, run by run, and then ends."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.resumed = list(errors), list[bool | str]()
        self.checkpoint_before: int | None = None
        self.interrupted_in: int | None = None
        self.fails_before_training = 0

    async def __call__(
        self, config: BaseConfig, session: Session, running: RunningLoop, summary: RunSummary, start: float
    ) -> None:
        summary.seconds = time.perf_counter() - start
        self.resumed.append(config.resume_from_checkpoint)
        session.resumed = session.resumed or len(self.resumed) > self.fails_before_training
        if len(self.resumed) == self.interrupted_in:
            running.stop(asyncio.create_task(asyncio.sleep(0)))
        if len(self.resumed) == self.checkpoint_before:
            await checkpoints_of(config).write(1, lambda folder: _write(folder))
            await checkpoints_of(config).complete_step(1)
        if self.errors:
            raise self.errors.pop(0)
        summary.status = "finished"


class Pausing:
    """Runs as `runs` does after a pause, in which a run can be cancelled."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    async def __call__(self, config: BaseConfig, session: Session, running: RunningLoop, *summary: Any) -> None:
        running.starting()
        await asyncio.sleep(0)
        await self._runs(config, session, running, *summary)


async def _write(folder: Path) -> None:
    (folder / "weights").write_text("1")


def died(kind: str = PROCESS_DIED) -> ClusterError:
    return ClusterError("actor_train", "train_step", 1, kind, "gone\nstack", "gone")


def play(runs: Runs, folder: Path, monkeypatch: pytest.MonkeyPatch, **keys: Any) -> RunSummary:
    monkeypatch.setattr(module, "run_once", runs)
    return asyncio.run(module.run(SFTConfig(output_dir=str(folder), **keys)))


@pytest.mark.parametrize("kind", [PROCESS_DIED, TIMEOUT])
def test_a_run_starts_again_from_its_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    runs = Runs(died(kind), died(kind), died(kind))
    runs.checkpoint_before = 2
    assert play(runs, tmp_path, monkeypatch, max_restarts=3).status == "finished"
    assert runs.resumed == [False, False, *2 * [str(tmp_path / "checkpoints" / "step-000001")]]
    lines = [json.loads(line) for line in (tmp_path / EVENTS_FILE).read_text().splitlines()]
    assert [line["component"] for line in lines] == ["actor_train-1"] * 3
    assert "from the beginning" in lines[0]["message"] and "step-000001 (restart 3 of 3)" in lines[2]["message"]
    assert all("stack" not in line["message"] for line in lines)


def test_before_it_trains_it_starts_again_as_it_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint in its folder is that of an earlier run."""
    runs = Runs(died(), died(), died())
    runs.checkpoint_before, runs.fails_before_training = 1, 2
    play(runs, tmp_path, monkeypatch, max_restarts=3)
    assert runs.resumed == [*3 * [False], str(tmp_path / "checkpoints" / "step-000001")]
    lines = [json.loads(line)["message"] for line in (tmp_path / EVENTS_FILE).read_text().splitlines()]
    assert ["as before, since it had not begun to train" in line for line in lines] == [True, True, False]


def test_without_a_checkpoint_of_its_own_it_starts_from_the_one_that_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs(died())
    play(runs, tmp_path, monkeypatch, max_restarts=1, resume_from_checkpoint="elsewhere/step-000007")
    assert runs.resumed == 2 * ["elsewhere/step-000007"]
    assert "from elsewhere/step-000007 again, since it has no" in (tmp_path / EVENTS_FILE).read_text()


def test_the_summary_counts_from_the_first_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(EventLog):
        def record(self, *args: Any, **kwargs: Any) -> None:
            time.sleep(0.05)

    monkeypatch.setattr(module, "EventLog", Slow)
    assert play(Runs(died(), died()), tmp_path, monkeypatch, max_restarts=2).seconds > 0.1


def test_a_run_that_fails_while_it_ends_by_ctrl_c_does_not_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs(died(), died())
    runs.interrupted_in = 2
    with pytest.raises(ClusterError):
        play(runs, tmp_path, monkeypatch, max_restarts=3)
    assert len(runs.resumed) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_between_two_starts_ctrl_c_and_sigterm_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    class Interrupted(EventLog):
        def record(self, *args: Any, **kwargs: Any) -> None:
            super().record(*args, **kwargs)
            signal.raise_signal(number)

    monkeypatch.setattr(module, "EventLog", Interrupted)
    runs = Runs(died(), died())
    monkeypatch.setattr(module, "run_once", Pausing(runs))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(module.run(SFTConfig(output_dir=str(tmp_path), max_restarts=3)))
    assert len(runs.resumed) == 1


def test_after_the_last_restart_the_error_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(died(), died())
    with pytest.raises(ClusterError):
        play(runs, tmp_path, monkeypatch, max_restarts=1)
    assert len(runs.resumed) == 2


@pytest.mark.parametrize("error", [died("ValueError"), RunError("a filter starves the batch"), KeyboardInterrupt()])
def test_an_error_that_would_come_again_is_raised_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    runs = Runs(error)
    with pytest.raises(type(error)):
        play(runs, tmp_path, monkeypatch, max_restarts=3)
    assert len(runs.resumed) == 1 and not (tmp_path / EVENTS_FILE).exists()


@pytest.mark.parametrize(
    ("error", "hint"),
    [(RunError("a filter starves the batch"), True), (CheckpointError("step-000001 is damaged"), False)],
)
def test_a_run_that_failed_says_how_to_continue_unless_its_checkpoint_is_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: RunError, hint: bool
) -> None:
    runs = Runs(error)
    runs.checkpoint_before = 1
    monkeypatch.setattr(module, "run_once", runs)
    with caplog.at_level("INFO"):
        assert module.run_pipeline(SFTConfig(output_dir=str(tmp_path))) == 1
    assert ("continue with: roll run CONFIG resume_from_checkpoint=true" in caplog.text) == hint
    assert str(error) in caplog.text

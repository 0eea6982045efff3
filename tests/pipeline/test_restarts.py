"""A run starts again after a process of it died: from its newest checkpoint, and not for ever."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roll.base.errors import RunError, RunInterrupted
from roll.base.events import EVENTS_FILE, EventLog
from roll.base.schema import ConfigSource
from roll.configs.learning.lora import PolicyArguments
from roll.configs.pipeline import BaseConfig, RLVRConfig, SFTConfig
from roll.distributed.calls.remote_errors import PROCESS_DIED, TIMEOUT, ClusterError
from roll.pipeline import launch as module
from roll.pipeline.checkpoint import CheckpointError, CheckpointManager, PipelineState, checkpoints_of
from roll.pipeline.health import Health, watched
from roll.pipeline.restarts import (
    RunningLoop,
    changed_values,
    keep_template_time,
    record_killed_driver,
    record_training_again,
    warn_of_changes,
)
from roll.pipeline.session import Session
from roll.pipeline.summary import RunSummary, next_steps, recorded
from roll.trackers import make_trackers
from roll.trackers.files import RUN_FILE, DiskFullError, replace_summary

MINUTE = timedelta(minutes=1)


class Runs:
    """Raises what `errors` has, run by run, and then ends."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.resumed = list(errors), list[bool | str]()
        self.checkpoint_before: int | None = None
        self.interrupted_in: int | None = None
        self.fails_before_training = self.steps = 0

    async def __call__(
        self, config: BaseConfig, session: Session, running: RunningLoop, summary: RunSummary, start: float
    ) -> None:
        summary.seconds = time.perf_counter() - start
        self.resumed.append(config.resume_from_checkpoint)
        running.last_step = self.steps
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


def events_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / EVENTS_FILE).read_text().splitlines()]


def restarts_in(folder: Path) -> list[dict[str, Any]]:
    return [event for event in events_in(folder) if event["event"] == "run restarted"]


def play(runs: Runs, folder: Path, monkeypatch: pytest.MonkeyPatch, **keys: Any) -> RunSummary:
    monkeypatch.setattr(module, "run_once", runs)
    return asyncio.run(module.run_with_restarts(SFTConfig(output_dir=str(folder), **keys)))


@pytest.mark.parametrize("kind", [PROCESS_DIED, TIMEOUT])
def test_a_run_starts_again_from_its_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    runs = Runs(died(kind), died(kind), died(kind))
    runs.checkpoint_before = 2
    assert play(runs, tmp_path, monkeypatch, max_restarts=3).status == "finished"
    assert runs.resumed == [False, False, *2 * [str(tmp_path / "checkpoints" / "step-000001")]]
    lines = events_in(tmp_path)
    assert [line["component"] for line in lines] == ["actor_train-1", "driver"] * 3
    assert [line["event"] for line in lines] == ["failed", "run restarted"] * 3
    assert "from the beginning" in lines[1]["message"] and "step-000001 (restart 3 of 3)" in lines[5]["message"]
    assert all("stack" not in line["message"] for line in lines)


def test_a_restart_says_how_many_finished_steps_are_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(died(), died())
    runs.checkpoint_before, runs.steps = 2, 4
    play(runs, tmp_path, monkeypatch, max_restarts=3)
    assert [event["steps_lost"] for event in restarts_in(tmp_path)] == [4, 3]


@pytest.mark.parametrize(
    ("allowed", "spent"), [(1, "the restarts are spent (max_restarts 1)"), (0, "max_restarts is 0")]
)
def test_after_the_last_restart_the_error_is_one_line_with_rank_cause_and_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: int, spent: str
) -> None:
    runs = Runs(died(), died())
    with pytest.raises(ClusterError) as caught:
        play(runs, tmp_path, monkeypatch, max_restarts=allowed)
    assert len(runs.resumed) == 1 + allowed
    log = tmp_path / "logs" / "actor_train-1.log"
    assert str(caught.value) == f"actor_train-1 failed: its process died; {spent}; its log is {log}"
    events = events_in(tmp_path)
    happened = [(event["component"], event["event"]) for event in events]
    failed = ("actor_train-1", "failed")
    assert happened == [failed, ("driver", "run restarted")] * allowed + [failed] and spent in events[-1]["message"]


class Spoiling(Runs):
    """Runs whose checkpoints are damaged when a start fails."""

    async def __call__(self, config: BaseConfig, *rest: Any) -> None:
        try:
            await super().__call__(config, *rest)
        finally:
            for file in Path(config.output_dir).glob("checkpoints/step-*/weights"):
                file.write_text("spoilt")


def test_where_all_checkpoints_are_damaged_the_failure_of_the_process_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Spoiling(died())
    runs.checkpoint_before = 1
    message = r"^actor_train-1 failed in train_step: its process died; the run cannot start again: .* is damaged"
    with pytest.raises(CheckpointError, match=message):
        play(runs, tmp_path, monkeypatch, max_restarts=3)
    events = events_in(tmp_path)
    assert [(event["component"], event["event"]) for event in events] == [
        ("actor_train-1", "failed"),
        ("driver", "not restarted"),
    ]
    assert json.loads((tmp_path / "health.json").read_text())["status"] == "failed"


class Recording(Runs):
    """Writes run.json as a run does, and keeps what the files said between two starts."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__(*errors)
        self.between: list[tuple[Any, str, str]] = []

    async def __call__(
        self, config: BaseConfig, session: Session, running: RunningLoop, summary: RunSummary, start: float
    ) -> None:
        folder = Path(config.output_dir)
        if self.resumed:
            health = json.loads((folder / "health.json").read_text())
            status = json.loads((folder / RUN_FILE).read_text())["summary"]["status"]
            self.between.append((status, health["status"], health["stage"]))
        again = partial(running.starts_again_after, session=session)
        async with recorded(make_trackers(config), summary, start, again):
            await super().__call__(config, session, running, summary, start)


def test_between_two_starts_a_run_is_not_said_to_have_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Health is reported while checkpoints are read, too."""
    monkeypatch.setattr(module, "watched", partial(watched, interval_s=0.02))

    def slowly(self: CheckpointManager, choice: bool | str) -> None:
        """As `resume_path` where checksums take a while: until health was reported."""
        health = tmp_path / "health.json"
        while not (health.exists() and "starting again" in health.read_text()):
            time.sleep(0.02)

    monkeypatch.setattr(CheckpointManager, "resume_path", slowly)
    runs = Recording(died())
    play(runs, tmp_path, monkeypatch, max_restarts=3)
    assert runs.between == [("restarting", "running", "starting again")]
    assert json.loads((tmp_path / RUN_FILE).read_text())["summary"]["status"] == "finished"
    assert json.loads((tmp_path / "health.json").read_text())["status"] == "finished"


def test_a_run_that_cannot_start_again_has_failed_in_its_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(self: CheckpointManager, choice: bool | str) -> None:
        raise CheckpointError("all are damaged")

    monkeypatch.setattr(CheckpointManager, "resume_path", damaged)
    with pytest.raises(CheckpointError):
        play(Recording(died()), tmp_path, monkeypatch, max_restarts=3)
    assert json.loads((tmp_path / RUN_FILE).read_text())["summary"]["status"] == "failed"
    assert [event["event"] for event in events_in(tmp_path)] == ["failed", "not restarted"]


def test_a_full_disk_is_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DiskFullError):
        play(Runs(DiskFullError(tmp_path / "step-000003")), tmp_path, monkeypatch)
    (event,) = events_in(tmp_path)
    assert event["event"] == "disk full" and "step-000003" in event["message"]


@pytest.mark.parametrize(("summary", "events"), [(None, 1), ({"status": "restarting"}, 1), ({"status": "failed"}, 0)])
def test_a_resume_after_a_killed_driver_is_an_event(
    tmp_path: Path, summary: dict[str, str] | None, events: int
) -> None:
    config = SFTConfig(output_dir=str(tmp_path))
    make_trackers(config).log(4, {"actor/loss": 1.0})
    if summary is not None:
        replace_summary(tmp_path, summary)
    checkpoints = checkpoints_of(config)
    asyncio.run(checkpoints.write(3, _write))
    checkpoint = asyncio.run(checkpoints.complete_step(3))
    record_killed_driver(config, checkpoint, EventLog(tmp_path))
    record_killed_driver(config, tmp_path / "elsewhere" / "step-000001", EventLog(tmp_path))
    found = events_in(tmp_path) if events else []
    assert (tmp_path / EVENTS_FILE).exists() is bool(events)
    assert [(event["event"], event["steps_lost"]) for event in found] == events * [("resumed after it was killed", 1)]


def test_the_time_until_the_run_trains_again_is_recorded_once(tmp_path: Path) -> None:
    running, events = RunningLoop(), EventLog(tmp_path)
    record_training_again(running, events)
    began = time.monotonic()
    running.failed("actor_train-0 failed")
    time.sleep(0.05)
    record_training_again(running, events)
    record_training_again(running, events)
    (event,) = events_in(tmp_path)
    assert event["event"] == "training again" and 0.05 <= event["seconds"] <= time.monotonic() - began


def test_before_it_trains_it_starts_again_as_it_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint in its folder is that of an earlier run."""
    runs = Runs(died(), died(), died())
    runs.checkpoint_before, runs.fails_before_training = 1, 2
    play(runs, tmp_path, monkeypatch, max_restarts=3)
    assert runs.resumed == [*3 * [False], str(tmp_path / "checkpoints" / "step-000001")]
    lines = [event["message"] for event in restarts_in(tmp_path)]
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


class Loop:
    """A training loop that was resumed at `step`, and trains one step."""

    def __init__(self, step: int) -> None:
        self.state, self.validation = PipelineState(step=step), dict[str, Any]()

    async def build(self, *_: Any) -> Loop:
        return self

    async def resume(self) -> None:
        """Does nothing: the constructor has set the step."""

    async def run(self) -> None:
        self.state.step += 1

    async def health(self) -> Health:
        return {}


class Processes:
    """In place of the session: no process is started."""

    resumed = False
    watch = SimpleNamespace(deaths_as_causes=contextlib.nullcontext)

    async def __aenter__(self) -> None:
        """Starts nothing."""

    async def __aexit__(self, *error: object) -> None:
        """Ends nothing."""


async def trained(running: RunningLoop, loop: Any, *rest: Any) -> None:
    async with running.trains(loop, *rest):
        await loop.run()


def test_the_summary_says_at_which_step_it_was_resumed_also_when_it_starts_again(tmp_path: Path) -> None:
    config = SFTConfig(output_dir=str(tmp_path))
    session: Any = Processes()
    summary, running, trackers = RunSummary(), RunningLoop(), make_trackers(config)
    for step in (90, 85):
        loop: Any = Loop(step)
        asyncio.run(trained(running, loop, config, session, trackers, summary))
    assert (summary.resumed_at_step, summary.steps) == (90, 86)


@pytest.mark.parametrize(
    ("summary", "line"),
    [
        (RunSummary(steps=100, seconds=480), "finished 100 steps in 480 s"),
        (
            RunSummary(steps=100, resumed_at_step=90, seconds=48.2),
            "finished step 100 (10 steps in 48 s since it was resumed at step 90)",
        ),
        (
            RunSummary(steps=100, resumed_at_step=99, seconds=5),
            "finished step 100 (1 step in 5 s since it was resumed at step 99)",
        ),
    ],
)
def test_the_end_of_a_run_says_how_many_steps_its_seconds_are_for(
    tmp_path: Path, summary: RunSummary, line: str
) -> None:
    assert next_steps(SFTConfig(output_dir=str(tmp_path)), summary, "roll run CONFIG")[0] == line


def test_the_end_of_a_run_of_several_policies_says_that_samples_have_one(tmp_path: Path) -> None:
    config = RLVRConfig(output_dir=str(tmp_path), policies={"math": PolicyArguments(tags=["math"])})
    shown = next_steps(config, RunSummary(steps=1, seconds=1), "roll run CONFIG", has_samples=True)
    assert any(line.endswith(f"roll show {tmp_path} --policy NAME") for line in shown)


def test_a_run_that_fails_while_it_ends_by_ctrl_c_does_not_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs(died(), died())
    runs.interrupted_in = 2
    with pytest.raises(ClusterError):
        play(runs, tmp_path, monkeypatch, max_restarts=3)
    assert len(runs.resumed) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_between_two_starts_a_signal_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    class Interrupted(EventLog):
        def record(self, *args: Any, **kwargs: Any) -> None:
            super().record(*args, **kwargs)
            signal.raise_signal(number)

    monkeypatch.setattr(module, "EventLog", Interrupted)
    runs = Runs(died(), died())
    monkeypatch.setattr(module, "run_once", Pausing(runs))
    before = signal.signal(number, signal.default_int_handler)  # a shell may have the tests ignore it, as nohup does
    try:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(module.run_with_restarts(SFTConfig(output_dir=str(tmp_path), max_restarts=3)))
    finally:
        signal.signal(number, before)
    assert len(runs.resumed) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_during_a_step_a_signal_lets_the_step_finish(tmp_path: Path, number: signal.Signals) -> None:
    """A scheduler sends SIGTERM: the run then ends with a checkpoint, as at Ctrl-C, and is not cancelled."""

    async def one_step() -> bool:
        running = RunningLoop()
        loop: Any = InStep(1)
        running.begin(loop)
        with module.interrupts(SFTConfig(output_dir=str(tmp_path)), running):
            signal.raise_signal(number)
            await asyncio.sleep(0.05)
        return bool(loop.stopped)

    before = signal.signal(number, signal.default_int_handler)  # a shell may have the tests ignore it, as nohup does
    try:
        assert asyncio.run(one_step())
    finally:
        signal.signal(number, before)


class InStep(Loop):
    """A loop that learns from a batch, and ends by itself afterwards."""

    stopped = False

    def stop(self) -> bool:
        self.stopped = True
        return True


@pytest.mark.parametrize(
    ("error", "component", "message"),
    [
        (died("ValueError"), "actor_train-1", "failed in train_step: gone"),
        (RunError("a filter starves\nthe batch"), "driver", "a filter starves the batch"),
        (KeyError("lost"), "driver", "KeyError: 'lost'"),
    ],
)
def test_an_error_that_would_come_again_ends_the_run_at_once_and_is_an_event(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    component: str,
    message: str,
) -> None:
    runs = Runs(error)
    with caplog.at_level("INFO"), pytest.raises(type(error)):
        play(runs, tmp_path, monkeypatch, max_restarts=3)
    assert len(runs.resumed) == 1
    (event,) = events_in(tmp_path)
    assert (event["component"], event["event"], event["message"]) == (component, "failed", message)
    assert message not in caplog.text, "run_pipeline shows it"


def test_a_resumed_run_names_the_keys_that_have_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before, folder = SFTConfig(output_dir=str(tmp_path / "first"), pretrain="a"), tmp_path / "first"
    folder.mkdir()
    make_trackers(before).close({})
    checkpoint = folder / "checkpoints" / "step-000002"
    checkpoint.mkdir(parents=True)
    after = SFTConfig(output_dir=str(tmp_path / "second"), pretrain="b", max_steps=7)
    after.actor_train.training_args.learning_rate = 3e-4
    warn_of_changes(after, checkpoint)
    assert "pretrain: a -> b, actor_train.training_args.learning_rate: 1e-06 -> 0.0003; weights and" in caplog.text
    assert "source" not in caplog.text
    caplog.clear()
    resumed = replace(before, resume_from_checkpoint=True, tracker_kwargs={"wandb": {"project": "other"}})
    resumed.source = ConfigSource(given=["resume_from_checkpoint"], overridden=["resume_from_checkpoint"])
    warn_of_changes(resumed, checkpoint)
    warn_of_changes(after, tmp_path / "without" / "run" / "step-000002")
    assert not caplog.text
    decaying = replace(before, max_steps=7)
    decaying.actor_train.training_args.lr_scheduler_type = "linear"
    warn_of_changes(decaying, checkpoint)
    assert "is 7: the learning rate of actor_train follows the schedule of the new number of steps" in caplog.text


def test_the_time_of_chat_templates_is_that_of_the_first_start(tmp_path: Path) -> None:
    first, given = SFTConfig(output_dir=str(tmp_path)), SFTConfig(template_time="2001-01-01T00:00:00")
    keep_template_time(first, None)
    assert (
        first.template_time is not None and abs(datetime.now() - datetime.fromisoformat(first.template_time)) < MINUTE
    )
    first.template_time = "2024-02-29T23:59:59"
    make_trackers(first).close({})
    resumed, checkpoint = SFTConfig(output_dir=str(tmp_path / "second")), tmp_path / "checkpoints" / "step-000002"
    keep_template_time(resumed, checkpoint)
    keep_template_time(given, checkpoint)
    assert (resumed.template_time, given.template_time) == ("2024-02-29T23:59:59", "2001-01-01T00:00:00")


def test_changes_are_short_and_keys_of_another_version_are_none() -> None:
    before = {"a": "x" * 500, "old": 1, "rewards": {"first": {"weight": 1.0}}, "source": {"given": ["a"]}}
    now = {"a": "y" * 500, "new": 2, "rewards": {"second": {"weight": 1.0}}, "source": {"given": ["b"]}}
    changes = changed_values(before, now, {"a", "rewards.first.weight", "rewards.second.weight"})
    assert [change.partition(":")[0] for change in changes] == ["a", "rewards.second", "rewards.first"]
    assert all(len(change) < 110 for change in changes)


@pytest.mark.parametrize("end", [KeyboardInterrupt(), RunInterrupted(None)])
def test_an_interrupt_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Any) -> None:
    with pytest.raises(type(end)):
        play(Runs(end), tmp_path, monkeypatch, max_restarts=3)
    assert not (tmp_path / EVENTS_FILE).exists()


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (RunError("a filter starves the batch"), True),
        (CheckpointError("step-000001 is damaged"), False),
        (RunError("resume_from_checkpoint: rollout_batch_size: batches of 8 prompts cannot continue"), False),
    ],
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

"""A run starts again after a process of it died: from its newest checkpoint, and not for ever."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from roll.configs.errors import RunError
from roll.configs.pipeline import BaseConfig, SFTConfig
from roll.distributed.events import EVENTS_FILE
from roll.distributed.remote_errors import PROCESS_DIED, TIMEOUT, ClusterError
from roll.pipeline import run as module
from roll.pipeline.checkpoint import CheckpointError, checkpoint_folder
from roll.pipeline.run import RunSummary, run_with_restarts
from roll.pipeline.session import Session


class Runs:
    """Raises what `errors` has, run by run, and then ends."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.resumed = list(errors), list[bool | str]()
        self.checkpoint_before: int | None = None

    async def __call__(self, config: BaseConfig, session: Session) -> RunSummary:
        self.resumed.append(config.resume_from_checkpoint)
        if len(self.resumed) == self.checkpoint_before:
            await checkpoint_folder(config).write(1, lambda folder: _write(folder))
            await checkpoint_folder(config).complete_step(1)
        if self.errors:
            raise self.errors.pop(0)
        return RunSummary(status="finished")


async def _write(folder: Path) -> None:
    (folder / "weights").write_text("1")


def died(kind: str = PROCESS_DIED) -> ClusterError:
    return ClusterError("actor_train", "train_step", 1, kind, "gone\nstack", "gone")


def play(runs: Runs, folder: Path, monkeypatch: pytest.MonkeyPatch, **keys: int) -> RunSummary:
    monkeypatch.setattr(module, "run", runs)
    return asyncio.run(run_with_restarts(SFTConfig(output_dir=str(folder), **keys)))


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
    monkeypatch.setattr(module, "run", runs)
    with caplog.at_level("INFO"):
        assert module.run_pipeline(SFTConfig(output_dir=str(tmp_path))) == 1
    assert ("continue with: roll run CONFIG resume_from_checkpoint=true" in caplog.text) == hint
    assert str(error) in caplog.text

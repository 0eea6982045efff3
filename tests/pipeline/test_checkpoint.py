"""Checkpoints are complete or absent."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from roll.base.errors import RunError
from roll.base.events import EVENTS_FILE, EventLog
from roll.configs.pipeline import SFTConfig
from roll.pipeline.checkpoint import MARKER, CheckpointManager, PipelineState, finished_run
from roll.trackers.files import DiskFullError, free_bytes


async def write_weights(folder: Path) -> None:
    (folder / "weights").write_text("w")


def save(manager: CheckpointManager, step: int, write: Callable[[Path], Awaitable[None]] = write_weights) -> Path:
    """A checkpoint, written and completed."""

    async def run() -> Path:
        await manager.write(step, write)
        return await manager.complete_step(step)

    return asyncio.run(run())


def test_a_saved_checkpoint_is_found_and_holds_what_was_written(tmp_path):
    manager = CheckpointManager(tmp_path, max_to_keep=0)
    folder = save(manager, 10)
    assert manager.resume_path(True) == folder
    assert (folder / "weights").read_text() == "w"


def test_a_run_that_dies_while_saving_keeps_the_previous_checkpoint(tmp_path):
    manager = CheckpointManager(tmp_path, max_to_keep=0)
    before = save(manager, 1)

    async def die(folder: Path) -> None:
        await write_weights(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(manager, 2, die)
    assert manager.resume_path(True) == before
    assert save(manager, 2).name == "step-000002"


def test_a_finished_run_is_known_before_it_starts_and_a_model_that_is_missing_is_still_exported(tmp_path):
    config = SFTConfig(output_dir=str(tmp_path), max_steps=4, resume_from_checkpoint=True)
    assert finished_run(config) is None
    for step in (2, 4):

        async def write(folder: Path, step: int = step) -> None:
            PipelineState(step).save(folder)

        save(CheckpointManager(tmp_path / "checkpoints", 0), step, write)
    assert finished_run(config) is None, "its driver was killed before the run ended"

    def end(steps: int, **keys: bool) -> None:
        record = {"summary": {"status": "finished", "steps": steps}, "config": {"save_hf_model": False, **keys}}
        (tmp_path / "run.json").write_text(json.dumps(record))

    end(4)
    assert finished_run(config) == "the run is finished: step 4 of 4; raise max_steps to go on"
    beyond = "the run has finished step 4, beyond max_steps 3; raise max_steps to go on"
    assert finished_run(replace(config, max_steps=3)) == beyond
    of_path = {"resume_from_checkpoint": str(tmp_path / "checkpoints" / "step-000002")}
    for unfinished in ({"max_steps": 5}, {"resume_from_checkpoint": False}, {"save_hf_model": True}, of_path):
        assert finished_run(replace(config, **unfinished)) is None
    (tmp_path / "hf_model").mkdir()
    assert finished_run(replace(config, save_hf_model=True)) is None, "the folder is of an earlier end of the run"
    end(4, save_hf_model=True)
    assert finished_run(replace(config, save_hf_model=True)) is not None
    (tmp_path / "checkpoints" / "step-000004" / "pipeline.json").write_text('{"step": 4}')
    assert finished_run(config) is None, "that checkpoint is damaged, so the run continues from the one before"


def test_a_folder_without_the_marker_is_never_chosen(tmp_path):
    manager = CheckpointManager(tmp_path, max_to_keep=0)
    save(manager, 3)
    (save(manager, 7) / MARKER).unlink()
    assert manager.resume_path(True) == tmp_path / "step-000003"


def test_only_the_newest_are_kept(tmp_path):
    manager = CheckpointManager(tmp_path, max_to_keep=2)
    for step in (1, 2, 10, 9):
        save(manager, step)
    assert [path.name for path in manager.complete()] == ["step-000009", "step-000010"]


def linked(manager: CheckpointManager, step: int, elsewhere: Path) -> Path:
    """A checkpoint that was moved elsewhere, with a link in its place."""
    folder = save(manager, step)
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    return folder


def test_of_a_checkpoint_that_is_a_link_only_the_link_is_deleted(tmp_path):
    manager = CheckpointManager(tmp_path / "run", max_to_keep=1)
    linked(manager, 1, tmp_path / "elsewhere")
    newest = save(manager, 2)
    assert list((tmp_path / "run").iterdir()) == [newest]
    assert (tmp_path / "elsewhere" / "weights").exists()


def test_a_saved_checkpoint_replaces_a_link_of_its_name(tmp_path):
    manager = CheckpointManager(tmp_path / "run", max_to_keep=0)
    link = linked(manager, 1, tmp_path / "elsewhere")
    for _ in range(2):
        assert save(manager, 1) == link and not link.is_symlink()
        assert (tmp_path / "elsewhere" / "weights").exists()
        shutil.rmtree(link)
        link.symlink_to(tmp_path / "gone")


@pytest.mark.parametrize("name", ["step-000001", "step-000001.partial"])
def test_a_file_in_place_of_a_checkpoint_is_replaced(tmp_path, name):
    (tmp_path / name).touch()
    manager = CheckpointManager(tmp_path, max_to_keep=0)
    assert manager.resume_path(True) is None
    folder = save(manager, 1)
    assert manager.resume_path(True) == folder and list(tmp_path.iterdir()) == [folder]


def test_an_old_checkpoint_that_cannot_be_deleted_is_a_warning(tmp_path, monkeypatch, caplog):
    manager = CheckpointManager(tmp_path, max_to_keep=1)
    old = save(manager, 1)

    def refuse(*args: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "rename", refuse)  # root may rename everything
    newest = save(manager, 2)
    assert manager.resume_path(True) == newest
    assert f"could not delete the old checkpoint {old}: Permission denied" in caplog.text


def test_what_a_run_left_that_was_killed_while_it_deleted_a_checkpoint_is_deleted_by_the_next(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path, max_to_keep=1)
    save(manager, 1)

    def die(folder: Path) -> None:
        (folder / MARKER).unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", die)
    with pytest.raises(KeyboardInterrupt):
        save(manager, 2)
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 2
    manager.set_aside_others(manager.resume_path(True))
    assert list(tmp_path.iterdir()) == [tmp_path / "step-000002"]


def test_newest_means_the_largest_step_beyond_six_digits(tmp_path):
    manager = CheckpointManager(tmp_path, max_to_keep=0)
    for step in (999_999, 1_000_000):
        save(manager, step)
    assert manager.resume_path(True) == tmp_path / "step-1000000"


def test_without_checkpoints_there_is_no_resume_path_and_a_wrong_path_is_an_error(tmp_path):
    manager = CheckpointManager(tmp_path / "checkpoints", max_to_keep=0)
    assert manager.resume_path(True) is None
    assert manager.resume_path(False) is None
    with pytest.raises(RunError, match="holds no complete checkpoint"):
        manager.resume_path(str(tmp_path))


def test_a_path_may_name_a_checkpoint_its_folder_or_a_run(tmp_path):
    manager = CheckpointManager(tmp_path / "run" / "checkpoints", max_to_keep=0)
    folder = save(manager, 4)
    other = CheckpointManager(tmp_path / "elsewhere", max_to_keep=0)
    for path in (folder, folder.parent, tmp_path / "run"):
        assert other.resume_path(str(path)) == folder


def test_a_new_run_renames_checkpoints_of_an_earlier_run_and_keeps_its_own(tmp_path):
    manager = CheckpointManager(tmp_path, max_to_keep=2)
    earlier = [save(manager, step) for step in (90, 180)]
    moved = manager.set_aside_others(None)
    assert [path.name for path in moved] == ["step-000090.old", "step-000180.old"]
    assert all((path / "weights").exists() for path in moved) and not any(path.exists() for path in earlier)
    assert manager.resume_path(True) is None
    assert save(manager, 10).exists()
    assert manager.resume_path(True) == tmp_path / "step-000010"
    assert manager.resume_path(str(moved[1])) == moved[1]


def test_a_run_resumed_from_an_early_step_renames_later_checkpoints(tmp_path):
    manager = CheckpointManager(tmp_path, max_to_keep=2)
    early, late = (save(manager, step) for step in (4, 6))
    assert manager.set_aside_others(manager.resume_path(str(early))) == [tmp_path / "step-000006.old"]
    assert [path.name for path in manager.complete()] == ["step-000004"] and not late.exists()
    save(manager, 6)
    manager.set_aside_others(early)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000004", "step-000006.old", "step-000006.old2"]


def test_a_run_resumed_from_another_folder_renames_all_checkpoints(tmp_path):
    manager = CheckpointManager(tmp_path / "here", max_to_keep=2)
    save(manager, 3)
    manager.set_aside_others(save(CheckpointManager(tmp_path / "there", 0), 5))
    assert manager.complete() == []


async def fill(folder: Path) -> None:
    """Writes more than the disk holds, as a rank does; its error comes as text from another process."""
    with (folder / "weights").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(65536))
        except OSError as error:
            raise RuntimeError(f"actor_train.save_checkpoint failed on rank 0: {error}") from None


def test_a_checkpoint_that_does_not_fit_on_the_disk_is_absent_and_the_error_has_path_and_bytes(small_disk):
    manager = CheckpointManager(small_disk, max_to_keep=0)
    before = save(manager, 1)
    with pytest.raises(DiskFullError) as caught:
        save(manager, 2, fill)
    message = str(caught.value)
    assert f"no space left to write {small_disk}/step-000002: more than 1.0 MB needed, 1.0 MB free;" in message
    assert "\n" not in message
    assert [path.name for path in small_disk.iterdir()] == [before.name], "a part of it is left"
    assert free_bytes(small_disk) > 900_000


def test_a_checkpoint_larger_than_the_free_space_is_not_begun(small_disk):
    manager = CheckpointManager(small_disk, max_to_keep=0)

    async def large(folder: Path) -> None:
        (folder / "weights").write_bytes(bytes(600_000))

    save(manager, 1, large)
    with pytest.raises(DiskFullError, match="600.1 kB needed, as for the last checkpoint, 4.* kB free"):
        save(manager, 2, fill)


def test_an_error_that_is_not_about_space_is_raised_as_it_is(tmp_path):
    async def broken(folder: Path) -> None:
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError, match="a rank died"):
        save(CheckpointManager(tmp_path, 0), 1, broken)


def test_a_new_run_deletes_what_an_earlier_one_had_not_finished_writing(tmp_path):
    manager = CheckpointManager(tmp_path, max_to_keep=0)
    (tmp_path / "step-000007.partial").mkdir()
    manager.set_aside_others(None)
    assert list(tmp_path.iterdir()) == []


def truncate(folder: Path) -> str:
    (folder / "shards" / "big").write_bytes(b"x" * 10)
    return r"shards/big has 10 bytes instead of 9000000"


def overwrite(folder: Path) -> str:
    with (folder / "shards" / "big").open("r+b") as file:
        file.seek(5_000_000)
        file.write(b"y" * 4096)
    return "shards/big has changed since it was written"


def remove(folder: Path) -> str:
    (folder / "weights").unlink()
    return "weights is missing"


def spoil_marker(folder: Path) -> str:
    (folder / MARKER).write_text('{"files": {')
    return "COMPLETE cannot be read"


async def write_shards(folder: Path) -> None:
    await write_weights(folder)
    (folder / "shards").mkdir()
    (folder / "shards" / "big").write_bytes(b"x" * 9_000_000)


@pytest.mark.parametrize("spoil", [truncate, overwrite, remove, spoil_marker])
def test_a_damaged_checkpoint_is_named_and_the_newest_intact_one_is_taken(tmp_path, spoil, caplog):
    manager = CheckpointManager(tmp_path, max_to_keep=0)
    older, newest = [save(manager, step, write_shards) for step in (1, 2)]
    assert manager.resume_path(True) == newest
    problem = spoil(newest)
    assert manager.resume_path(True) == older
    assert re.search(f"the run continues from {older}, because {newest} is damaged: {problem}", caplog.text)
    with pytest.raises(
        RunError, match=f"{newest} is damaged: {problem}.*; the newest intact one in that folder is {older}"
    ):
        manager.resume_path(str(newest))
    spoil(older)
    with pytest.raises(RunError, match=f"{newest} is damaged: .* no older one is intact; set it to false"):
        manager.resume_path(True)


def test_a_damaged_checkpoint_that_is_skipped_is_an_event(tmp_path):
    manager = CheckpointManager(tmp_path, 0, EventLog(tmp_path))
    older, newest = [save(manager, step, write_shards) for step in (1, 2)]
    problem = remove(newest)
    assert manager.resume_path(True) == older
    (event,) = map(json.loads, (tmp_path / EVENTS_FILE).read_text().splitlines())
    assert event["event"] == "checkpoint skipped"
    assert event["message"] == f"continues from {older}, because {newest} is damaged: {problem}"


@pytest.mark.parametrize(
    "marker",
    [
        "",
        "[]",
        "null",
        '{"files": 3}',
        '{"files": {"weights": "x"}}',
        pytest.param('{"files": {"weights": [1e999, 0]}}', id="infinite size"),
        pytest.param('{"files": {"COMPLETE": [32, 0]}}', id="marker itself"),
        pytest.param("[" * 100_000, id="deep"),
    ],
)
def test_a_marker_of_another_shape_is_damage(tmp_path, marker):
    manager = CheckpointManager(tmp_path, max_to_keep=0)
    older, newest = save(manager, 1), save(manager, 2)
    (newest / MARKER).write_text(marker)
    assert manager.resume_path(True) == older


def test_a_folder_of_a_checkpoint_may_be_moved_and_linked(tmp_path):
    manager = CheckpointManager(tmp_path / "run", max_to_keep=0)
    folder = save(manager, 1, write_shards)
    (folder / "shards").rename(tmp_path / "elsewhere")
    (folder / "shards").symlink_to(tmp_path / "elsewhere")
    assert manager.resume_path(True) == folder

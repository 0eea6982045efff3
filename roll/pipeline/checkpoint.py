"""Checkpoints and other folders that are complete or absent: written to a temporary folder, marked, renamed, pruned.

What is in a checkpoint: `PipelineState` below, the state of the learner (`learner.py`), and for each trained role what
`roll/distributed/train/checkpoint/megatron_checkpoint.py` writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from roll.base.checksums import damage, write_checksums
from roll.base.errors import RunError
from roll.base.events import DRIVER, EventLog
from roll.configs.run_options import CheckpointOptions
from roll.trackers.files import RUN_FILE, DiskFullError, free_bytes, is_disk_full, megabytes

logger = logging.getLogger(__name__)

FOLDER = "checkpoints"
"""Subfolder of a run with its checkpoints."""

HF_FOLDER = "hf_model"
"""Folder of the exported model, in the output folder and in checkpoints."""

MERGED_FOLDER = "merged_hf_model"
"""Folder of the exported model with its adapters added to the weights, in the output folder."""

MARKER = "COMPLETE"
EXHAUSTED_SHARE = 0.9
"""A failed save that has written this share of the free bytes failed for want of the rest."""

NAME = re.compile(r"step-(\d{6,})")


class CheckpointError(RunError):
    """There is no checkpoint to continue from as the configuration asks, or it is damaged."""


class CheckpointManager:
    """The folder `checkpoint_dir`, one `step-NNNNNN` folder for each checkpoint.

    A checkpoint is written into a folder whose name ends in `.partial`, gets its marker last and is renamed; a run
    that ends before that leaves only the `.partial` folder.
    """

    def __init__(self, folder: Path, max_to_keep: int, events: EventLog | None = None) -> None:
        """Manages checkpoints in `folder`; `max_to_keep` 0 keeps all of them, and damaged ones are in `events`."""
        self._folder = folder
        self._max_to_keep = max_to_keep
        self._events = events
        self._free: int | None = None
        """Bytes that were free before the last checkpoint was begun."""

    async def write(self, step: int, write: Callable[[Path], Awaitable[None]]) -> None:
        """Begins a checkpoint of `step` with `write`; a run that ends before `complete_step` has none.

        What `write` starts in the background is waited for by the `written` of `complete_step`.

        Raises:
            DiskFullError: it does not fit on the disk; nothing of it is left there.
        """
        final, last = self._path(step), folder_bytes(self.complete()[-1:])
        free = free_bytes(self._folder)
        if free is not None and free < last:
            raise DiskFullError(final, f"{megabytes(last)} needed, as for the last checkpoint", free)
        self._free = free
        async with _partial_folder(final) as folder:
            await write(folder)

    async def complete_step(
        self,
        step: int,
        add: Callable[[Path], None] = lambda folder: None,
        written: Callable[[], Awaitable[None]] | None = None,
    ) -> Path:
        """Completes a checkpoint, makes it visible and deletes the oldest beyond `max_to_keep`; returns its folder.

        Files are read for their checksums and flushed to the disk on a thread, while the event loop runs. Files that
        are still being written are awaited with `written`.

        Raises:
            DiskFullError: it does not fit on the disk; nothing of it is left there.
        """
        if written is not None:
            with _explained(self._path(step), _partial(self._path(step)), self._free):
                await written()
        return await asyncio.to_thread(self._complete, step, add)

    def _complete(self, step: int, add: Callable[[Path], None]) -> Path:
        final = self._path(step)
        with _explained(final, _partial(final), None) as folder:
            add(folder)
            write_checksums(folder, folder / MARKER)
            _flush_to_disk(folder)
        _replace(final)
        self._prune()
        return final

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}"

    def set_aside_others(self, resumed: Path | None) -> list[Path]:
        """Renames the checkpoints other than `resumed`, from which the run starting now continues (None at step 0).

        What an earlier run had not finished writing is deleted.

        Returns:
            Their new paths, `step-NNNNNN.old`; they are never chosen or deleted, but a path may name them.
        """
        own = resumed is not None and resumed.resolve() in [path.resolve() for path in self.complete()]
        for unfinished in self._folder.glob("step-*.partial"):
            with contextlib.suppress(OSError):
                _remove(unfinished)
        others = [path for path in self.complete() if not (own and resumed and step_of(path) <= step_of(resumed))]
        moved = []
        for path in others:
            names = (path.with_suffix(".old" if number == 1 else f".old{number}") for number in itertools.count(1))
            moved.append(path.rename(next(name for name in names if not name.exists())))
        return moved

    def complete(self) -> list[Path]:
        """Finished checkpoints, oldest first."""
        if not self._folder.is_dir():
            return []
        found = [path for path in self._folder.iterdir() if NAME.fullmatch(path.name) and (path / MARKER).exists()]
        return sorted(found, key=step_of)

    def resume_path(self, choice: bool | str) -> Path | None:
        """The checkpoint to continue from: None for false, the newest intact one (or None) for true, or a path.

        Raises:
            CheckpointError: the path holds no complete checkpoint, or it is damaged; with true, all of them are.
        """
        if choice is True:
            return self._newest_intact()
        if choice is False:
            return None
        if (found := self.chosen(choice)) is not None:
            return self._require_intact(found)
        known = ", ".join(str(item) for item in self.complete()) or "none"
        raise CheckpointError(
            f"resume_from_checkpoint: {choice} holds no complete checkpoint; complete ones here: {known}"
        )

    def chosen(self, choice: bool | str) -> Path | None:
        """As `resume_path`, without reading the files of the checkpoint; None where it is missing."""
        if isinstance(choice, bool):
            return next(reversed(self.complete()), None) if choice else None
        path = Path(choice)
        if (path / MARKER).exists():
            return path
        inside = CheckpointManager(path / FOLDER if (path / FOLDER).is_dir() else path, 0).complete()
        return next(reversed(inside), None)

    def _newest_intact(self) -> Path | None:
        """The newest checkpoint whose files are unchanged; a newer one is recorded as damaged."""
        damaged = ""
        for path in reversed(self.complete()):
            problem = damage(path, path / MARKER)
            if problem is None:
                if damaged:
                    message = f"continues from {path}, because {damaged}"
                    if self._events is None:
                        logger.warning("the run %s", message)
                    else:
                        self._events.record(DRIVER, "checkpoint skipped", message)
                return path
            damaged = damaged or f"{path} is damaged: {problem}"
        if damaged:
            raise CheckpointError(
                f"resume_from_checkpoint: {damaged}, and no older one is intact; set it to false to begin again"
            )
        return None

    def _require_intact(self, path: Path) -> Path:
        problem = damage(path, path / MARKER)
        if problem is None:
            return path
        others = CheckpointManager(path.parent, 0).complete()
        intact = next((other for other in reversed(others) if damage(other, other / MARKER) is None), None)
        hint = (
            "no other one in that folder is intact"
            if intact is None
            else f"the newest intact one in that folder is {intact}"
        )
        raise CheckpointError(f"resume_from_checkpoint: {path} is damaged: {problem}; {hint}")

    def _prune(self) -> None:
        """Deletes the oldest beyond `max_to_keep`; one that cannot be deleted is a warning.

        Each is renamed first, so that what is left of it if the run is killed meanwhile is deleted by the next start.
        """
        if not self._max_to_keep:
            return
        for path in self.complete()[: -self._max_to_keep]:
            try:
                _remove(_partial(path))
                _remove(path.rename(_partial(path)))
            except OSError as error:
                logger.warning("could not delete the old checkpoint %s: %s", path, error.strerror or error)


def check_sampler(options: CheckpointOptions, load: Callable[[dict[str, Any]], None]) -> None:
    """Tries the state of the prompt sampler, in the checkpoint that the run continues from, on a sampler of this run.

    Raises:
        CheckpointError: `load` refuses it, as the run would after all engines have started.
    """
    folder = checkpoints_of(options).resume_path(options.resume_from_checkpoint)
    if folder is None:
        return
    worker = PipelineState.load(folder).samples.get("worker", {})
    if "sampler" in worker:
        with must_fit(folder):
            load(worker["sampler"])


@contextlib.contextmanager
def must_fit(folder: Path) -> Iterator[None]:
    """A state of this checkpoint that the block cannot restore is an error about `resume_from_checkpoint`.

    Raises:
        CheckpointError: in place of a ValueError or KeyError.
    """
    try:
        yield
    except (ValueError, KeyError) as error:
        cause = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"resume_from_checkpoint: {folder} does not fit this run: {cause}") from error


def checkpoint_folder(options: CheckpointOptions) -> Path:
    return Path(options.checkpoint_dir or Path(options.output_dir) / FOLDER)


def checkpoints_of(options: CheckpointOptions) -> CheckpointManager:
    return CheckpointManager(checkpoint_folder(options), options.max_ckpt_to_keep, EventLog(options.output_dir))


def finished_run(options: CheckpointOptions) -> str | None:
    """Says that the run of this folder finished at the checkpoint it would continue from, and exported its model."""
    choice, manager, folder = options.resume_from_checkpoint, checkpoints_of(options), Path(options.output_dir)
    try:
        record, chosen = json.loads((folder / RUN_FILE).read_text()), manager.chosen(choice)
        state = PipelineState() if chosen is None else PipelineState.load(chosen)
        ended = (record["summary"]["status"], record["summary"]["steps"]) == ("finished", state.step)
        exported = record["config"]["save_hf_model"] and (folder / HF_FOLDER).is_dir()
        if not (ended and state.finished(options.max_steps) and (exported or not options.save_hf_model)):
            return None
        if manager.resume_path(choice) != chosen:
            return None
    except (CheckpointError, OSError, ValueError, KeyError, TypeError):  # the run reports it
        return None
    message = f"the run is finished: step {state.step} of {options.max_steps}"
    if state.step > options.max_steps:
        return f"the run has finished step {state.step}, beyond max_steps {options.max_steps}; raise max_steps to go on"
    return f"{message}, which reached target_loss" if state.reached else f"{message}; raise max_steps to go on"


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint, from its name, which may end in `.old`."""
    return int(checkpoint.stem.removeprefix("step-"))


async def write_folder(final: Path, write: Callable[[Path], Awaitable[None]]) -> None:
    """Replaces a folder at once by what `write` puts into another one, whose name ends in `.partial`.

    Raises:
        DiskFullError: it does not fit on the disk; nothing of it is left there.
    """
    async with _partial_folder(final) as folder:
        await write(folder)
        _flush_to_disk(folder)
    _replace(final)


def _partial(final: Path) -> Path:
    return final.with_suffix(".partial")


@contextlib.asynccontextmanager
async def _partial_folder(final: Path) -> AsyncIterator[Path]:
    partial = _partial(final)
    with contextlib.suppress(OSError):
        _remove(partial)
    with _explained(final, partial, free_bytes(final)) as folder:
        folder.mkdir(parents=True)
        yield folder


@contextlib.contextmanager
def _explained(final: Path, partial: Path, free: int | None) -> Iterator[Path]:
    """Removes the folder where writing to it fails, and explains a full disk; `free` bytes were free before."""
    try:
        yield partial
    except Exception as error:
        written = folder_bytes([partial])
        shutil.rmtree(partial, ignore_errors=True)
        if is_disk_full(error) or _is_exhausted(free, written):
            raise DiskFullError(final, f"more than {megabytes(written)} needed", free) from error
        raise


def _replace(final: Path) -> None:
    _remove(final)
    os.rename(_partial(final), final)


def _remove(path: Path) -> None:
    """Deletes a folder, a file, or a link but not what it points to; nothing where the path does not exist."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def folder_bytes(folders: Iterable[Path]) -> int:
    """Bytes of all files below the folders."""
    total = 0
    for path in (path for folder in folders for path in folder.rglob("*")):
        with contextlib.suppress(OSError):  # a rank may be removing it
            total += path.lstat().st_size
    return total


def _is_exhausted(free: int | None, written: int) -> bool:
    """Whether a failed save used all free space; torch has no fixed message for a full disk."""
    return free is not None and written >= EXHAUSTED_SHARE * free


def _flush_to_disk(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


FILE_NAME = "pipeline.json"


@dataclass
class PipelineState:
    """State of the driver. It draws no random numbers: every seed derives from the run's seed and these counters.

    Attributes:
        step: finished steps.
        version: weight updates since the start; 0 before the first.
        reached: a validation reached the goal of the run, so no step is left.
        samples: state of the sample source.
    """

    step: int = 0
    version: int = 0
    reached: bool = False
    samples: dict[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        (folder / FILE_NAME).write_text(json.dumps(asdict(self), indent=1))

    def finished(self, max_steps: int) -> bool:
        return self.reached or self.step >= max_steps

    @classmethod
    def load(cls, folder: Path) -> PipelineState:
        return cls(**json.loads((folder / FILE_NAME).read_text()))

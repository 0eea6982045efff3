"""Checkpoints that are complete or absent: written aside, marked, renamed, pruned."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from roll.configs.errors import RunError
from roll.configs.pipeline import BaseConfig

MARKER = "COMPLETE"
NAME = re.compile(r"step-(\d{6,})")


class CheckpointManager:
    """The folder `output_dir/checkpoints`, one `step-NNNNNN` folder for each checkpoint.

    A checkpoint is written into a folder whose name ends in `.partial`, gets its marker last and is renamed; a run
    that dies in between leaves nothing that could be taken for a checkpoint.
    """

    def __init__(self, folder: Path, max_to_keep: int) -> None:
        """Takes the folder; `max_to_keep` 0 keeps every checkpoint."""
        self._folder = folder
        self._max_to_keep = max_to_keep

    async def save(self, step: int, write: Callable[[Path], Awaitable[None]]) -> Path:
        """Lets `write` fill a new checkpoint of `step`, then makes it visible and drops the oldest.

        Returns:
            The finished folder.
        """
        final = self._folder / f"step-{step:06d}"
        partial = final.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        await write(partial)
        (partial / MARKER).touch()
        _flush_to_disk(partial)
        if final.exists():
            shutil.rmtree(final)
        os.rename(partial, final)
        self._prune()
        return final

    def begin(self, resumed: Path | None) -> list[Path]:
        """Sets aside the checkpoints that the run starting now does not follow from: it would mistake them for its own.

        Args:
            resumed: the checkpoint it goes on from; None at step 0.

        Returns:
            Their new places, `step-NNNNNN.old`; they are never chosen or pruned, and `resume_path` takes them by name.
        """
        own = resumed is not None and resumed.resolve() in [path.resolve() for path in self.complete()]
        others = [path for path in self.complete() if not (own and resumed and _step(path) <= _step(resumed))]
        moved = []
        for path in others:
            names = (path.with_suffix(".old" if number == 1 else f".old{number}") for number in itertools.count(1))
            moved.append(path.rename(next(place for place in names if not place.exists())))
        return moved

    def complete(self) -> list[Path]:
        """Finished checkpoints, oldest first."""
        if not self._folder.is_dir():
            return []
        found = [path for path in self._folder.iterdir() if NAME.fullmatch(path.name) and (path / MARKER).exists()]
        return sorted(found, key=_step)

    def resume_path(self, wish: bool | str) -> Path | None:
        """The checkpoint to go on from: None for false, the newest complete one for true (None when there is none).

        Raises:
            RunError: the path asked for is not a complete checkpoint.
        """
        if wish is False:
            return None
        if wish is True:
            return next(reversed(self.complete()), None)
        path = Path(wish)
        if (path / MARKER).exists():
            return path
        inside = CheckpointManager(path / "checkpoints" if (path / "checkpoints").is_dir() else path, 0).complete()
        if inside:
            return inside[-1]
        known = ", ".join(str(item) for item in self.complete()) or "none"
        raise RunError(f"resume_from_checkpoint: {wish} holds no complete checkpoint; complete ones here: {known}")

    def _prune(self) -> None:
        if self._max_to_keep:
            for path in self.complete()[: -self._max_to_keep]:
                shutil.rmtree(path)


def checkpoint_folder(config: BaseConfig) -> CheckpointManager:
    """The checkpoints of a run."""
    return CheckpointManager(Path(config.output_dir) / "checkpoints", config.max_ckpt_to_keep)


def _step(checkpoint: Path) -> int:
    """The step it was made at, by its name, which may end in `.old`."""
    return int(checkpoint.stem.removeprefix("step-"))


def _flush_to_disk(folder: Path) -> None:
    """Asks the system to write the folder's files before the rename makes them count."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


FILE_NAME = "pipeline.json"


@dataclass
class PipelineState:
    """Counters and cursors of the driver.

    `step` counts finished steps, `version` the weight updates since the start (0 before the first). `reached` says that
    a validation found what the run was for, so no step is left. `samples` is what the sample source remembers. The
    driver draws no random numbers of its own: every seed derives from the run's seed and these counters.
    """

    step: int = 0
    version: int = 0
    reached: bool = False
    samples: dict[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Writes the state into a checkpoint folder."""
        (folder / FILE_NAME).write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, folder: Path) -> PipelineState:
        """Reads what `save` wrote."""
        return cls(**json.loads((folder / FILE_NAME).read_text()))

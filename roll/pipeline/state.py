"""How far a run has come: everything the driver must remember to go on as if nothing had happened."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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

"""Which model a checkpoint of adapters belongs to: it has none of its weights, and fits no other."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist

from roll.base.checksums import size_and_checksum
from roll.configs.arguments import TrainModelArguments
from roll.hub.names import CONFIG_NAME, WEIGHTS

Base = dict[str, Any]
"""Name of the model, size and checksum of its files, and what the adapters are; empty without adapters."""


def frozen_base(folder: Path, model: TrainModelArguments) -> Base:
    """The model in `folder`, and what is trained on it; collective over all ranks, of which one reads the files."""
    shared: list[Any] = [_files(folder) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared, src=0)
    adapters = {"lora_rank": model.lora_rank, "lora_alpha": model.lora_scale * model.lora_rank}
    return {"model": str(model.model_name_or_path or folder), "files": shared[0], **adapters} | {
        "lora_target": sorted(model.lora_target)
    }


@cache
def _files(folder: Path) -> dict[str, list[int]]:
    paths = sorted([*folder.glob(WEIGHTS), folder / CONFIG_NAME])
    return {path.name: [*size_and_checksum(path)] for path in paths}


def check_base(folder: Path, written: Base, ours: Base) -> None:
    """Compares the base of the checkpoint in `folder` with that of this run.

    Raises:
        ValueError: the run trains other weights, on another model, or adapters of another size.
    """
    if bool(written) != bool(ours):
        has, trains = ("adapters", "all weights") if written else ("all weights", "adapters (lora_target)")
        raise ValueError(f"{folder}: has {has}, this run trains {trains}; start from its export instead")
    for key in ("lora_rank", "lora_alpha", "lora_target"):
        if written.get(key) != ours.get(key):
            raise ValueError(
                f"{key}: {ours[key]} cannot continue from a checkpoint with {written.get(key)}; use that, or start "
                "from its export"
            )
    if written and written["files"] != ours["files"]:
        names = written["files"].keys() | ours["files"].keys()
        changed = min(name for name in names if written["files"].get(name) != ours["files"].get(name))
        raise ValueError(
            f"{folder}: what it has belongs to {written['model']}; {changed} of {ours['model']} differs from it"
        )

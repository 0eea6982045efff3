"""slime's files of `--save-debug-rollout-data`, `--save-debug-train-data` and `--dump-details` (read: 0.3.1).

Both are {"rollout_id", "samples"} of torch.save. The first has samples as generation gave them; the second, which has a
`format_version`, has what a training step computed: log-probs, advantages.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from roll.tools.compare.batch_dump import BatchDump, number_of, required
from roll.tools.terminal import option_error

EXPECTED = "a .pt file of slime's --save-debug-rollout-data or --save-debug-train-data"

COLUMNS = {"log_probs": "old_log_probs", "rollout_log_probs": "behavior_log_probs", "ref_log_probs": "ref_log_probs"}
"""Name there -> name here."""


def read_slime(path: Path, rewards: list[str]) -> BatchDump:
    """The samples; nothing of the file is run.

    Raises:
        ConfigError: it is another file, or has objects other than tensors and plain values.
    """
    try:
        payload = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        first = str(error).partition("\n")[0]
        raise option_error("--with", f"{path} cannot be read ({first}); give {EXPECTED}") from None
    samples = payload.get("samples") if isinstance(payload, Mapping) else None
    if not isinstance(samples, list) or not samples:
        raise option_error("--with", f"{path} has no samples; give {EXPECTED}")
    return _trained(payload, samples) if "format_version" in payload else _generated(samples, rewards)


def _generated(samples: Sequence[Mapping[str, Any]], rewards: list[str]) -> BatchDump:
    for number, each in enumerate(samples):
        required(each, number, ("tokens", "response_length", "reward"), EXPECTED)
    lengths = [each["response_length"] for each in samples]
    masks = [_list(each.get("loss_mask")) or [1] * each["response_length"] for each in samples]
    removed = [bool(each.get("remove_sample")) for each in samples]
    groups = [each.get("group_index") for each in samples]
    tokens = _columns(samples, {"rollout_log_probs": "behavior_log_probs"})
    reward = rewards[0] if rewards else None
    return BatchDump(
        system="slime, debug rollout data",
        scores=[number_of(each["reward"], f"reward of row {number}", reward) for number, each in enumerate(samples)],
        prompts=[each.get("prompt") for each in samples],
        groups=None if None in groups else groups,
        ids=[_split(each["tokens"], length) for each, length in zip(samples, lengths, strict=True)],
        learned=[[0] * len(mask) if gone else mask for mask, gone in zip(masks, removed, strict=True)],
        tokens=tokens,
        lacks=("advantages", "log-probs of the trainer", *(() if tokens else ("log-probs of the engine",))),
    )


def _trained(payload: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> BatchDump:
    for number, each in enumerate(samples):
        required(each, number, ("tokens", "response_lengths", "loss_masks"), EXPECTED)
    scores = payload.get("raw_reward")
    if not isinstance(scores, list) or len(scores) != len(samples):
        raise option_error(
            "--with", f"raw_reward has not one value for each of {len(samples)} samples; give {EXPECTED}"
        )
    ids = [_split(each["tokens"], int(each["response_lengths"])) for each in samples]
    tokens = _columns(samples, COLUMNS | {"advantages": "advantages"})
    return BatchDump(
        system="slime, debug train data",
        scores=[number_of(score, f"raw_reward of row {number}", None) for number, score in enumerate(scores)],
        prompts=[prompt for prompt, _ in ids],
        ids=ids,
        learned=[_list(each["loss_masks"]) for each in samples],
        tokens=tokens,
        lacks=[there for there, here in {**COLUMNS, "advantages": "advantages"}.items() if here not in tokens],
    )


def _columns(samples: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> dict[str, list[list[float]]]:
    """The columns that every sample has."""
    return {
        here: [_list(each[there]) for each in samples]
        for there, here in names.items()
        if all(each.get(there) is not None for each in samples)
    }


def _split(tokens: Any, response: int) -> tuple[list[int], list[int]]:
    ids = _list(tokens)
    return ids[: len(ids) - response], ids[len(ids) - response :]


def _list(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, torch.Tensor) else list(values or ())

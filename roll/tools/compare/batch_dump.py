"""The samples of a batch that another framework has written, and how they become the tensors of this project."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from roll.datasets.collate import NO_VERSION, collate_samples
from roll.tools.terminal import option_error


@dataclass(frozen=True)
class BatchDump:
    """B samples; what a format does not have is None or empty, and `lacks` names it.

    Attributes:
        system: and kind of file, for the output.
        scores: one for each sample, before any normalisation.
        prompts: of each sample, in any form: without `groups`, samples of equal prompts are those of one prompt.
        groups: name of the prompt of each sample.
        texts: of the responses.
        ids: token ids of prompt and response of each sample.
        learned: 1 for each response token that has a loss, else 0.
        tokens: values of the response tokens by name: `old_log_probs`, `behavior_log_probs`, `ref_log_probs`,
            `advantages`.
        parts: score of each reward, by its name.
        weights: of each of these.
        alone_is_score: with `adv_estimator: grpo` the framework gives the only sample of a prompt its score.
        notes: what was done to the rows.
    """

    system: str
    scores: Sequence[float]
    prompts: Sequence[Any]
    lacks: Sequence[str]
    groups: Sequence[Any] | None = None
    texts: Sequence[str] | None = None
    ids: Sequence[tuple[list[int], list[int]]] | None = None
    learned: Sequence[list[int]] | None = None
    tokens: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    advantages: Sequence[float] | None = None
    parts: Mapping[str, Sequence[float]] = field(default_factory=dict)
    weights: tuple[float, ...] = ()
    alone_is_score: bool = False
    notes: Sequence[str] = ()


def group_numbers(dump: BatchDump, size: int) -> Tensor:
    """[B] int64; without groups, a prompt with several times `size` samples is several prompts, in their order."""
    found: dict[tuple[str, int], int] = {}
    seen: dict[str, int] = {}
    numbers = []
    names = [json.dumps(each, default=str) for each in (dump.prompts if dump.groups is None else dump.groups)]
    for name in names:
        part = seen.get(name, 0) // size if dump.groups is None and names.count(name) % size == 0 else 0
        seen[name] = seen.get(name, 0) + 1
        numbers.append(found.setdefault((name, part), len(found)))
    return torch.tensor(numbers)


def batch_tensors(dump: BatchDump, length_of: Callable[[str], int] | None) -> dict[str, Tensor]:
    """`response_mask` bool, `input_ids`, `attention_mask`, `position_ids`, and `tokens` of the dump, each [B, T].

    Without token ids, responses have as many tokens as `length_of` counts, or one.
    """
    count = length_of or (lambda _: 1)
    ids = dump.ids or [([], [0] * count(text)) for text in dump.texts or []]
    learned = dump.learned or [[1] * len(response) for _, response in ids]
    versions = [[0 if kept else NO_VERSION for kept in row] for row in learned]
    rows = zip(ids, versions, strict=True)
    found = collate_samples([(prompt, response, [0.0] * len(response), of_row) for (prompt, response), of_row in rows])
    del found["behavior_log_probs"], found["weight_version"]
    for name, values in dump.tokens.items():
        found[name] = torch.zeros(found["response_mask"].shape)
        for row, ((prompt, response), of_row) in enumerate(zip(ids, values, strict=True)):
            found[name][row, len(prompt) : len(prompt) + len(response)] = torch.as_tensor(of_row, dtype=torch.float32)
    if dump.advantages is not None:
        found["advantages"] = torch.tensor(dump.advantages)[:, None] * found["response_mask"]
    return found


def required(row: Mapping[str, Any], number: int, names: Sequence[str], expected: str) -> None:
    """Each name is in the row.

    Raises:
        ConfigError: one is missing.
    """
    for name in names:
        if not isinstance(row, Mapping) or name not in row:
            raise option_error("--with", f"row {number} has no {name}; give {expected}")


def number_of(value: Any, name: str, reward: str | None) -> float:
    """A score: a number, or the entry `reward` of several.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(value, Mapping) and reward is not None and reward in value:
        value = value[reward]
    if isinstance(value, Mapping):
        raise option_error("--rewards", f"{name} has {', '.join(map(str, value))}; name one of them")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise option_error("--with", f"{name}: {value!r} is not a number; score the sample first")
    return float(value)

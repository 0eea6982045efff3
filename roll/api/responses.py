"""Responses as a caller holds them, and as the tensors of a batch."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

from roll.base.errors import RunError
from roll.datasets.batch import Batch
from roll.datasets.templates import EncodedPrompt
from roll.rollout.rollout_batch import batch_of_groups
from roll.rollout.types import NOT_SAMPLED, Group, Routing, SampledTurn, Trajectory

PerToken = Sequence[float | Sequence[float] | Tensor]
"""For each response one value, or one for each of its ids."""


@dataclass(frozen=True)
class Response:
    """A prompt and what follows it, sampled by `run.sample` or made by hand to be learned from.

    Attributes:
        prompt_ids: token ids of the prompt, at least one.
        ids: of the response, the token that ended it included.
        log_probs: of the engine that sampled it, one for each id; empty where it was not sampled.
        versions: of the weights that sampled each id; empty where it was not sampled.
        text: of the response, without the token that ended it.
        finish_reason: a stop token or string, or the length limit.
        group: equal for the responses to one prompt.
        mask: which ids are learned from; None: all. Others are what a tool or a user added between.
        prompt: what it responds to, where that came from the data of the run.
        sampling_mask: of each id, the ids it was sampled from; empty: all.
        routing: the experts of each token, where they are recorded.
    """

    prompt_ids: list[int]
    ids: list[int]
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: Literal["stop", "length"] = "stop"
    group: int = 0
    mask: list[bool] | None = None
    prompt: EncodedPrompt | None = field(default=None, repr=False)
    sampling_mask: list[list[int]] = field(default_factory=list, repr=False)
    routing: Routing | None = field(default=None, repr=False, compare=False)

    def trajectory(self, path: str, score: float = 0.0) -> Trajectory:
        """It as a trajectory with a score; each run of learned ids is a turn.

        Raises:
            RunError: nothing is learned, or lists differ in length; the message begins with `path`.
        """
        start, count = len(self.prompt_ids), len(self.ids)
        mask = [True] * count if self.mask is None else self.mask
        given: dict[str, Sized] = {"log_probs": self.log_probs, "versions": self.versions, "mask": mask}
        for name, values in given.items():
            if len(values) != count and (values or name == "mask"):
                raise RunError(f"{path}.{name}: {len(values)} values for {count} ids; give one for each id")
        if not start or not any(mask):
            what = "ids: no id is learned; leave it out" if start else "prompt_ids: is empty; give one id at least"
            raise RunError(f"{path}.{what}")
        sampled = zip(self.versions or [0] * count, mask, strict=True)
        versions = [version if on else NOT_SAMPLED for version, on in sampled]
        turns, at = [], start
        for on, run in groupby(mask):
            end = at + len(list(run))
            turns += [SampledTurn("", at, end, self.text)] if on else []
            at = end
        turns[-1].reward = score
        return Trajectory(
            [*self.prompt_ids, *self.ids],
            [0.0] * start + (self.log_probs or [0.0] * count),
            [NOT_SAMPLED] * start + versions,
            [[] for _ in range(start)] + self.sampling_mask if self.sampling_mask else [],
            self.routing,
            turns,
            "sequence_length" if self.finish_reason == "length" else "terminated",
        )


@dataclass(frozen=True)
class ResponseRows:
    """Responses as rows of a batch, those of a group together, and the way from one to the other.

    Attributes:
        data: the tensors of `batch_of_groups`, with padding rows.
        responses: in the order of the caller.
        rows: of each response.
    """

    data: Batch
    responses: Sequence[Response]
    rows: list[int]

    @classmethod
    def of(cls, responses: Sequence[Response], multiple: int, scores: Sequence[float] = ()) -> ResponseRows:
        """The batch has a multiple of so many rows; without `scores` all are 0.

        Raises:
            RunError: there is no response, or one is not usable.
        """
        if not responses:
            raise RunError("responses: there are none; give one at least")
        if scores and len(scores) != len(responses):
            raise RunError(f"scores: {len(scores)} for {len(responses)} responses; give one for each")
        groups: dict[int, Group] = {}
        members: dict[int, list[int]] = {}
        for index, response in enumerate(responses):
            tag = "" if response.prompt is None else response.prompt.tag
            group = groups.setdefault(response.group, Group(response.group, tag, response.group, str(response.group)))
            score = float(scores[index]) if scores else 0.0
            group.trajectories.append(response.trajectory(f"responses[{index}]", score))
            members.setdefault(response.group, []).append(index)
        data = batch_of_groups([*groups.values()], multiple=multiple)
        real = (data.batch["group_ids"] < len(groups)).nonzero().flatten().tolist()
        rows = [0] * len(responses)
        for row, index in zip(real, (index for each in members.values() for index in each), strict=True):
            rows[index] = row
        return cls(data, responses, rows)

    def spread(self, path: str, values: PerToken) -> Tensor:
        """Values of the responses as [B, T] float32, 0 elsewhere.

        Raises:
            RunError: they are not one for each response, or for each of its ids.
        """
        if len(values) != len(self.responses):
            raise RunError(f"{path}: {len(values)} for {len(self.responses)} responses; give one for each")
        table = torch.zeros(self.data.batch["input_ids"].shape)
        for index, value in enumerate(values):
            own, (start, count) = torch.as_tensor(value, dtype=torch.float32).detach(), self._place(index)
            if own.dim() and own.shape != (count,):
                raise RunError(f"{path}[{index}]: shape {[*own.shape]} for {count} ids; give a number, or one for each")
            width = min(count, table.shape[1] - start)  # the row ends at its last learned id
            table[self.rows[index], start : start + width] = own.expand(count)[:width]
        return table

    def collect(self, table: Tensor) -> list[Tensor]:
        """The values [ids] of each response from a table [B, T]."""
        found = []
        for index, row in enumerate(self.rows):
            start, count = self._place(index)
            own = table[row, start : start + count]
            found.append(torch.nn.functional.pad(own, (0, count - len(own))))
        return found

    def _place(self, index: int) -> tuple[int, int]:
        return len(self.responses[index].prompt_ids), len(self.responses[index].ids)

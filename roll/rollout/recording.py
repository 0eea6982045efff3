"""What the process of the rollouter records of a run: when it and each engine worked, and what became of each group."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from roll.base.timers import BusyTimer
from roll.rollout.engine_pool import EnginePool
from roll.rollout.ledger import FinishedGroup, PromptRequest
from roll.rollout.types import Group
from roll.trackers.recording import ENGINE, ROLLOUT, Recording


class RolloutRecording:
    """Collects what happens until a batch is taken, and writes it then."""

    def __init__(self, recording: Recording, engines: EnginePool) -> None:
        self._recording, self._engines = recording, engines
        self._ended: list[dict[str, Any]] = []

    def dropped(self, request: PromptRequest, group: Group, reason: str) -> None:
        """A group that no batch gets."""
        self._ended.append(_described(request, group) | {"dropped": reason, "failure": group.failure})

    def taken(self, batch: Iterable[FinishedGroup[Group]], step: int, timers: Mapping[str, BusyTimer]) -> None:
        """The batch of a step, with the work of the `timers`, on the clock `time.monotonic`, since the batch before."""
        wall, now = time.time(), time.monotonic()
        consumed = {"consumed": round(wall, 3)}
        self._ended += [_described(each.request, each.group) | consumed for each in batch]
        self._recording.groups({"step": step, **group} for group in self._ended)
        self._ended.clear()
        lanes = {ROLLOUT: timers, **{f"{ENGINE} {n}": {"generate": lane} for n, lane in enumerate(self._engines.lanes)}}
        for who, work in lanes.items():
            for what, timer in work.items():
                spans = [(what, start + wall - now, end + wall - now) for start, end in timer.spans(now)]
                self._recording.spans(who, step, spans)


def _described(request: PromptRequest, group: Group) -> dict[str, Any]:
    """What is known of a group: times in seconds since 1970; tokens, scores and parts of the scores of its samples."""
    samples = group.trajectories
    parts = {name: [sample.reward_parts.get(name) for sample in samples] for name in _part_names(group)}
    turns = [each.all_turns for each in samples]
    known = {
        "number": group.number,
        "tag": group.tag,
        "name": group.name,
        "version": request.version,
        "submitted": round(request.submitted_at_s, 3),
        "generated": _rounded(group.generated_s),
        "scored": _rounded(group.finished_s),
        "engines": sorted({turn.engine for each in turns for turn in each if turn.engine is not None}),
        "lengths": [sum(turn.end - turn.start for turn in each) for each in turns],
        "scores": [round(each.score, 6) for each in samples],
        "stops": [each.stop for each in samples],
        "parts": parts,
    }
    return {name: value for name, value in known.items() if value not in (None, [], {})}


def _part_names(group: Group) -> dict[str, None]:
    return dict.fromkeys(name for each in group.trajectories for name in each.reward_parts)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)

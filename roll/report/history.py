"""What happened in a run over time, as the page draws it: lanes of who did what, ages and lengths of samples, drops."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from roll.report.read import Run, is_number
from roll.report.text import Text, text
from roll.trackers.recording import ENGINE, ROLLOUT, TRAINER

MOST_SPANS = 30_000
"""Spans that the page holds, the newest."""

MOST_LANES = 20

MOST_COLUMNS, MOST_BINS = 100, 12
"""Columns (buckets of steps) and rows of a histogram by step."""

SHOWN_REASONS = 8


def lanes(run: Run, most: int = MOST_SPANS) -> dict[str, Any]:
    """Who did what from when to when, in milliseconds since the first of the `most` newest spans; JSON.

    A span is [what, start, length, step]; `what` and `steps` name kinds and ends of steps, `marks` are events.
    """
    spans = sorted(run.spans, key=lambda span: span["start"])[-most:]
    if not spans:
        return {}
    origin, kinds = spans[0]["start"], sorted({span["what"] for span in spans})
    of_lane: dict[str, list[list[int]]] = defaultdict(list)
    ends: dict[int, int] = {}
    for span in spans:
        start, length = (round(1000 * seconds) for seconds in (span["start"] - origin, span["end"] - span["start"]))
        of_lane[span["who"]].append([kinds.index(span["what"]), start, length, span["step"]])
        if span["who"] == TRAINER:
            ends[span["step"]] = max(ends.get(span["step"], 0), start + length)
    names = sorted(of_lane, key=_lane_order)
    return {
        "origin": origin,
        "what": kinds,
        "lanes": [{"who": name, "spans": of_lane[name]} for name in names[:MOST_LANES]],
        "steps": sorted(ends.items()),
        "marks": [
            [round(1000 * (event["time"] - origin)), f"{event.get('component', '')} {event['message']}"[:300]]
            for event in run.events
            if is_number(event.get("time"))
        ],
    }


def _lane_order(who: str) -> tuple[int, int, str]:
    kind, _, number = who.partition(" ")
    place = (TRAINER, ROLLOUT, ENGINE).index(kind) if kind in (TRAINER, ROLLOUT, ENGINE) else 3
    return place, int(number) if number.isdecimal() else 0, who


def histograms(run: Run) -> list[dict[str, Any]]:
    """Shares of samples by step: their age in weight versions, their length; and the score by length; JSON."""
    ages: list[tuple[int, int]] = []
    lengths: list[tuple[int, int]] = []
    scores: dict[int, list[float]] = defaultdict(list)
    for group in run.groups:
        if "dropped" in group:
            continue
        known = [length for length in group.get("lengths", []) if isinstance(length, int)]
        ages.append((group["step"], group["step"] - 1 - group["version"]))
        lengths += [(group["step"], length) for length in known]
        for length, score in zip(known, group.get("scores", []), strict=False):
            if is_number(score):
                scores[length].append(score)
    made = [_by_step("freshness", "h_age", ages), _by_step("lengths", "h_length", lengths)]
    return [each for each in (*made, _score_by_length(scores)) if each]


def _by_step(section: str, title: str, values: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Shares of the values in bins, for each column of steps."""
    if not values:
        return {}
    steps = sorted({step for step, _ in values})
    wide = -(-len(steps) // MOST_COLUMNS)
    column = {step: number // wide for number, step in enumerate(steps)}
    least, most = min(value for _, value in values), max(value for _, value in values)
    size = -(-(most - least + 1) // MOST_BINS)
    counts = Counter((column[step], (value - least) // size) for step, value in values)
    totals = Counter(column[step] for step, _ in values)
    bins = range((most - least) // size + 1)
    return {
        "section": section,
        "title": text(title).html(),
        "x": steps[::wide],
        "y": [_range(least + size * number, size) for number in bins],
        "v": [[round(counts[each, number] / totals[each], 3) for number in bins] for each in sorted(totals)],
    }


def _score_by_length(scores: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    """The mean score of the samples in each bin of lengths, with their number."""
    if len(scores) < 2:
        return {}
    least, size = min(scores), -(-(max(scores) - min(scores) + 1) // MOST_BINS)
    bins: dict[int, list[float]] = defaultdict(list)
    for length, found in scores.items():
        bins[(length - least) // size] += found
    ordered = sorted(bins.items())
    return {
        "section": "lengths",
        "title": text("h_score").html(),
        "bars": [[_range(least + size * at, size), round(sum(each) / len(each), 4), len(each)] for at, each in ordered],
    }


def _range(start: int, size: int) -> str:
    return str(start) if size == 1 else f"{start}–{start + size - 1}"


def drop_reasons(run: Run) -> list[tuple[str, int, Text]]:
    """Why groups were dropped: reason, number of groups, and the last one as an example."""
    found: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for group in run.groups:
        if "dropped" in group:
            found[str(group["dropped"])].append(group)
    ordered = sorted(found.items(), key=lambda item: -len(item[1]))[:SHOWN_REASONS]
    return [(reason, len(groups), _example(groups[-1])) for reason, groups in ordered]


def _example(group: Mapping[str, Any]) -> Text:
    cause = group.get("failure") or text("no_cause")
    name = str(group.get("name") or group["number"])
    shown = cause if isinstance(cause, Text) else str(cause)[:300]
    return text("drop_example", name=name[:80], step=group["step"], cause=shown)

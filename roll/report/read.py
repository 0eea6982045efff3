"""Reads the files of a run for its page; what is missing or damaged is named in `remarks`, and never an error."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from roll.base.events import EVENTS_FILE
from roll.base.text import format_count
from roll.configs.trackers import METRICS_FILE
from roll.tools.show.samples import working_directory
from roll.tools.terminal import option_error
from roll.trackers.files import HEALTH_FILE, RUN_FILE, megabytes
from roll.trackers.recording import GROUPS_FILE, SPANS_FILE
from roll.trackers.sample_files import dumped_steps, read_samples

ENDED = ("finished", "interrupted", "failed")
"""Ends of a run as its summary says them."""

MOST_HISTORY = 48 << 20
"""Bytes of spans.jsonl and of groups.jsonl that are read, the newest."""

LARGEST = 1e100
"""Numbers of this size and above are taken for infinite."""

TOKEN_LISTS = {"advantages", "behavior_log_probs", "old_log_probs", "train_log_probs", "entropy", "weight_version"}
"""Columns of samples with a number for each token of the response."""

SHARED = ("time/", "throughput/")
"""Metrics of the whole run that its policies have in common."""

MOST_SECONDS = 1e11
"""Largest time of a file, in seconds since 1970."""

DIED = "died"
"""Status of a run whose last report is out of date and which wrote no summary."""

WAITING = "waiting"
"""Status where a folder has no file of a run yet, as `roll watch` shows it."""


@dataclass(frozen=True)
class Run:
    """A run as its files say it.

    Attributes:
        folder: `output_dir`.
        config: the whole configuration; empty where run.json cannot be read.
        summary: how it ended; empty while it runs.
        versions: of Python and the libraries.
        origin: commit of the recipe, start, and names of the devices, as `roll.trackers.files.find_origin` gives them.
        rows: metrics by step, in order; row 0 is the validation before training.
        events: faults and what was done about them.
        spans: who did what, from when until when; `roll.trackers.recording` has their fields.
        groups: what became of each group of samples.
        status: `running`, one of ENDED, DIED, or WAITING.
        remarks: what could not be read.
        policy: of several, the one whose metrics and samples these are; empty: those of the whole run.
    """

    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)
    rows: Sequence[Mapping[str, float]] = ()
    events: Sequence[Mapping[str, Any]] = ()
    spans: Sequence[Mapping[str, Any]] = ()
    groups: Sequence[Mapping[str, Any]] = ()
    status: str = "running"
    remarks: Sequence[str] = ()
    policy: str = ""

    @cached_property
    def policies(self) -> list[Run]:
        """The same run as each of its policies sees it, with the times of the whole run."""
        return [self._of_policy(name, _mapping(policy)) for name, policy in _mapping(self.key("policies")).items()]

    def _of_policy(self, name: str, policy: Mapping[str, Any]) -> Run:
        own, tags = (f"{name}/", *SHARED), policy.get("tags") or ()
        rows = [
            {key.removeprefix(f"{name}/"): row[key] for key in row if key == "step" or key.startswith(own)}
            for row in self.rows
        ]
        dump = f"{self.key('rollout_dump_dir')}/{name}"
        config = {**self.config, "exp_name": f"{self.name}: {name}", "rollout_dump_dir": dump, "policies": {}}
        groups = [group for group in self.groups if group.get("tag") in tags]
        return replace(self, config=config, rows=rows, groups=groups, policy=name)

    @property
    def name(self) -> str:
        return str(self.config.get("exp_name") or self.folder.resolve().name)

    @property
    def steps(self) -> Sequence[Mapping[str, float]]:
        """Rows of training steps."""
        return [row for row in self.rows if row["step"] > 0]

    def series(self, name: str) -> list[tuple[int, float]]:
        """Step and value wherever the run logged a finite value of a metric."""
        return [(int(row["step"]), row[name]) for row in self.rows if is_number(row.get(name))]

    def values(self, name: str, tail: float = 1.0) -> list[float]:
        """Values of the last `tail` of the training steps that have the metric, at least one if there is any."""
        found = [value for step, value in self.series(name) if step > 0]
        return found[-max(1, round(len(found) * tail)) :]

    def key(self, path: str, default: Any = None) -> Any:
        """The value of a key of the configuration, such as `actor_train.pg_variant`."""
        found: Any = self.config
        for part in path.split("."):
            if not isinstance(found, Mapping) or part not in found:
                return default
            found = found[part]
        return found

    @cached_property
    def start(self) -> Path:
        """The folder that the run was started in."""
        return working_directory(self.folder, str(self.config.get("output_dir", "")))

    @cached_property
    def dump(self) -> Path | None:
        """The folder with the samples of its steps."""
        folder = self.config.get("rollout_dump_dir")
        return None if not isinstance(folder, str) else self.start / folder

    @cached_property
    def dumped(self) -> list[int]:
        """Steps whose samples were kept."""
        return [] if self.dump is None else dumped_steps(self.dump)

    def samples(self, step: int) -> list[dict[str, Any]]:
        """Rows of the dump of a step, which is read once; none where it cannot be read."""
        if step not in self._samples:
            try:
                rows = [] if self.dump is None else read_samples(self.dump, step)
            except (OSError, ValueError):
                rows = []
            found = [row for row in rows if _is_sample(row)]
            self._samples[step] = [
                row | {name: _numbers(row[name]) for name in row.keys() & TOKEN_LISTS} for row in found
            ]
        return self._samples[step]

    @cached_property
    def _samples(self) -> dict[int, list[dict[str, Any]]]:
        return {}


def read_run(folder: Path, now: float | None = None) -> Run:
    """Everything but the samples, which are read step by step.

    Raises:
        ConfigError: the folder holds no file of a run.
    """
    if not any((folder / name).is_file() for name in (RUN_FILE, METRICS_FILE)):
        reason = "has neither run.json nor metrics.jsonl" if folder.is_dir() else "is not a folder"
        raise option_error("RUN_DIR", f"{folder} {reason}; give the output_dir of a run")
    remarks: list[str] = []
    record = _object(folder / RUN_FILE, remarks)
    health = _object(folder / HEALTH_FILE, remarks)
    rows = sorted(_rows(folder / METRICS_FILE, remarks), key=lambda row: row["step"])
    summary = _mapping(record.get("summary"))
    return Run(
        folder,
        _mapping(record.get("config")),
        summary,
        {str(name): str(version) for name, version in _mapping(record.get("versions")).items()},
        _mapping(record.get("origin")),
        rows,
        [event for event in _lines(folder / EVENTS_FILE, remarks) if isinstance(event.get("message"), str)],
        [span for span in _lines(folder / SPANS_FILE, remarks, MOST_HISTORY) if _is_span(span)],
        [group for group in _lines(folder / GROUPS_FILE, remarks, MOST_HISTORY) if _is_group(group)],
        _status(summary, health, time.time() if now is None else now),
        remarks,
    )


def of_policy(found: Run, name: str | None) -> Run:
    """The run as the policy of this name sees it; a run of one policy as it is, without a name.

    Raises:
        ConfigError: it has several policies and this is none of them.
    """
    of_name = {each.policy: each for each in found.policies} or {"": found}
    if (name or "") not in of_name:
        known = ", ".join(each.policy for each in found.policies) or "none, the run has one policy"
        raise option_error("--policy", f"{name or 'is not given'}: the policies are {known}")
    return of_name[name or ""]


def is_number(value: object) -> bool:
    """Whether a value of a file is a number that can be computed with: a sum of such numbers is finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def _status(summary: Mapping[str, Any], health: Mapping[str, Any], now: float) -> str:
    if summary.get("status") in ENDED:
        return str(summary["status"])
    if health.get("status") in ENDED:
        return str(health["status"])
    until = health.get("valid_until")
    return DIED if is_number(until) and float(until or 0) < now else "running"


def _rows(path: Path, remarks: list[str]) -> list[dict[str, Any]]:
    """Numbers of each step, None where one was not finite; of a step that was repeated, those of the last time."""
    rows = {row["step"]: row for row in _lines(path, remarks) if is_number(row.get("step"))}
    return [
        {
            name: value if is_number(value) else None
            for name, value in row.items()
            if isinstance(value, int | float | None)
        }
        for row in rows.values()
    ]


def _lines(path: Path, remarks: list[str], newest: int | None = None) -> Iterator[dict[str, Any]]:
    """Objects of a file with one on each line; only of its newest bytes."""
    damaged = 0
    for line in _text(path, remarks, newest).split("\n"):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            yield value
        else:
            damaged += 1
    if damaged:
        remarks.append(f"{path.name}: {format_count(damaged, 'damaged line')}")


def _object(path: Path, remarks: list[str]) -> Mapping[str, Any]:
    text = _text(path, remarks)
    if not text:
        return {}
    try:
        return _mapping(json.loads(text))
    except (ValueError, RecursionError):
        remarks.append(f"{path.name}: is damaged")
        return {}


def _text(path: Path, remarks: list[str], newest: int | None = None) -> str:
    try:
        with path.open("rb") as file:
            left = 0 if newest is None else os.fstat(file.fileno()).st_size - newest
            if left > 0:
                file.seek(left)
                file.readline()
                remarks.append(f"{path.name}: the oldest {megabytes(left)}")
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        remarks.append(f"{path.name}: cannot be read: {error.strerror or error}")
        return ""


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_span(span: Mapping[str, Any]) -> bool:
    known = isinstance(span.get("who"), str) and isinstance(span.get("what"), str) and isinstance(span.get("step"), int)
    times: list[Any] = [span.get("start"), span.get("end")]
    return known and all(map(is_number, times)) and 0 <= times[0] <= times[1] < MOST_SECONDS


def _is_group(group: Mapping[str, Any]) -> bool:
    numbers = all(isinstance(group.get(name), int) for name in ("number", "step", "version"))
    lists = all(isinstance(group.get(name, []), list) for name in ("lengths", "scores", "engines"))
    return numbers and lists and all(isinstance(engine, int) for engine in group.get("engines", []))


def _is_sample(row: object) -> bool:
    """Whether a row has what every dump has, in the types that the page needs."""
    return (
        isinstance(row, dict)
        and isinstance(row.get("group"), int)
        and is_number(row.get("score"))
        and all(_are_tokens(row.get(name)) for name in ("prompt_ids", "response_ids"))
    )


def _are_tokens(ids: object) -> bool:
    return isinstance(ids, list) and {*map(type, ids)} <= {int} and (not ids or 0 <= min(ids) <= max(ids) < 1 << 31)


def _numbers(values: Any) -> list[float]:
    """Values of tokens, 0 where one is not a finite number."""
    try:
        if isinstance(values, list) and is_number(sum(values)):
            return values
    except TypeError:  # not all are numbers
        pass
    return [value if is_number(value) else 0.0 for value in values] if isinstance(values, list) else []

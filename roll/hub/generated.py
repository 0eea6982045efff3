"""Data that the package reasoning-gym generates: `file_name: reasoning_gym:chain_sum?max_terms=3&size=2000`.

What follows `?` are options of the dataset's own config class, and `size`, `seed` and `split`. The rows are written
once to the cache, as a file in this project's layout; the reward `reasoning_gym` scores answers to them.

A question belongs to the training or the validation split by its hash alone: one in HELD_OUT_ONE_IN is held out. So
nothing that is validated on is trained on, whatever the seeds and sizes.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from roll.hub.fetch import add_to_cache
from roll.hub.names import HubError, cache_folder

SCHEME = "reasoning_gym:"
SIZES = {"train": 2000, "validation": 200}
"""Rows of a split where `size` is not given."""

HELD_OUT_ONE_IN = 8
"""Share of all questions that training never sees."""

ATTEMPTS = 40
"""Questions that are drawn for each row at most; few different ones are left where they do not suffice."""


@dataclass(frozen=True)
class Generated:
    """A dataset of reasoning-gym with its options."""

    name: str
    split: str
    size: int
    seed: int
    options: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> Generated:
        """From the text of `file_name`.

        Raises:
            HubError: it is not NAME?option=value&option=value, or `size`, `seed` or `split` has no meaning.
        """
        name, _, query = text.removeprefix(SCHEME).partition("?")
        try:
            given: Any = OmegaConf.to_container(OmegaConf.from_dotlist(query.split("&") if query else []))
        except (OmegaConfBaseException, ValueError) as error:
            raise HubError(f"{text}: write {SCHEME}NAME?option=value&option=value: {error}") from error
        split = given.pop("split", "train")
        if split not in SIZES:
            raise HubError(f"{text}: split {split!r} is not known; use {' or '.join(SIZES)}")
        size, seed = given.pop("size", SIZES[split]), given.pop("seed", 42)
        if type(size) is not int or size < 1 or type(seed) is not int:
            raise HubError(f"{text}: size {size!r} and seed {seed!r} must be whole numbers, size at least 1")
        return cls(name, split, size, seed, given)

    @property
    def file(self) -> Path:
        """Where the cache has its rows."""
        identity = json.dumps([self.split, self.size, self.seed, self.options], sort_keys=True)
        digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
        return cache_folder() / ".reasoning_gym" / f"{self.name}-{self.split}-{digest}.jsonl"


def is_generated(text: str) -> bool:
    """Whether an entry of `file_name` names data that is generated."""
    return text.startswith(SCHEME)


def held_out(text: str) -> str:
    """The same data in the split of validation, unless it names a split."""
    if "split=" in text:
        return text
    return f"{text}{'&' if '?' in text else '?'}split=validation"


def generate(text: str) -> Path:
    """Writes the rows to the cache, if it lacks them.

    Raises:
        HubError: reasoning-gym is not installed, has no such dataset or option, or not so many different questions.
    """
    data = Generated.parse(text)
    if data.file.is_file():
        return data.file
    if importlib.util.find_spec("reasoning_gym") is None:
        raise HubError(f"{text}: needs the package reasoning-gym: pip install reasoning-gym")
    rows = list(_rows(data, text))
    add_to_cache(data.file, "".join(json.dumps(row) + "\n" for row in rows))
    return data.file


def _rows(data: Generated, text: str) -> Iterator[dict[str, Any]]:
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS, create_dataset

    if data.name not in DATASETS:
        near = difflib.get_close_matches(data.name, DATASETS, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(sorted(DATASETS))}"
        raise HubError(f"{text}: reasoning-gym has no dataset {data.name!r}; {hint}")
    drawn = data.size * ATTEMPTS
    options = dict(data.options)
    try:
        if data.name == "composite":
            options["datasets"] = [DatasetSpec(**{"weight": 1, "config": {}, **each}) for each in options["datasets"]]
        dataset = create_dataset(data.name, size=drawn, seed=data.seed, **options)
    except (TypeError, AssertionError, ValueError, KeyError) as error:
        raise HubError(f"{text}: reasoning-gym does not accept these options: {error}") from error
    if not _can_score(dataset):
        raise HubError(f"{text}: answers of {data.name} cannot be scored from a file; use another dataset")
    seen: set[str] = set()
    for index in range(drawn):
        if len(seen) == data.size:
            return
        item = dataset[index]
        question = item["question"]
        if question not in seen and split_by_hash(question) == data.split:
            seen.add(question)
            yield {
                "id": f"{data.file.stem}-{index}",
                "tag": item["metadata"].get("source_dataset", data.name),
                "prompt": question,
                "ground_truth": item["answer"],
                "reasoning_gym": json.dumps(item),
            }
    if len(seen) < data.size:
        raise HubError(f"{text}: {drawn} draws gave {len(seen)} different questions of split {data.split}; lower size")


def _can_score(dataset: Any) -> bool:
    """Whether an item that was written as JSON is scored like the item itself."""
    item = dataset[0]
    try:
        read: Any = json.loads(json.dumps(item))
        return bool(dataset.score_answer(item["answer"], read) == dataset.score_answer(item["answer"], item))
    except TypeError:
        return False


def split_by_hash(question: str) -> str:
    """The split that a question belongs to, by its hash."""
    digest = int.from_bytes(hashlib.sha256(question.encode()).digest()[:8])
    return "train" if digest % HELD_OUT_ONE_IN else "validation"

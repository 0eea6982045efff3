"""User-defined classes are found by name, and a wrong name is an error before anything starts."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml

from roll.base.errors import ConfigError, RunError
from roll.base.timers import StepClock
from roll.configs.pipeline import RLVRConfig, SFTConfig
from roll.datasets.batch import Batch
from roll.pipeline.extensions import BASES, Extensions, load_extensions
from roll.pipeline.parts import BatchHook
from roll.pipeline.run import TrainingLoop
from roll.rollout.source import SampleBatch
from roll.trackers import make_trackers
from roll.trackers.files import read_metrics
from roll.trackers.metrics import undocumented
from tests.configs.samples import RLVR, rlvr
from tests.pages import text_of
from tests.pipeline.my_parts import Doubling, Failing, Halving, Listening, Masking, MyRollouter
from tests.pipeline.test_run import Counting, Lines

PAGE = text_of("extensions")


def named(**keys: str) -> RLVRConfig:
    config = RLVRConfig(exp_name="mine", track_with=[])
    for key, name in keys.items():
        setattr(config.async_training, key, name)
    return config


def test_classes_are_found_by_name():
    parts = "tests.pipeline.my_parts"
    found = load_extensions(
        named(
            rollouter_class=f"{parts}:MyRollouter",
            metrics_class=f"{parts}:Doubling",
            monitor_class=f"{parts}:Listening",
            batch_hook_class=f"{parts}:Masking",
        )
    )
    assert found == Extensions(rollouter=MyRollouter, metrics=Doubling, monitor=Listening, batch_hook=Masking)


def test_without_names_nothing_is_imported():
    assert load_extensions(named()) == load_extensions(SFTConfig()) == Extensions()


@pytest.mark.parametrize(
    ("key", "name", "expected"),
    [
        ("rollouter_class", "MyRollouter", "'MyRollouter': write module:name"),
        ("rollouter_class", "no.where:Mine", "'no.where:Mine': there is no module no (searched"),
        (
            "rollouter_class",
            "tests.pipeline.my_parts:Mine",
            "the module has no Mine; it has MyRollouter",
        ),
        (
            "trainer_class",
            "tests.pipeline.my_parts:MyRollouter",
            "has MyRollouter, which is a class (needed: a roll.pipeline.learning.learner.RLLearner)",
        ),
        (
            "metrics_class",
            "tests.pipeline.my_parts:Listening",
            "it has Doubling (needed: a roll.trackers",
        ),
        (
            "batch_hook_class",
            "tests.pipeline.my_parts:Doubling",
            "has Doubling, which is a class; it has Masking, Halving, Failing (needed",
        ),
        ("monitor_class", "roll.pipeline.health:Monitor", "has Monitor, which is a class; it has HealthFile (needed"),
    ],
)
def test_a_wrong_name_is_an_error_that_lists_the_classes_that_fit(key, name, expected):
    with pytest.raises(ConfigError) as caught:
        load_extensions(named(**{key: name}))
    assert str(caught.value).startswith(f"async_training.{key}: ") and expected in str(caught.value)


def test_user_defined_metrics_are_added_and_replace_nothing(tmp_path, caplog):
    config = named()
    config.output_dir = str(tmp_path)
    trackers = make_trackers(config, metrics=Doubling(config))
    trackers.log(1, {"rollout/reward_mean": 0.25})
    trackers.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "mine/twice": 0.5, "rollout/reward_mean": 0.25}]
    assert "mine/twice" not in caplog.text, "it is the run's own, not an undocumented metric of ours"


class Learning(Counting):
    """Batches of four responses of 1, 4, 7 and 8 tokens with a score of 1; keeps what is learned from."""

    def __init__(self) -> None:
        super().__init__()
        self.learned: list[Batch] = []

    async def next_batch(self) -> SampleBatch:
        mask = torch.arange(8) < torch.tensor([1, 4, 7, 8])[:, None]
        tensors = {"response_mask": mask, "attention_mask": mask.long(), "scores": torch.ones(4)}
        return SampleBatch(Batch(tensors), {"rollout/reward_mean": 1.0})

    async def learn(self, batch: SampleBatch, step: int, clock: StepClock) -> dict[str, float]:
        self.learned.append(batch.data)
        return await super().learn(batch, step, clock)


def train(folder: Path, hook: BatchHook) -> tuple[Learning, Lines]:
    """Two steps with a hook."""
    parts, lines = Learning(), Lines()
    config = RLVRConfig(output_dir=str(folder), max_steps=2, save_checkpoint=False)
    loop = TrainingLoop(config, parts, parts, parts, lines, batch_hook=hook)  # type: ignore[arg-type]
    asyncio.run(loop.run())
    return parts, lines


def test_a_hook_changes_every_batch_before_it_is_learned_from_and_adds_metrics(tmp_path):
    hook = Masking(None)
    parts, lines = train(tmp_path, hook)
    assert hook.steps == [1, 2]
    assert [data.batch["response_mask"].any(-1).tolist() for data in parts.learned] == [[False, True, True, True]] * 2
    assert [metrics["batch_hook/masked"] for _, metrics in lines.lines] == [1.0, 1.0]
    assert undocumented(["batch_hook/masked", "time/batch_hook"]) == []


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (Halving, "Halving changed the batch of step 1 from 4 to 1 samples, .* set its response_mask to false"),
        (Failing, r"Failing failed in step 1: .*my_parts\.py, line \d+: KeyError"),
    ],
)
def test_a_hook_that_fails_or_removes_samples_ends_the_run_and_is_named(tmp_path, hook, message):
    with pytest.raises(RunError, match=f"async_training.batch_hook_class: {message}"):
        train(tmp_path, hook(None))


def test_the_example_of_the_page_works_as_it_is_written(tmp_path, monkeypatch):
    ((module, code),) = re.findall(r"^```python\n# (my_hooks)\.py\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (text,) = re.findall(r"^```yaml\n(async_training:\n  batch_hook.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / f"{module}.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = rlvr(tmp_path, "response_length=8", text=RLVR + yaml.safe_dump(yaml.safe_load(text)))
    made = load_extensions(config).batch_hook
    assert made is not None
    parts, lines = train(tmp_path, made(config))
    assert parts.learned[0].batch["scores"].tolist() == [1.0, 1.0, 0.5, 0.0]
    assert lines.lines[0][1]["batch_hook/penalty_mean"] == 0.375
    sys.modules.pop(module)


def test_the_page_names_every_class_of_the_configuration():
    assert [key for key in BASES if f"`async_training.{key}`" not in PAGE] == []

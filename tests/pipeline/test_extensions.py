"""User-defined classes are found by name, and a wrong name is an error before anything starts."""

from __future__ import annotations

import pytest

from roll.configs.errors import ConfigError
from roll.configs.pipeline import RLVRConfig, SFTConfig
from roll.pipeline.extensions import Extensions, load_extensions
from roll.trackers import make_trackers
from roll.trackers.files import read_metrics
from tests.pipeline.my_parts import Doubling, Listening, MyRollouter


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
        )
    )
    assert found == Extensions(rollouter=MyRollouter, metrics=Doubling, monitor=Listening)


def test_without_names_nothing_is_imported():
    assert load_extensions(named()) == load_extensions(SFTConfig()) == Extensions()


@pytest.mark.parametrize(
    ("key", "name", "expected"),
    [
        ("rollouter_class", "MyRollouter", "'MyRollouter' is not of the form module:Class"),
        ("rollouter_class", "no.where:Mine", "importing no.where failed: ModuleNotFoundError"),
        (
            "rollouter_class",
            "tests.pipeline.my_parts:Mine",
            "Mine is not in tests.pipeline.my_parts; it has MyRollouter",
        ),
        (
            "trainer_class",
            "tests.pipeline.my_parts:MyRollouter",
            "MyRollouter is not a roll.pipeline.learner.RLLearner",
        ),
        ("metrics_class", "tests.pipeline.my_parts:Listening", "not a roll.trackers.base.Metrics; it has Doubling"),
        ("monitor_class", "roll.pipeline.health:Monitor", "not a roll.pipeline.health.Monitor; it has HealthFile"),
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

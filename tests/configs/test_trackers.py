"""Trackers of `track_with` and their options."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.base import custom_modules
from roll.configs import trackers
from roll.configs.check import check
from roll.configs.trackers import TRACKER_OPTIONS
from roll.trackers import make_trackers
from roll.trackers.base import TRACKERS
from tests.configs.samples import RLVR, refusal, rlvr

FLAT = """
exp_name: a
tracker_kwargs:
  api_key:
  project: roll-rlvr
  name: ${exp_name}_math
  notes: "first try"
  tags: [rl, math]
  log_dir: /tmp/wandb
"""


def test_options_without_a_name_belong_to_the_only_tracker(tmp_path: Path) -> None:
    config = rlvr(tmp_path, text=RLVR + "track_with: wandb" + FLAT)
    assert config.track_with == ["wandb"]
    assert config.tracker_kwargs == {
        "wandb": {
            "api_key": None,
            "project": "roll-rlvr",
            "name": "a_math",
            "notes": "first try",
            "tags": ["rl", "math"],
            "log_dir": "/tmp/wandb",
        }
    }


def test_the_console_has_no_options_to_confuse(tmp_path: Path) -> None:
    config = rlvr(tmp_path, "track_with=[stdout, mlflow]", "tracker_kwargs={tracking_uri: 'http://host:5000'}")
    assert config.tracker_kwargs == {"mlflow": {"tracking_uri": "http://host:5000"}}


def test_options_of_another_tracker_are_remarked_on(tmp_path: Path) -> None:
    config = rlvr(tmp_path, "track_with=tensorboard", text=RLVR + "track_with: wandb" + FLAT)
    assert config.tracker_kwargs == {"tensorboard": {"log_dir": "/tmp/wandb"}}
    [note] = [
        path for path, text in config.source.notes if text.endswith("it is an option of wandb, not in track_with")
    ]
    assert "tracker_kwargs.project" in note
    config = rlvr(tmp_path, "track_with=stdout", text=RLVR + "track_with: wandb" + FLAT)
    assert config.tracker_kwargs == {}
    assert sum(path.count("tracker_kwargs.") for path, _ in config.source.notes) == 6


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["track_with=[wandb, mlflow]", "tracker_kwargs={project: a}"],
            "tracker_kwargs.project: track_with has 2 trackers; write the options by name: {wandb: {project: ...}}",
        ),
        (
            ["track_with=stdout", "tracker_kwargs={colour: a}"],
            "tracker_kwargs.colour: belongs to no tracker: track_with names none that has options",
        ),
    ],
)
def test_options_of_no_known_owner_are_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    assert message in refusal(tmp_path, *overrides)


def test_options_of_a_tracker_that_an_override_turned_off_do_not_stop_a_run(tmp_path: Path) -> None:
    text = RLVR + "track_with: [wandb]\ntracker_kwargs: {wandb: {project: a}}\n"
    config = rlvr(tmp_path, "track_with=stdout", f"output_dir={tmp_path}/out", text=text)
    assert "tracker_kwargs.wandb: track_with does not contain wandb; add it or remove this" in [
        str(warning) for warning in check(config).warnings
    ]
    make_trackers(config).close()


def test_a_package_that_is_not_installed_stops_a_run_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    missing = {problem.path: problem.message for problem in check(rlvr(tmp_path, "track_with=mlflow")).missing}
    assert missing["track_with"].startswith("mlflow is not installed; install it with: /")
    assert missing["track_with"].endswith("/python -m pip install mlflow-skinny")


OWN = """
from dataclasses import dataclass
from roll.base.schema import option
from roll.trackers.base import Tracker, register_tracker

@dataclass
class Greeting:
    greeting: str = option("hello", "Before each line.")

class Own(Tracker):
    def __init__(self, config, folder, options):
        self.lines, self.greeting = [], Greeting(**options).greeting

    def log(self, step, metrics):
        self.lines.append(f"{self.greeting} {step}")

register_tracker("own", Greeting)(Own)
"""


def test_a_tracker_of_the_user_is_chosen_with_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_tracker.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(custom_modules.CUSTOM_MODULES, "")
    monkeypatch.setattr(custom_modules, "_loaded", set(custom_modules._loaded))
    for table in (TRACKERS, TRACKER_OPTIONS):
        monkeypatch.delitem(table, "own", raising=False)
    use = ["custom_modules=[own_tracker]", "track_with=own", f"output_dir={tmp_path}/out"]
    config = rlvr(tmp_path, *use, "tracker_kwargs.own.greeting=step")
    *_, own = make_trackers(config)._trackers
    own.log(1, {})
    assert own.lines == ["step 1"]
    assert "tracker_kwargs.own.colour" in refusal(tmp_path, *use, "tracker_kwargs.own.colour=red")
    assert "track_with: 'owm' is not known; did you mean own?" in refusal(tmp_path, *use, "track_with=owm")
    for table in (TRACKERS, TRACKER_OPTIONS):
        del table["own"]

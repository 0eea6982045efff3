"""Paths that cannot be read or written stop a run; a plan reports them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest.mock import patch

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from roll.base import errors
from roll.base.errors import Problem, similar_path, unreachable
from roll.configs.check import check
from tests.configs.samples import refusal, rlvr

LONG = "a" * 300


def missing_of(folder: Path, *overrides: str) -> dict[str, str]:
    """What is missing, by path, but for the sample's data file."""
    missing = check(rlvr(folder, *overrides)).missing
    return {problem.path: problem.message for problem in missing if "train.jsonl is not" not in problem.message}


@pytest.mark.parametrize("key", ["output_dir", "logging_dir", "rollout_dump_dir"])
def test_a_folder_below_a_file_stops_a_run_only(tmp_path: Path, key: str) -> None:
    (tmp_path / "file").touch()
    missing = check(rlvr(tmp_path, f"{key}={tmp_path / 'file' / 'x'}")).missing
    reported = f"{tmp_path / 'file' / 'x'} cannot be a folder, since {tmp_path / 'file'} is a file; use another"
    assert Problem(key, reported) in missing


def test_file_in_place_of_a_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "samples").touch()
    reported = missing_of(tmp_path, f"output_dir={tmp_path}", f"rollout_dump_dir={tmp_path}/samples")
    assert reported == {
        "rollout_dump_dir": f"{tmp_path}/samples cannot be a folder, since {tmp_path}/samples is a file; use another"
    }


def test_obstacle_of_several_folders_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    reported = missing_of(tmp_path, f"output_dir={tmp_path}/file/out", f"rollout_dump_dir={tmp_path}/file/out/samples")
    assert list(reported) == ["output_dir"]


def test_missing_output_folder_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert missing_of(tmp_path, "output_dir=some/where", f"rollout_dump_dir={tmp_path}/new/er") == {}


@pytest.mark.parametrize(
    ("override", "reported"),
    [
        (
            f"output_dir=new/{LONG}",
            "'aaaaaaaaaaaa...aaaaaaaaaaaaa' cannot be reached: File name too long; use another",
        ),
        (f"pretrain={LONG}", "cannot be read: File name too long"),
        (f"resume_from_checkpoint={LONG}", "cannot be read: File name too long"),
        (f"actor_train.data_args.file_name={LONG}.jsonl", "cannot be read: File name too long"),
    ],
)
def test_a_path_that_is_too_long_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, reported: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert reported in missing_of(tmp_path, override)[override.partition("=")[0]]


def test_a_base_file_with_a_name_too_long_is_explained(tmp_path: Path) -> None:
    assert "is not a file: " in (reported := refusal(tmp_path, text=f"defaults: {LONG}\n"))
    assert "File name too long" in reported


def close(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a folder without permission; root has permission for every folder."""
    stat, access = os.stat, os.access

    def refusing_stat(path, *args, **kwargs):
        if folder in Path(os.fsdecode(path)).parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, *args, **kwargs)

    def refusing_access(path, *args, **kwargs):
        return folder not in [Path(path), *Path(path).parents] and access(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", refusing_stat)
    monkeypatch.setattr(os, "access", refusing_access)


def test_folder_without_permission_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    close(closed, monkeypatch)
    reported = missing_of(
        tmp_path, f"output_dir={closed}/out", f"pretrain={closed}/model", f"resume_from_checkpoint={closed}/x"
    )
    assert (
        reported["output_dir"]
        == f"{closed}/out cannot be written, since this user has no access to {closed}; use another"
    )
    assert reported["pretrain"] == f"{closed}/model cannot be read: Permission denied"
    assert reported["resume_from_checkpoint"] == f"{closed}/x cannot be read: Permission denied"


def test_a_missing_path_is_answered_with_the_most_similar_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.jsonl", "trains.txt", "qwen3-mini/config.json", "qwen3-min.yaml", "run/step_8/x"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    given = ("pretrain=qwen3-min", "actor_train.data_args.file_name=trian.jsonl", "resume_from_checkpoint=run/step_9")
    reported = missing_of(tmp_path, *given)
    assert reported["pretrain"] == "qwen3-min is not a folder on this machine; did you mean qwen3-mini?"
    assert reported["actor_train.data_args.file_name"].endswith("on this machine; did you mean train.jsonl?")
    assert reported["resume_from_checkpoint"].endswith("the newest one of output_dir; did you mean run/step_8?")


def with_critic(folder: Path, words: list[str] | None) -> tuple[str, ...]:
    """Overrides with a policy that has the tokens a, b and c, and a critic that has these, or no tokenizer."""
    for name, known in (("actor", ["a", "b", "c"]), ("critic", words)):
        (folder / name).mkdir()
        if known is not None:
            model = WordLevel({word: number for number, word in enumerate(known)}, unk_token="a")
            Tokenizer(model).save(str(folder / name / "tokenizer.json"))
    given = (f"pretrain={folder}/actor", f"critic.model_args.model_name_or_path={folder}/critic")
    return (*given, "adv_estimator=gae", "critic.device_mapping=[0,1]")


def test_a_critic_with_other_tokens_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, *with_critic(tmp_path, ["a", "c", "b"]))
    assert f"token 1 of {tmp_path}/critic is 'c', but 'b' in actor_train's {tmp_path}/actor; use a model" in message


@pytest.mark.parametrize("words", [["a", "b", "c"], ["a", "b", "c", "d"], ["a", "b"], None])
def test_a_critic_with_the_same_tokens_or_without_a_tokenizer_is_not(tmp_path: Path, words: list[str] | None) -> None:
    assert check(rlvr(tmp_path, *with_critic(tmp_path, words))).errors == []


def test_a_new_run_in_the_folder_of_an_earlier_one_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    [warning] = [each for each in check(rlvr(tmp_path, f"output_dir={tmp_path}")).warnings if each.path == "output_dir"]
    assert "has an earlier run, whose metrics and samples a new run replaces" in warning.message
    for override in (f"output_dir={tmp_path}/new", f"output_dir={tmp_path} resume_from_checkpoint=true"):
        report = check(rlvr(tmp_path, *override.split()))
        assert not [each for each in report.warnings if each.path == "output_dir"]


def test_missing_and_readable_paths_are_reachable(tmp_path: Path) -> None:
    assert unreachable(tmp_path) is unreachable(tmp_path / "new" / "er") is None


def test_a_folder_that_was_asked_for_keeps_the_samples_of_all_steps(tmp_path: Path) -> None:
    assert rlvr(tmp_path).rollout_dump_steps == 10
    assert rlvr(tmp_path, f"rollout_dump_dir={tmp_path}/mine").rollout_dump_steps is None
    assert rlvr(tmp_path, f"rollout_dump_dir={tmp_path}/mine", "rollout_dump_steps=3").rollout_dump_steps == 3


def test_only_names_that_fit_are_suggested_and_huge_folders_are_read_in_part(tmp_path: Path) -> None:
    for name in ("train.json", "train.txt", "other"):
        (tmp_path / name).touch()
    asked = tmp_path / "train.jsonl"
    assert similar_path(asked, lambda path: True) == tmp_path / "train.json"
    assert similar_path(asked, lambda path: path.suffix == ".txt") == tmp_path / "train.txt"
    assert similar_path(asked, lambda path: path.suffix == ".csv") is None
    assert similar_path(tmp_path / "other" / "x", lambda path: True) is None
    read = []
    with patch.object(errors, "SEARCHED_NAMES", 2):
        similar_path(tmp_path / "tran.json", lambda path: bool(read.append(path)))
    assert len(read) <= 2

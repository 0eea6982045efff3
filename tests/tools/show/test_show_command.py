"""`roll show` from its arguments to what is printed or written."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from roll.cli import main
from roll.tools.show.samples import started_in
from tests.tools.show.dumped_runs import agentic_run, rlvr_run, run_folder


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["show", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["show", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_the_last_step_is_shown_unless_another_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = agentic_run(tmp_path / "run", 2, 10)
    assert "step 10: 3 trajectories in 2 groups" in shown(capsys, run)
    assert "step 2: 3 trajectories in 2 groups" in shown(capsys, run, "--step", 2)
    names = ["step-000002.jsonl", "step-000010.jsonl"]
    assert sorted(path.name for path in (run / "samples").iterdir()) == names


def test_one_group_is_shown_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = shown(capsys, agentic_run(tmp_path / "run", 1), "--group", 1)
    assert "Guess-13-0" in told and "FrozenLake" not in told and "not shown" not in told


def test_a_step_that_is_being_written_is_not_there_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = agentic_run(tmp_path / "run", 4)
    (run / "samples" / "step-000005.partial").write_text('{"id": "Froz')
    assert "step 4:" in shown(capsys, run)


@pytest.mark.parametrize(("step", "nearest"), [(1, "4"), (6, "4 and 9"), (30, "9")])
def test_an_unknown_step_names_the_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], step: int, nearest: str
) -> None:
    told = refused(capsys, agentic_run(tmp_path / "run", 4, 9), "--step", step)
    assert f"--step: {step} is not in " in told and f"nearest: {nearest} (there are 4 to 9)" in told


def test_what_cannot_be_shown_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{tmp_path / 'no'} has no run.json; give the output_dir" in refused(capsys, tmp_path / "no")
    without = run_folder(tmp_path / "without", rollout_dump_dir=None)
    told = refused(capsys, without)
    assert f"rollout_dump_dir: is null in {without}/run.json" in told
    assert f"rollout_dump_dir={without}/samples, and run again" in told
    assert "holds no step yet" in refused(capsys, run_folder(tmp_path / "early"))
    run = agentic_run(tmp_path / "run", 1)
    assert "--group: 2 is not there; this step has 0 to 1" in refused(capsys, run, "--group", 2)
    (run / "samples" / "step-000002.jsonl").write_text('{"score": 1}\n')
    assert "--step: 2 in " in refused(capsys, run)
    (run / "run.json").write_text('{"config": {"pipeline": "sft"}}')
    assert "is a run of sft, which samples nothing to show" in refused(capsys, run)
    (run / "run.json").write_text("[]")
    assert "is not the record of a run" in refused(capsys, run)


@pytest.mark.parametrize("flags", [["--limit", "0"], ["--step", "last"], ["--group", "-1"], ["seed=3"]])
def test_bad_arguments_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["show", "output", *flags])
    assert flags[-1] in capsys.readouterr().err


def test_responses_are_ids_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = shown(capsys, rlvr_run(tmp_path / "run", [[1, 2, 3], [4] * 1500]))
    assert "no texts, since pretrain: names no HF model folder" in told
    assert "group 0   scores 0 1, mean 0.5" in told
    assert "train-31  score 0  advantage -0.500  version 4  3 tokens\n    1 2 3 " in told
    assert "... 999 characters left out ..." in told


def test_responses_are_texts_with_the_tokenizer_of_the_run(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from roll.pipeline.tokenizer import load_tokenizer

    ids = load_tokenizer(str(tiny_model_dir)).encode("1+2=3")
    told = shown(capsys, rlvr_run(tmp_path / "run", [ids], tiny_model_dir))
    assert "1+2=3" in told.replace(" ", "") and "no texts" not in told


def test_a_page_holds_the_same_with_its_signs_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "step.html"
    run = agentic_run(tmp_path / "run", 1)
    assert shown(capsys, run, "--html", page) == f"written: {page}\n"
    html = page.read_text(encoding="utf-8")
    assert "I go &lt;answer&gt;Right&lt;/answer&gt;" in html and "<answer>" not in html
    assert "FrozenLake-12-1" in html and "color: #" in html
    assert "--html: " in refused(capsys, run, "--html", tmp_path / "no" / "step.html")


def test_a_terminal_that_lacks_a_sign_gets_its_escape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    assert main(["show", str(agentic_run(tmp_path / "run", 1))]) == 0
    assert rb"__\u221a" in written.getvalue()


def test_relative_paths_are_relative_to_where_the_run_started(tmp_path: Path) -> None:
    run = tmp_path / "output" / "lake"
    assert started_in(run, "output/lake") == tmp_path.resolve()
    assert started_in(run, "./output/lake") == tmp_path.resolve()
    assert started_in(run, "elsewhere/lake") == started_in(run, str(run)) == Path()

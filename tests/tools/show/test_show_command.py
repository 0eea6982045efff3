"""`roll show` from its arguments to the terminal or page."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from roll.cli import main
from roll.tools.show.samples import working_directory
from tests.tools.show.dumped_runs import agentic_run, rlvr_run, run_folder


def show(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["show", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def show_error(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["show", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_last_step_is_shown_by_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = agentic_run(tmp_path / "run", 2, 10)
    assert "step 10: 3 trajectories in 2 groups" in show(capsys, run)
    assert "step 2: 3 trajectories in 2 groups" in show(capsys, run, "--step", 2)
    names = ["step-000002.parquet", "step-000010.parquet"]
    assert sorted(path.name for path in (run / "samples").iterdir()) == names


def test_group_option_shows_only_that_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = show(capsys, agentic_run(tmp_path / "run", 1), "--group", 1)
    assert "Guess-13-0" in output and "FrozenLake" not in output and "not shown" not in output


def test_partly_written_step_is_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = agentic_run(tmp_path / "run", 4)
    (run / "samples" / "step-000005.partial").write_text('{"id": "Froz')
    assert "step 4:" in show(capsys, run)


def test_a_policy_is_asked_for_where_there_are_several_and_other_folders_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = agentic_run(tmp_path / "run", 4)
    (run / "samples" / "logs").mkdir()
    assert "step 4:" in show(capsys, run)
    assert "--policy: math: the run has one policy; leave it out" in show_error(capsys, run, "--policy", "math")
    for policy in ("math", "code"):
        (run / "samples" / policy).mkdir()
        (run / "samples" / policy / "step-000004.parquet").write_bytes(
            (run / "samples" / "step-000004.parquet").read_bytes()
        )
    assert "--policy: there are samples of code, math; give one" in show_error(capsys, run)
    assert "step 4:" in show(capsys, run, "--policy", "code")


@pytest.mark.parametrize(("step", "nearest"), [(1, "4"), (6, "4 and 9"), (30, "9")])
def test_unknown_step_names_the_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], step: int, nearest: str
) -> None:
    output = show_error(capsys, agentic_run(tmp_path / "run", 4, 9), "--step", step)
    assert f"--step: {step} is not in " in output and f"nearest: {nearest} (steps are 4 to 9)" in output


def test_invalid_runs_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{tmp_path / 'no'} has no run.json; give the output_dir" in show_error(capsys, tmp_path / "no")
    without = run_folder(tmp_path / "without", rollout_dump_steps=0)
    assert f"rollout_dump_steps: is 0 in {without}/run.json" in show_error(capsys, without)
    assert "has no steps yet" in show_error(capsys, run_folder(tmp_path / "early"))
    run = agentic_run(tmp_path / "run", 1)
    assert "--group: 2 does not exist; this step has groups 0 to 1" in show_error(capsys, run, "--group", 2)
    (run / "samples" / "step-000002.jsonl").write_text('{"score": 1}\n')  # of an older version
    assert "--step: 2 in " in show_error(capsys, run)
    (run / "run.json").write_text('{"config": {"pipeline": "sft"}}')
    assert "is a run of the sft pipeline, which has no samples" in show_error(capsys, run)
    (run / "run.json").write_text("[]")
    assert "is not a valid run.json" in show_error(capsys, run)


@pytest.mark.parametrize("flags", [["--limit", "0"], ["--step", "last"], ["--group", "-1"], ["seed=3"]])
def test_invalid_arguments_are_rejected(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["show", "output", *flags])
    assert flags[-1] in capsys.readouterr().err


def test_responses_are_token_ids_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = show(capsys, rlvr_run(tmp_path / "run", [[1, 2, 3], [4] * 1500]))
    assert "showing token ids, no tokenizer: pretrain is not set" in output
    assert "group 0   prompt train-31  ground truth 19  scores 0 1, mean 0.5" in output
    assert "train-31  score 0  advantage -0.500  version 4  3 tokens\n    1 2 3 " in output
    assert "... 1,000 characters omitted ..." in output


def test_responses_are_decoded_with_the_tokenizer_of_the_run(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from roll.datasets.tokenizer import load_tokenizer

    ids = load_tokenizer(str(tiny_model_dir)).encode("1+2=3")
    output = show(capsys, rlvr_run(tmp_path / "run", [ids], tiny_model_dir))
    assert "1+2=3" in output.replace(" ", "") and "no tokenizer" not in output


def test_html_page_escapes_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "step.html"
    run = agentic_run(tmp_path / "run", 1)
    assert show(capsys, run, "--html", page) == f"written: {page}\n"
    html = page.read_text(encoding="utf-8")
    assert "I go &lt;answer&gt;Right&lt;/answer&gt;" in html and "<answer>" not in html
    assert "FrozenLake-12-1" in html and "color: #" in html
    assert "--html: " in show_error(capsys, run, "--html", tmp_path / "no" / "step.html")


def test_characters_missing_in_the_terminal_encoding_are_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    assert main(["show", str(agentic_run(tmp_path / "run", 1))]) == 0
    assert rb"__\u221a" in written.getvalue()


def test_relative_paths_refer_to_the_working_directory_of_the_run(tmp_path: Path) -> None:
    run = tmp_path / "output" / "lake"
    assert working_directory(run, "output/lake") == tmp_path.resolve()
    assert working_directory(run, "./output/lake") == tmp_path.resolve()
    assert working_directory(run, "elsewhere/lake") == working_directory(run, str(run)) == Path()

"""`roll plot` from its arguments to the picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from roll.cli import main
from roll.trackers.files import JsonlTracker


def run_folder(folder: Path) -> Path:
    tracker = JsonlTracker(folder / "metrics.jsonl")
    for step in range(1, 5):
        tracker.log(step, {"rollout/reward_mean": step / 5, "time/step": 2.0})
    tracker.close()
    (folder / "run.json").write_text(json.dumps({"config": {"exp_name": "my run"}}))
    return folder


def test_the_picture_is_written_into_the_folder_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(tmp_path / "run")
    assert main(["plot", str(folder)]) == 0
    assert capsys.readouterr().out == f"written: {folder}/curves.png\n"
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_has_only_been_validated_is_drawn(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "val/score": 0.5, "time/step": 2.0}\n')
    assert main(["plot", str(tmp_path)]) == 0


def test_several_runs_are_drawn_over_each_other_with_a_legend(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    first, second = (run_folder(tmp_path / name) for name in ("a", "b"))
    assert main(["plot", str(first), str(second)]) == 0
    assert capsys.readouterr().out == f"written: {first}/compared.png\n"
    reward, seconds = figures[0].axes
    colors = [{line.get_color() for line in axes.get_lines()} for axes in (reward, seconds)]
    assert colors[0] == colors[1] and len(colors[0]) == 2
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == [str(first), str(second)]
    (second / "run.json").write_text('{"config": {"exp_name": "another"}}')
    assert main(["plot", str(first), str(second)]) == 0
    assert [text.get_text() for text in figures[1].legends[0].get_texts()] == ["my run", "another"]


def test_the_picture_may_go_elsewhere(tmp_path: Path) -> None:
    assert main(["plot", str(run_folder(tmp_path / "run")), "--out", f"{tmp_path}/new/one.png", "--title", "mine"]) == 0
    assert (tmp_path / "new" / "one.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "RUN_DIR: nowhere is not a folder; give the output_dir of a run"),
        (["run", "nowhere"], "RUN_DIR: nowhere is not a folder; give the output_dir of a run"),
        (["empty"], "RUN_DIR: empty has no metrics.jsonl; give the output_dir of a run"),
        (["early"], "RUN_DIR: early has no metrics.jsonl; wait until the first step has finished"),
        (["dull"], "RUN_DIR: dull/metrics.jsonl: nothing to plot in 1 lines"),
        (["run", "--out", "run.pdf"], "--out: run.pdf; use a name that ends in .png"),
        (["run", "--out", "run/run.json/x.png"], "--out: run/run.json/x.png cannot be written: File exists"),
    ],
)
def test_what_cannot_be_plotted_is_explained(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "early", "dull"):
        (tmp_path / name).mkdir()
    run_folder(tmp_path / "run")
    (tmp_path / "early" / "run.json").write_text("{}")
    (tmp_path / "dull" / "metrics.jsonl").write_text('{"step": 1}\n')
    assert main(["plot", *arguments]) == 2
    assert capsys.readouterr().err == f"{message}\n"

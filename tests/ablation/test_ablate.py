"""A grid is checked before it starts, goes on after failures and interruptions, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from roll.ablation.ablate import Ablation
from roll.ablation.grid import Cell, cells, check_grid
from roll.ablation.process import held, last_lines, run_process
from roll.cli import main
from roll.configs.errors import ConfigError
from tests.ablation.conftest import fake, written
from tests.configs.samples import SFT, write


def ablation(config: Path, out: Path, *variants: str, given: tuple[str, ...] = ()) -> Ablation:
    return Ablation(str(config), cells(variants, [0], [1]), out, given, command=fake)


def starts(out: Path, name: str) -> list[str]:
    return (out / name / "starts.txt").read_text().split()


def test_a_grid_is_every_combination_once():
    assert [cell.name for cell in cells(["tis", "tis", "topr"], [0, 1.5], [3])] == [
        "tis-ratio0-seed3",
        "topr-ratio0-seed3",
        "tis-ratio1.5-seed3",
        "topr-ratio1.5-seed3",
    ]


def test_ratios_keep_every_digit(tmp_path):
    first, second, large = (Cell("tis", ratio, 1) for ratio in (0.12345671, 0.12345672, 1234567.5))
    assert (first.name, second.name) == ("tis-ratio0.12345671-seed1", "tis-ratio0.12345672-seed1")
    assert "async_generation_ratio=1234567.5" in large.overrides(tmp_path)


def test_knobs_on_the_command_line_go_to_the_variants_that_have_them(tmp_path):
    given = ["tis_upper_bound=2", "max_steps=3"]
    assert Cell("tis", 1, 1).overrides(tmp_path, given)[:2] == given
    assert Cell("topr", 1, 1).overrides(tmp_path, given)[:2] == ["max_steps=3", "actor_train.pg_variant=topr"]


def test_every_run_is_checked_before_the_first_starts(config, tmp_path, capsys):
    out = tmp_path / "out"
    flags = ["--variants", "ppo,tsi", "--ratios", "0,1", "--seeds", "1", "--out", str(out)]
    assert main(["ablate", str(config), *flags, "rollout_batch_size=64"]) == 2
    said = capsys.readouterr().err
    assert "actor_train.pg_variant: 'tsi'" in said and "(in tsi-ratio0-seed1, tsi-ratio1-seed1)" in said
    assert not out.exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("seed=3", "seed: is set by the grid: use --seeds"),
        ("actor_train={pg_variant: tis}", "actor_train.pg_variant: is set by the grid: use --variants"),
        ("pg_clip_low=banana", "pg_clip_low: belongs to ppo or decoupled_ppo, none of which is in --variants"),
        ("eval_steps=0", "eval_steps: 0 validates nothing"),
        ("tis_lower_bound=2", "tis_lower_bound: 2 is above the upper bound 1; swap them"),
    ],
)
def test_what_no_run_could_do_is_told_once(config, tmp_path, given, said):
    with pytest.raises(ConfigError) as caught:
        check_grid(config, cells(["tis"], [0, 1], [1, 2]), tmp_path, [given])
    assert said in str(caught.value) and len(caught.value.problems) == 1 and "(in" not in str(caught.value)


@pytest.mark.parametrize(
    ("variants", "seeds", "said"),
    [
        ("ppo", "one", "'one' is not a list such as 1,2"),
        ("ppo,", "1", "'ppo,' has an empty entry; leave out the comma too many"),
    ],
)
def test_lists_that_are_none_are_refused(config, capsys, variants, seeds, said):
    with pytest.raises(SystemExit) as caught:
        main(["ablate", str(config), "--variants", variants, "--ratios", "0", "--seeds", seeds])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_a_target_is_a_number(config, capsys):
    with pytest.raises(SystemExit):
        main(["ablate", str(config), "--variants", "ppo", "--ratios", "0", "--seeds", "1", "--target", "nan"])
    assert "argument --target: 'nan' is not a number" in capsys.readouterr().err


def test_a_pipeline_without_a_policy_loss_is_told_first(tmp_path):
    with pytest.raises(ConfigError, match="pipeline: sft has no policy loss to compare; use a file of another"):
        check_grid(write(tmp_path, SFT), cells(["tis"], [0], [1]), tmp_path)


def test_a_failed_run_is_recorded_and_the_grid_goes_on(config, tmp_path, monkeypatch):
    monkeypatch.setenv("FAIL", "tis")
    out = tmp_path / "out"
    assert ablation(config, out, "tis", "ppo").run() == 1
    failed, finished = written(out)["rows"]
    assert (failed["status"], finished["status"]) == ("failed", "finished")
    assert failed["cause"].splitlines()[0] == "exit code 1"
    assert failed["cause"].splitlines()[-1] == "the engine ran out of memory"
    assert finished["final_score"] == pytest.approx(0.3) and finished["ess"] == 0.9
    assert "the engine ran out of memory" in (out / "ablation.md").read_text()
    assert (out / "ablation.png").exists()
    monkeypatch.delenv("FAIL")
    assert ablation(config, out, "tis", "ppo").run() == 0
    assert starts(out, "tis-ratio0-seed1") == ["resume=False", "resume=True"], "goes on from its checkpoint"
    assert starts(out, "ppo-ratio0-seed1") == ["resume=False"], "a finished run is not run again"


def test_a_run_of_another_configuration_starts_anew(config, tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setenv("FAIL", "ppo")
    assert ablation(config, out, "ppo").run() == 1
    monkeypatch.delenv("FAIL")
    assert ablation(config, out, "ppo", given=("max_grad_norm=2",)).run() == 0
    assert starts(out, "ppo-ratio0-seed1") == ["resume=False", "resume=False"]
    assert not (out / "ppo-ratio0-seed1" / "checkpoints").exists()


def test_an_interruption_ends_the_run_and_what_it_started(config, tmp_path):
    out = tmp_path / "out"
    code = (
        "import sys; from pathlib import Path; from tests.ablation.test_ablate import ablation; "
        f"sys.exit(ablation(Path({str(config)!r}), Path({str(out)!r}), 'tis', 'ppo').run())"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "HANG": "tis", "PYTHONPATH": str(root)}
    grid = subprocess.Popen([sys.executable, "-c", code], cwd=root, env=environment, stderr=subprocess.PIPE, text=True)
    file = out / "tis-ratio0-seed1" / "child.pid"
    deadline = time.monotonic() + 60
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline and grid.poll() is None, "the run did not start"
        time.sleep(0.05)
    grid.send_signal(signal.SIGINT)
    _, said = grid.communicate(timeout=60)
    assert grid.returncode == 130 and "the same command goes on" in said
    child = int(file.read_text())
    while os.path.exists(f"/proc/{child}") and Path(f"/proc/{child}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, f"process {child} is left behind"
        time.sleep(0.05)
    assert [row["status"] for row in written(out)["rows"]] == ["open", "open"]


def test_two_grids_do_not_share_a_folder(config, tmp_path):
    with held(tmp_path / "out"), pytest.raises(ConfigError, match="another grid, or a run it left behind, is at work"):
        ablation(config, tmp_path / "out", "ppo").run()
    assert ablation(config, tmp_path / "out", "ppo").run() == 0


def test_a_folder_that_cannot_be_made_is_told():
    with pytest.raises(ConfigError, match="--out: /proc/x cannot be written: "), held(Path("/proc/x")):
        pass


def test_a_run_that_outlives_its_grid_keeps_the_folder(tmp_path):
    with held(tmp_path) as lock:
        run = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], pass_fds=[lock])
    with pytest.raises(ConfigError), held(tmp_path):
        pass
    run.kill()
    run.wait()
    with held(tmp_path):
        pass


def test_the_last_lines_of_a_log(tmp_path):
    log = tmp_path / "a" / "console.log"
    assert last_lines(log) == ""
    assert run_process([sys.executable, "-c", "for i in range(50): print(i, '\\n')"], log) == 0
    assert last_lines(log, 2) == "48\n49"

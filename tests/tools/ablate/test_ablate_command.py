"""`roll ablate` checks all trials first, resumes after failures and interruptions, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from roll.base.errors import ConfigError
from roll.cli import main
from roll.pipeline.checkpoint import checkpoint_folder
from roll.tools.ablate.ablation import Ablation
from roll.tools.ablate.grid import Trial, check_grid, make_grid
from roll.tools.ablate.process import lock_folder
from roll.tools.processes import run_process, tail
from tests.configs.samples import SFT, write
from tests.hub_server import go_online, serve_hub
from tests.processes import PATIENCE_S
from tests.tools.ablate.conftest import fake_run_command, read_results

pytestmark = pytest.mark.slow


def ablation(config: Path, out: Path, *variants: str, overrides: tuple[str, ...] = ()) -> Ablation:
    return Ablation(str(config), make_grid(variants, [0], [1]), out, overrides, build_command=fake_run_command)


def starts(out: Path, name: str) -> list[str]:
    return (out / name / "starts.txt").read_text().split()


def test_grid_has_every_combination_once():
    assert [trial.name for trial in make_grid(["tis", "tis", "topr"], [0, 1.5], [3])] == [
        "tis-ratio0-seed3",
        "topr-ratio0-seed3",
        "tis-ratio1.5-seed3",
        "topr-ratio1.5-seed3",
    ]


def test_trial_names_and_overrides_keep_every_digit_of_a_ratio(tmp_path):
    first, second, large = (Trial("tis", ratio, 1) for ratio in (0.12345671, 0.12345672, 1234567.5))
    assert (first.name, second.name) == ("tis-ratio0.12345671-seed1", "tis-ratio0.12345672-seed1")
    assert "async_generation_ratio=1234567.5" in large.all_overrides(tmp_path)


def test_overrides_of_other_variants_are_left_out(tmp_path):
    overrides = ["tis_upper_bound=2", "max_steps=3"]
    assert Trial("tis", 1, 1).all_overrides(tmp_path, overrides)[:2] == overrides
    assert Trial("topr", 1, 1).all_overrides(tmp_path, overrides)[:2] == ["max_steps=3", "actor_train.pg_variant=topr"]


def test_all_trials_are_checked_before_the_first_starts(config, tmp_path, capsys):
    out = tmp_path / "out"
    flags = ["--variants", "ppo,tsi", "--ratios", "0,1", "--seeds", "1", "--out", str(out)]
    assert main(["ablate", str(config), *flags, "rollout_batch_size=64"]) == 2
    error = capsys.readouterr().err
    assert "actor_train.pg_variant: 'tsi'" in error and "(in tsi-ratio0-seed1, tsi-ratio1-seed1)" in error
    assert not out.exists()


def test_a_finished_trial_with_data_given_by_name_is_not_run_again(config, tmp_path, monkeypatch):
    write(tmp_path / "served", "{}", "train.jsonl")
    out = tmp_path / "out"
    with serve_hub() as hub:
        hub.add("datasets", "tiny/sums", tmp_path / "served")
        go_online(hub, tmp_path / "cache", monkeypatch)
        config.write_text(config.read_text().replace(str(tmp_path / "train.jsonl"), "tiny/sums", 1))
        for _ in range(2):
            assert ablation(config, out, "ppo").run() == 0
    assert starts(out, "ppo-ratio0-seed1") == ["resume=False"]


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("seed=3", "seed: is set by the grid: use --seeds"),
        ("actor_train={pg_variant: tis}", "actor_train.pg_variant: is set by the grid: use --variants"),
        (
            "pg_clip_low=banana",
            "pg_clip_low: belongs to ppo or decoupled_ppo or clip_cov, none of which is in",
        ),
        ("checkpoint_dir=elsewhere", "checkpoint_dir: is set by the grid: checkpoints are written to the folder of"),
        ("eval_steps=0", "eval_steps: 0 disables validation"),
        ("tis_lower_bound=2", "tis_lower_bound: 2 is above the upper bound 1; swap them"),
    ],
)
def test_problem_of_all_trials_is_reported_once(config, tmp_path, override, error):
    with pytest.raises(ConfigError) as caught:
        check_grid(config, make_grid(["tis"], [0, 1], [1, 2]), tmp_path, [override])
    assert error in str(caught.value) and len(caught.value.problems) == 1 and "(in" not in str(caught.value)


@pytest.mark.parametrize("key", ["checkpoint_dir: {}", "checkpoint_config: {{output_dir: {}}}"])
def test_every_trial_has_a_folder_of_its_own_for_checkpoints(config, tmp_path, key):
    config.write_text(config.read_text() + key.format(tmp_path / "shared"))
    configs, _ = check_grid(config, make_grid(["ppo"], [0], [1, 2]), tmp_path / "out")
    folders = [checkpoint_folder(each) for each in configs.values()]
    assert folders == [tmp_path / "out" / name / "checkpoints" for name in ("ppo-ratio0-seed1", "ppo-ratio0-seed2")]


@pytest.mark.parametrize(
    ("variants", "seeds", "error"),
    [
        ("ppo", "one", "'one' is not a list such as 1,2"),
        ("ppo,", "1", "'ppo,' has an empty entry; remove the extra comma"),
    ],
)
def test_invalid_lists_are_rejected(config, capsys, variants, seeds, error):
    with pytest.raises(SystemExit) as caught:
        main(["ablate", str(config), "--variants", variants, "--ratios", "0", "--seeds", seeds])
    assert caught.value.code == 2
    assert error in capsys.readouterr().err


def test_target_must_be_a_number(config, capsys):
    with pytest.raises(SystemExit):
        main(["ablate", str(config), "--variants", "ppo", "--ratios", "0", "--seeds", "1", "--target", "nan"])
    assert "argument --target: 'nan' is not a number" in capsys.readouterr().err


def test_pipeline_without_policy_loss_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match="pipeline: sft has no policy loss to compare"):
        check_grid(write(tmp_path, SFT), make_grid(["tis"], [0], [1]), tmp_path)


def test_failed_trial_is_recorded_and_the_others_run(config, tmp_path, monkeypatch):
    monkeypatch.setenv("FAIL", "tis")
    out = tmp_path / "out"
    assert ablation(config, out, "tis", "ppo").run() == 1
    failed, finished = read_results(out)["rows"]
    assert (failed["status"], finished["status"]) == ("failed", "finished")
    assert failed["cause"].splitlines()[0] == "exit code 1"
    assert failed["cause"].splitlines()[-1] == "the engine ran out of memory"
    assert finished["final_score"] == pytest.approx(0.3) and finished["ess"] == 0.9
    assert "the engine ran out of memory" in (out / "ablation.md").read_text()
    assert (out / "ablation.png").exists()
    monkeypatch.delenv("FAIL")
    assert ablation(config, out, "tis", "ppo").run() == 0
    assert starts(out, "tis-ratio0-seed1") == ["resume=False", "resume=True"], "resumes from its checkpoint"
    assert starts(out, "ppo-ratio0-seed1") == ["resume=False"], "a finished trial does not run again"


def test_trial_with_another_configuration_starts_from_scratch(config, tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setenv("FAIL", "ppo")
    assert ablation(config, out, "ppo").run() == 1
    monkeypatch.delenv("FAIL")
    assert ablation(config, out, "ppo", overrides=("max_grad_norm=2",)).run() == 0
    assert starts(out, "ppo-ratio0-seed1") == ["resume=False", "resume=False"]
    assert not (out / "ppo-ratio0-seed1" / "checkpoints").exists()


def test_interrupt_ends_the_trial_and_its_subprocesses(config, tmp_path):
    out = tmp_path / "out"
    code = (
        "import sys; from pathlib import Path; from tests.tools.ablate.test_ablate_command import ablation; "
        f"sys.exit(ablation(Path({str(config)!r}), Path({str(out)!r}), 'tis', 'ppo').run())"
    )
    root = Path(__file__).parents[3]
    environment = {**os.environ, "HANG": "tis", "PYTHONPATH": str(root)}
    grid = subprocess.Popen([sys.executable, "-c", code], cwd=root, env=environment, stderr=subprocess.PIPE, text=True)
    file = out / "tis-ratio0-seed1" / "child.pid"
    deadline = time.monotonic() + PATIENCE_S
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline and grid.poll() is None, "the trial did not start"
        time.sleep(0.05)
    grid.send_signal(signal.SIGINT)
    _, error = grid.communicate()
    assert grid.returncode == 130 and "run the same command again to resume" in error
    child = int(file.read_text())
    while os.path.exists(f"/proc/{child}") and Path(f"/proc/{child}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, f"process {child} is still running"
        time.sleep(0.05)
    assert [row["status"] for row in read_results(out)["rows"]] == ["unfinished", "unfinished"]


def test_folder_in_use_is_rejected(config, tmp_path):
    with lock_folder(tmp_path / "out"), pytest.raises(ConfigError, match="is in use by another `roll ablate`"):
        ablation(config, tmp_path / "out", "ppo").run()
    assert ablation(config, tmp_path / "out", "ppo").run() == 0


def test_folder_that_cannot_be_created_is_rejected():
    with pytest.raises(ConfigError, match="--out: /proc/x cannot be written: "), lock_folder(Path("/proc/x")):
        pass


def test_run_that_outlives_its_grid_keeps_the_lock(tmp_path):
    with lock_folder(tmp_path) as lock:
        run = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10_000)"], pass_fds=[lock])
    with pytest.raises(ConfigError), lock_folder(tmp_path):
        pass
    run.kill()
    run.wait()
    with lock_folder(tmp_path):
        pass


def test_tail_returns_the_last_non_empty_lines(tmp_path):
    log = tmp_path / "a" / "console.log"
    assert tail(log) == ""
    assert run_process([sys.executable, "-c", "for i in range(50): print(i, '\\n')"], log) == 0
    assert tail(log, 2) == "48\n49"

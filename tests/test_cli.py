from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from roll import __version__
from roll.base.errors import ConfigError, similar_path
from roll.cli import HELP, find_config, launch, main
from roll.plan.hardware import Hardware, prepare_run
from tests.configs.samples import LAPTOP, MODEL, RLVR, SERVER, SFT, rlvr, sft, write

ROOT = Path(__file__).parents[1]


def test_plan_prints_devices_batch_memory_and_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", str(write(tmp_path, RLVR)), "exp_name=mine", "num_devices_per_node=8", "platform=cuda"]
    assert main([*command, "--elsewhere"]) == 0
    printed = capsys.readouterr().out
    for part in ("mine: rlvr on cuda, 3 nodes x 8 devices", "actor_train", "16-23", "samples per step", "KV cache"):
        assert part in printed
    assert "64 prompts x 8 num_return_sequences_in_group" in printed
    assert "train.jsonl is not a file on this machine" in printed.partition("Missing here")[2]


def test_what_stops_a_run_is_exit_code_1_and_stands_before_the_warnings_and_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "plan",
        str(write(tmp_path, RLVR)),
        "platform=cpu",
        "num_devices_per_node=24",
        "actor_infer.generating_args.top_p=0.9",
    ]
    assert main([*command, "resume_from_checkpoint=/nowhere"]) == 1
    head, _, rest = capsys.readouterr().out.partition("This stops the run")
    stops, warnings, numbers = (rest.index(title) for title in ("train.jsonl is not a file", "warning", "Roles"))
    assert stops < warnings < numbers and head.count("\n") == 1
    assert "resume_from_checkpoint: /nowhere" in rest[:warnings]


def test_devices_that_are_too_small_stop_a_run_wherever_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", str(write(tmp_path, RLVR)), "platform=cuda", "--elsewhere", "--device-memory"]
    assert main([*command, "200"]) == 0 and main([*command, "1"]) == 1
    assert "more than the 1 GiB" in capsys.readouterr().out.partition("This stops the run")[2].partition("Roles")[0]


def test_plan_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(write(tmp_path, RLVR)), "seed=3", "--json", "--elsewhere"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["roles"][0]["role"] == "actor_train" and plan["warnings"]


def test_invalid_file_is_explained_without_a_traceback(tmp_path: Path) -> None:
    file = write(tmp_path, RLVR + "learning_rate: 1e-6\n")
    run = subprocess.run([sys.executable, "-m", "roll", "plan", str(file)], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 2
    assert run.stdout == ""
    message = "learning_rate: unknown key; this key belongs at actor_train.training_args.learning_rate"
    assert run.stderr == f"{file}: 1 problem\n{message}\n"


def test_run_rejects_missing_model_and_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(write(tmp_path, RLVR)), "pretrain=/nowhere", "platform=cuda"]) == 2
    output = capsys.readouterr().err
    assert "pretrain: /nowhere is not a folder on this machine" in output
    assert "actor_train.data_args.file_name: train.jsonl is not a file on this machine" in output


def test_run_rejects_more_devices_than_cores(tmp_path: Path) -> None:
    config = rlvr(tmp_path, "platform=cpu")
    with pytest.raises(ConfigError) as caught:
        prepare_run(config, LAPTOP)
    assert (
        "actor_infer.device_mapping: device 23 does not exist: this machine has 2 cores, so devices 0 to 1; use those, "
        "or set num_devices_per_node: 24 to put several on a core"
    ) in str(caught.value)


@pytest.mark.parametrize("arguments", [["show", "nothing"], ["plot", "nothing"]])
def test_commands_without_a_configuration_import_nothing_from_the_folders_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    monkeypatch.chdir(inner)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with contextlib.suppress(SystemExit):
        main(arguments)
    assert str(tmp_path) not in sys.path


def test_num_devices_per_node_may_exceed_cores(tmp_path: Path) -> None:
    data = write(tmp_path, "{}", "train.jsonl")
    config = rlvr(
        tmp_path,
        "platform=cpu",
        "num_devices_per_node=24",
        f"actor_train.data_args.file_name={data}",
        "actor_infer.generating_args.top_p=0.9",
    )
    assert [warning.split(":")[0] for warning in prepare_run(config, LAPTOP)] == ["actor_infer.generating_args"]


@pytest.mark.parametrize(("machine", "platform"), [(LAPTOP, "cpu"), (SERVER, "cuda")])
def test_run_resolves_the_platform(tmp_path: Path, machine: Hardware, platform: str) -> None:
    data = write(tmp_path, "{}", "train.jsonl")
    config = sft(tmp_path, f"actor_train.data_args.file_name={data}")
    prepare_run(config, machine)
    assert config.platform == platform


def test_launcher_runs_the_file_of_its_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, SFT, "mine.yaml")
    flags = ["--config_path", str(tmp_path), "--config_name", "mine", "pretrain=/nowhere"]
    assert launch("sft", flags) == 2
    assert "pretrain: /nowhere is not a folder" in capsys.readouterr().err
    assert launch("rlvr", flags) == 2
    assert (
        "pipeline: the file is for sft, but this command starts rlvr; use the sft launcher" in capsys.readouterr().err
    )


def test_launcher_of_distillation_needs_a_teacher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, SFT.replace("pipeline: sft", "pipeline: rlvr"), "mine.yaml")
    flags = ["--config_path", str(tmp_path), "--config_name", "mine"]
    assert launch(None, flags, ["is_pure_opd=true"]) == 2
    assert "adv_estimator opd needs the teacher, which is the reference" in capsys.readouterr().err
    assert launch(None, [*flags, "is_pure_opd=false"], ["is_pure_opd=true"]) == 2
    assert "opd" not in capsys.readouterr().err


def test_launcher_finds_folders_of_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    expected = ROOT / "examples" / "qwen2.5-0.5B-rlvr" / "rlvr_config.yaml"
    assert find_config("qwen2.5-0.5B-rlvr", "rlvr_config") == expected
    assert find_config(str(expected.parent), "rlvr_config.yaml") == expected


def test_launcher_accepts_overrides_before_and_after_its_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, SFT, "mine.yaml")
    flags = ["--config_path", str(tmp_path), "--config_name", "mine"]
    assert launch("sft", ["max_step=3", *flags, "sed=3"]) == 2
    output = capsys.readouterr().err
    assert "did you mean max_steps?" in output and "did you mean seed?" in output
    with pytest.raises(SystemExit):
        launch("sft", [*flags, "--sed", "3"])
    assert "unrecognized arguments: --sed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("--resume", "resume_from_checkpoint=true"),
        ("--lr=1e-5", "actor_train.training_args.learning_rate=1e-5"),
        ("--seed=3", "seed=3"),
        ("--max_steps 3 --deterministic", "max_steps=3 deterministic=true"),
        ("--max_steps=3", "max_steps=3"),
        ("--max-steps 3", "max_steps=3"),
    ],
)
def test_a_key_given_as_a_flag_is_answered_with_its_spelling_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str, written: str
) -> None:
    with pytest.raises(SystemExit):
        main(["run", str(write(tmp_path, SFT)), *given.split()])
    assert capsys.readouterr().err.endswith(f"without dashes: {written}\n")


@pytest.mark.parametrize(("given", "shown"), [([], "usage: roll"), (["--version"], f"roll {__version__}")])
def test_the_command_alone_shows_its_help_and_a_version(
    capsys: pytest.CaptureFixture[str], given: list[str], shown: str
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(given)
    assert exit_info.value.code == 0 and capsys.readouterr().out.startswith(shown)


def test_a_missing_file_is_not_compared_by_its_ending(tmp_path: Path) -> None:
    write(tmp_path, SFT, "sft.yaml")
    assert similar_path(tmp_path / "nosuch.yaml", lambda _: True) is None
    assert similar_path(tmp_path / "sft2.yaml", lambda _: True) == tmp_path / "sft.yaml"


def test_a_plan_in_a_pipe_is_not_wrapped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "folder/" * 60 + "train"
    assert main(["plan", str(write(tmp_path, RLVR)), f"actor_train.data_args.file_name={name}.jsonl"]) == 1
    assert any(f"{name}.jsonl is not a file on this machine" in line for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("module", ["roll", "roll.cli"])
def test_modules_run_as_commands(module: str) -> None:
    run = subprocess.run([sys.executable, "-m", module, "plan"], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 2
    assert run.stderr.endswith("the following arguments are required: config\n")


@pytest.mark.parametrize("pipeline", ["rlvr", "sft"])
def test_scripts_run_the_launcher(tmp_path: Path, pipeline: str) -> None:
    script = ROOT / "examples" / f"start_{pipeline}_pipeline.py"
    write(tmp_path, {"rlvr": RLVR, "sft": SFT}[pipeline], "mine.yaml")
    command = [sys.executable, str(script), "--config_path", ".", "--config_name", "mine", f"pretrain={MODEL}"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 2
    assert "train.jsonl is not a file on this machine" in run.stderr and "Traceback" not in run.stderr


def test_modules_of_the_current_folder_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "envs_of_mine.py").write_text("from roll.envs.frozen_lake import FrozenLake\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    recipe = Path(__file__).parents[1] / "examples" / "tiny_frozen_lake" / "agentic_config.yaml"
    assert main(["plan", str(recipe), "custom_envs.FrozenLake.env_type=envs_of_mine:FrozenLake", "--elsewhere"]) == 0


def test_modules_beside_the_file_are_found_by_the_installed_script_in_every_process(tmp_path: Path) -> None:
    """The reward raises in the process of its pool, so it was found there; the current folder is another one."""
    for name in ("bin", "recipe", "elsewhere"):
        (tmp_path / name).mkdir()
    script = write(
        tmp_path / "bin",
        "import sys\nfrom roll.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n",
        "roll",
    )
    write(tmp_path / "recipe", "def score(response):\n    return [][0]\n", "my_own_rewards.py")
    data = write(tmp_path / "recipe", '{"prompt": "1+1=", "ground_truth": "2"}\n', "train.jsonl")
    rewards = 'rewards: {mine: {function: "my_own_rewards:score"}}\n'
    file = write(tmp_path / "recipe", RLVR.replace("train.jsonl", str(data)) + rewards)
    run = subprocess.run(
        [sys.executable, str(script), "plan", str(file)],
        capture_output=True,
        text=True,
        cwd=tmp_path / "elsewhere",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 2
    assert run.stderr.startswith(
        f"{tmp_path}/recipe/my_own_rewards.py:2: IndexError: list index out of range\n    return [][0]\n"
    )


def test_files_of_the_current_folder_replace_no_standard_module_in_a_command_or_its_processes(tmp_path: Path) -> None:
    """The reward is found in that folder; it raises with a variable that scripts started by it must not inherit."""
    for name in ("profile", "queue", "random", "selectors", "tokenize", "types"):
        write(tmp_path, "raise ImportError('of the user')\n", f"{name}.py")
    write(tmp_path, "import os\ndef score(response):\n    raise ValueError(os.getenv('PYTHONSAFEPATH'))\n", "mine.py")
    data = write(tmp_path, '{"prompt": "1+1=", "ground_truth": "2"}\n', "train.jsonl")
    file = write(tmp_path, RLVR.replace("train.jsonl", str(data)) + 'rewards: {mine: {function: "mine:score"}}\n')
    command = [sys.executable, "-m", "roll", "plan", str(file)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert run.stderr.startswith("mine.py:3: ValueError: None\n")


HEAVY = {"torch", "transformers", "ray", "sglang", "matplotlib", "roll.tools", "roll.lab"}
"""Libraries that take seconds to import together, and the folders that only some commands need."""


def test_help_imports_few_modules_and_not_the_configuration() -> None:
    code = (
        "import contextlib, sys\nfrom roll.cli import HELP, main\n"
        "for arguments in [['--help'], ['--version'], *([name, '--help'] for name in HELP)]:\n"
        "    with contextlib.suppress(SystemExit):\n        main(arguments)\n"
        "heavy = {'numpy', 'pyarrow', 'roll.configs.pipeline', 'roll.loading'}\n"
        "print(len(sys.modules), *sorted(heavy & {*sys.modules}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    count, *heavy = run.stdout.splitlines()[-1].split()
    assert heavy == [] and int(count) < 500


def test_help_and_errors_of_arguments_import_no_heavy_library_and_a_plan_no_tool(tmp_path: Path) -> None:
    commands = [["plan", "missing.yaml"], [], ["run", "missing.yaml", "--no"], ["rehearse", "missing.yaml"]]
    commands += [["show", "none"], ["plot", "none"], *([name, word] for name in HELP for word in ("--help", "--no"))]
    code = (
        "import contextlib, sys\nfrom roll.cli import main\n"
        f"for arguments in {commands}:\n    with contextlib.suppress(SystemExit):\n        main(arguments)\n"
        f"    print(arguments, 'imported', *sorted({HEAVY} & {{*sys.modules}}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    imported = [line.partition("] imported")[2].split() for line in run.stdout.splitlines() if "] imported" in line]
    assert len(imported) == len(commands) and imported[0] == []
    assert {name for names in imported for name in names} <= {"roll.lab", "roll.tools"}

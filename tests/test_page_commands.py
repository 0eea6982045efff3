"""Commands and Python of the pages that start no engine run as they are shown, in the folder of a reader with runs."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from examples.tiny_agent.model import make_model
from roll.cli import main
from roll.loading.load import load_config
from tests.pages import DOCS, blocks
from tests.report.runs import Row, group_line, sample, spans_of, write_run
from tests.report.test_explain import run_of
from tests.tools.compare.dump_writers import verl

pytestmark = pytest.mark.slow

ROOT = DOCS.parent
PAGES = sorted(page for page in DOCS.rglob("*.md") if "zh" not in page.relative_to(DOCS).parts)
STARTS_NO_ENGINE = "plan|convert|compare|simulate|show|plot|report|explain"
LINE = re.compile(rf"^ +(?:\.venv/bin/)?(roll (?:{STARTS_NO_ENGINE}) .*?[^\\])$", re.MULTILINE | re.DOTALL)
PLACES = {
    "CONFIG": "my_run.yaml",
    "RECIPE": "my_run.yaml",
    "RUN_DIR": "output/my_run",
    "RUN_DIR]": "output/ahead",
    "DUMP": "12.jsonl",
    "FILE]": "page.html",
}
PLACES |= {"[key=value": "[seed=3", "N]": "140]", "G]": "0]", "K]": "2]", "S": "4", "MEAN:MAX]": "9:16]", "140": "3"}

THEIR_KEYS = ["data.max_response_length=512", "data.train_files=gsm8k.parquet", "actor_rollout_ref.model.path=my_model"]
THEIR_KEYS += ["actor_rollout_ref.rollout.n=5", "trainer.n_gpus_per_node=8"]
MODEL = ROOT / "tests" / "data" / "models" / "qwen2.5-0.5B"


def arguments_of(line: str) -> list[str]:
    """A command with a value for each name in capitals; what is in brackets is given."""
    arguments = shlex.split(line.replace("\\\n", ""), comments=True)
    arguments = [PLACES.get(each.removesuffix("..."), each).strip("[]") for each in arguments if each != "...]"]
    rest = THEIR_KEYS if "convert" in arguments else []
    arguments = [part for each in arguments for part in (rest if each == "..." else [each])]
    return arguments[1 : arguments.index(">") if ">" in arguments else None]


def commands() -> list[str]:
    return sorted({shlex.join(arguments_of(line)) for page in PAGES for line in LINE.findall(page.read_text())})


def steps_of(row: Row, part: float) -> None:
    row |= {"time/generate": 0.5, "rollout/response_length_max": 30.0 + row["step"] % 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of docs/first_run.md, a file of verl, and runs of 140 steps."""
    here = tmp_path_factory.mktemp("reader")
    (here / "examples").symlink_to(ROOT / "examples")
    make_model(here / "my_model")
    (here / "my_problems.jsonl").write_text('{"prompt": "2+3=", "ground_truth": "5"}\n' * 8)
    (here / "my_run.yaml").write_text(blocks((DOCS / "first_run.md").read_text(), "yaml")[0])
    (here / "their_run.yaml").write_text(blocks((DOCS / "coming_from" / "verl.md").read_text(), "yaml")[0])
    (here / "empty.yaml").write_text("{}")
    verl(here)
    config = json.loads(json.dumps(asdict(load_config(here / "my_run.yaml")), default=str))
    del config["rollout_dump_dir"]
    samples = [sample(group, score, score - 0.5, [3, 4]) for group in (0, 1) for score in (1.0, 0.0)]
    groups = [group_line(number, number + 1) for number in range(140)]
    for name in ("my_run", "ahead", "a", "b", "solver", "qwen2.5-0.5B-rlvr"):
        config["async_generation_ratio"] = float(name == "ahead")
        write_run(here / "output" / name, 140, steps_of, config, samples=samples, spans=spans_of(140), groups=groups)
    run_of(here / "explained" / "output" / "my_run")
    return here


@pytest.mark.parametrize("command", commands())
def test_a_command_of_a_page_runs(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = command.split()[0]
    monkeypatch.chdir(folder / "explained" if name == "explain" else folder)
    elsewhere = [f"pretrain={MODEL}", "--elsewhere"] if "plan examples/" in command else []  # without GPUs and a hub
    assert main([*shlex.split(command), *elsewhere]) == 0


def test_python_of_the_pages_that_starts_no_engine_runs(folder: Path) -> None:
    (folder / "questions.jsonl").write_text((ROOT / "examples" / "search_notes" / "questions.jsonl").read_text())
    files = []
    for page in PAGES:
        for number, code in enumerate(blocks(page.read_text(), "python")):
            if not re.search(r"\brun\.|from trl", code):  # engines, or another framework
                files.append(folder / f"{page.stem}_{number}.py")
                files[-1].write_text(code)
    each = "import runpy, sys; files = sys.argv[1:]; sys.argv[1:] = ['output/my_run']; [*map(runpy.run_path, files)]"
    done = subprocess.run([sys.executable, "-c", each, *map(str, files)], cwd=folder, capture_output=True, text=True)
    assert (len(files) > 12, done.returncode) == (True, 0), done.stderr
    assert "roll_rollout_reward_mean 0." in done.stdout


@pytest.mark.parametrize(("seconds", "code"), [(60, 0), (-60, 1)])
def test_the_check_of_health_tells_whether_a_run_is_alive(folder: Path, seconds: float, code: int) -> None:
    (folder / "output" / "my_run" / "health.json").write_text(json.dumps({"valid_until": time.time() + seconds}))
    command = re.findall(r"^    python (-c .*)$", (DOCS / "operations.md").read_text(), re.MULTILINE)[0]
    assert subprocess.run([sys.executable, *shlex.split(command)], cwd=folder).returncode == code

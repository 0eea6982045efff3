"""Code of the user is found beside the configuration, and its errors begin with the user's file and line."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roll.configs.user_code import (
    UserCodeError,
    definition_of,
    failure_text,
    import_named,
    report_if_slow,
    search_modules_beside,
    user_folders,
)
from roll.distributed.processes import thread_environment


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, on the import path; modules that a test imports are forgotten."""
    known = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    search_modules_beside(tmp_path / "config.yaml")
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]


def refusal(name: str) -> UserCodeError:
    with pytest.raises(UserCodeError) as caught:
        import_named(name, callable)
    return caught.value


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_the_folder_of_the_file_and_the_current_one_are_searched_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = tmp_path / "recipes"
    beside.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/first"])
    search_modules_beside("recipes/config.yaml")
    search_modules_beside("recipes/config.yaml")
    assert sys.path == ["/first", str(tmp_path), str(beside)]


def test_a_misspelled_module_beside_this_project_is_found_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clone is the current folder of many users."""
    monkeypatch.chdir(Path(__file__).parents[2])
    assert str(Path.cwd()) in user_folders()
    monkeypatch.chdir(tmp_path)
    assert str(Path(__file__).parents[2]) not in user_folders()


def test_a_value_is_imported_by_name(folder: Path) -> None:
    write(folder, "mine_a.py", "def good(): return 3")
    assert import_named("mine_a:good", callable)[1]() == 3
    assert str(folder) in user_folders()


def test_a_missing_module_is_reported_with_the_nearest_file(folder: Path) -> None:
    write(folder, "my_rewards.py", "")
    error = refusal("my_reward:score")
    assert error.missing
    assert str(error).startswith("'my_reward:score': there is no module my_reward; did you mean my_rewards? (searched ")
    assert str(folder) in str(error)


def test_a_module_that_hides_a_folder_is_named(folder: Path) -> None:
    write(folder, "mine_envs.py", "")
    (folder / "mine_envs").mkdir()
    write(folder, "mine_envs/guess.py", "def score(): ...")
    assert "mine_envs.py hides the folder of the same name (searched " in str(refusal("mine_envs.guess:score"))


def test_a_module_that_another_imports_is_reported_with_the_line(folder: Path) -> None:
    write(folder, "mine_b.py", "import os\nimport sandbox_of_nobody\n")
    error = refusal("mine_b:score")
    assert error.missing
    expected = "mine_b.py:2: ModuleNotFoundError: No module named 'sandbox_of_nobody'\n    import sandbox_of_nobody"
    assert str(error) == expected


def test_a_syntax_error_is_reported_with_its_line(folder: Path) -> None:
    write(folder, "mine_c.py", "def score(response):\n    return (1\n")
    error = refusal("mine_c:score")
    assert not error.missing
    assert str(error) == "mine_c.py:2: SyntaxError: '(' was never closed\n    return (1"


def test_a_module_that_ends_python_is_reported_with_its_line(folder: Path) -> None:
    write(folder, "mine_d.py", "import sys\nsys.exit(3)\n")
    assert str(refusal("mine_d:score")) == "mine_d.py:2: SystemExit: 3\n    sys.exit(3)"


def test_a_missing_name_is_reported_with_those_of_the_module(folder: Path) -> None:
    write(folder, "mine_e.py", "from os import getcwd\ndef score(): ...\ndef other(): ...\nTABLE = 3\n")
    assert str(refusal("mine_e:scor")) == (
        "mine_e.py: 'mine_e:scor': the module has no scor; did you mean score?; it has score, other"
    )
    assert "has TABLE, which is a int; it has score, other" in str(refusal("mine_e:TABLE"))


def test_a_file_hidden_by_an_installed_module_is_named(folder: Path) -> None:
    write(folder, "yaml.py", "def score(): ...\n")
    assert str(refusal("yaml:score")).endswith("; yaml.py has the same name and is not used, rename it")


def test_an_error_is_located_in_the_users_innermost_frame(folder: Path) -> None:
    write(
        folder,
        "mine_f.py",
        "import json\n\ndef helper(text):\n    return json.loads(text)\n\ndef score(text):\n    return helper(text)\n",
    )
    score: Any = import_named("mine_f:score", callable)[1]
    assert definition_of(score) == "mine_f.py:6"
    try:
        score("{")
    except ValueError as error:
        text = failure_text(error)
    assert text.startswith("mine_f.py:4: JSONDecodeError: Expecting property name")
    assert text.endswith("\n    return json.loads(text)")


def test_code_that_takes_long_is_reported_with_its_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("roll.configs.user_code.NOTICE_S", 0.2)
    write(folder, "mine_g.py", "import time\n\ndef score(seconds):\n    time.sleep(seconds)\n")
    score: Any = import_named("mine_g:score", callable)[1]
    with report_if_slow("a call of mine_g:score"):
        score(2.0)
    with report_if_slow("another call"):
        score(0.0)
    time.sleep(0.3)
    expected = "mine_g.py:4: a call of mine_g:score has taken 0.2 s so far\n    time.sleep(seconds)\n"
    assert capsys.readouterr().err == expected


def test_the_name_of_a_file_is_answered_with_that_of_its_module() -> None:
    assert str(refusal("envs/mine.py:Echo")) == "'envs/mine.py:Echo': write module:name, here mine:Echo"


def test_an_error_whose_text_cannot_be_made_is_still_reported() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert failure_text(Odd()) == "Odd: its text cannot be made: RuntimeError"


def test_an_error_outside_the_users_code_has_no_location() -> None:
    try:
        import_named("", callable)
    except UserCodeError as error:
        assert str(error) == "'': write module:name"
    assert failure_text(ValueError("no")) == "ValueError: no"
    assert len(failure_text(ValueError("no" * 9999))) < 600


def test_processes_of_a_run_search_the_same_folders(folder: Path) -> None:
    beside = folder / "recipes"
    search_modules_beside(beside / "config.yaml")
    paths = thread_environment(threads=1)["PYTHONPATH"].split(":")
    assert paths[-2:] == [str(folder), str(beside)]


def test_a_file_of_the_current_folder_replaces_no_standard_module(folder: Path) -> None:
    write(folder, "queue.py", "raise ValueError")
    write(folder, "mine_q.py", "")
    environment = os.environ | thread_environment(threads=1)
    subprocess.run([sys.executable, "-c", "import queue, mine_q"], env=environment, check=True)

"""The data, reward and environment of docs/your_own.md work as they are written there."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from roll.configs.check import check
from roll.configs.pipeline import RLVRConfig
from roll.datasets.prompts import load_prompts
from roll.envs import make_env
from roll.loading.load import load_config
from roll.rewards.calling import RewardRequest
from roll.usercode.reward_process import load_reward_function

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "your_own.md").read_text(encoding="utf-8")
FIRST_RUN = (ROOT / "docs" / "first_run.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def block(start: str, language: str) -> str:
    """The one block that begins with `start`."""
    (found,) = [text for text in blocks(language) if text.startswith(start)]
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the Python files of the page, on the import path."""
    for name in ("my_rewards", "my_envs"):
        (tmp_path / f"{name}.py").write_text(block(f"# {name}.py", "python"), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("my_rewards", "my_envs"):
        sys.modules.pop(name, None)


def config(folder: Path) -> RLVRConfig:
    """The page's YAML, with the recipe it includes by its absolute path, its data in `folder`, and its reward."""
    tree = yaml.safe_load(block("# my_run.yaml", "yaml")) | yaml.safe_load(block("rewards:", "yaml"))
    tree["defaults"] = [str(ROOT / name) for name in tree["defaults"]]
    data = tree["actor_train"]["data_args"]
    data["file_name"] = [str(folder / name) for name in data["file_name"]]
    file = folder / "my_run.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    made = load_config(file)
    assert isinstance(made, RLVRConfig)
    return made


def test_data_is_read(folder: Path) -> None:
    example = re.search(r"\{\"prompt\".*?\}", block("# my_run.yaml", "yaml"))
    assert example is not None
    (folder / "my_problems.jsonl").write_text(example[0] + "\n", encoding="utf-8")
    args = config(folder).actor_train.data_args
    (prompt,) = load_prompts(args.file_name, args)
    assert prompt.ground_truth == json.loads(example[0])["ground_truth"]


def test_reward_scores_its_own_examples(folder: Path) -> None:
    (reward,) = config(folder).rewards.values()
    module, function = load_reward_function(reward)
    for response, ground_truth, right in module.SELF_TEST:
        score = function.call(RewardRequest((response,), ground_truth), 0)
        assert score == (reward.correct_score if right else reward.wrong_score)


def test_environment_gives_a_reward(folder: Path) -> None:
    (entry,) = yaml.safe_load(block("custom_envs:", "yaml"))["custom_envs"].values()
    env = make_env(entry["env_type"], entry.get("env_config", {}))
    word, _ = env.reset(seed=3)
    assert env.step(word)[1:3] == (1.0, True)


def test_the_complete_file_of_the_first_run_is_accepted_without_remarks(folder: Path) -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", FIRST_RUN, re.DOTALL | re.MULTILINE)
    text = text.replace("output/my_run", str(folder / "run"))  # a reader may have an earlier run of this name
    (folder / "my_run.yaml").write_text(text, encoding="utf-8")
    report = check(load_config(folder / "my_run.yaml"))
    assert report.errors == report.warnings == []


def test_each_example_has_at_most_ten_lines_of_code() -> None:
    for text in [*blocks("python"), *blocks("yaml")]:
        code = [line for line in text.splitlines() if line and not line.startswith(("#", "from ", "import "))]
        assert len(code) <= 10, text

"""The FrozenLake recipe: its files plan, and its example episodes follow shortest paths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.tiny_frozen_lake.play import LAKE, WORDS, best_moves, conversation, write_play
from examples.tiny_math.prepare import prepare
from roll.envs import make_env
from roll.loading.load import load_config
from roll.plan.hardware import prepare_run
from roll.plan.plan import make_plan
from tests.configs.samples import LAPTOP

FOLDER = Path(__file__).parents[2] / "examples" / "tiny_frozen_lake"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("model"), words=WORDS)


@pytest.mark.parametrize("ratio", [0, 1])
def test_the_rl_run_plans_without_a_warning(ratio: int, model: Path) -> None:
    config = load_config(FOLDER / "agentic_config.yaml", [f"pretrain={model}", f"async_generation_ratio={ratio}"])
    plan = make_plan(config, LAPTOP)
    assert plan.warnings == [] == prepare_run(config, LAPTOP)


def test_the_warm_start_plans_with_the_written_episodes(model: Path, tmp_path: Path) -> None:
    data = write_play(tmp_path, seed=1, train=3, val=2, chance=0.15)
    files = [
        f"{role}.data_args.file_name=[{data}/{name}.jsonl]"
        for role, name in (("actor_train", "train"), ("validation", "val"))
    ]
    config = load_config(FOLDER / "sft_config.yaml", [f"pretrain={model}", *files])
    assert prepare_run(config, LAPTOP) == []
    rows = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == ["train-0", "train-1", "train-2"]


@pytest.mark.parametrize("seed", range(50))
def test_episodes_without_random_moves_follow_a_shortest_path(seed: int) -> None:
    lake, played = make_env("frozen_lake", LAKE), conversation(seed, chance=0.0)
    observation, _ = lake.reset(seed=seed)
    assert played[0]["content"] == f"{lake.instruction}\n{observation}\n"
    ends = []
    for answer in played[1::2]:
        assert answer["content"].removeprefix("<answer>").removesuffix("</answer>") in best_moves(observation)
        observation, reward, terminated, truncated, _ = lake.step(answer["content"])
        ends.append((reward, terminated, truncated))
    assert ends[-1] == (1.0, True, False) and not any(terminated for _, terminated, _ in ends[:-1])

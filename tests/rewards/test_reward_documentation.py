"""The examples of docs/rewards run as they are written there, and the tables have every parameter."""

from __future__ import annotations

import asyncio
import http.server
import json
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from roll.configs.scoring.built_in_rewards import BUILT_IN
from roll.configs.scoring.rewards import RewardConfig
from roll.rewards.calling import ALL, RewardOutcome, RewardRequest
from roll.usercode.reward_pool import RewardPool
from tests.pages import blocks, text_of

PAGE = text_of("rewards")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the import path of this process and of reward processes."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("my_rewards", None)


def example(folder: Path, name: str) -> RewardConfig:
    """The reward with this name, with its code as a file in `folder` and its section of the YAML."""
    [code] = [code for code in blocks(PAGE, "python") if re.search(rf"^(async )?def {name}\(", code, re.MULTILINE)]
    (folder / "my_rewards.py").write_text(code, encoding="utf-8")
    sections = [yaml.safe_load(text)["rewards"] for text in blocks(PAGE, "yaml")]
    [rewards] = [rewards for rewards in sections if name in rewards]
    return RewardConfig(**rewards[name])


def scored(config: RewardConfig, *requests: RewardRequest) -> list[list[RewardOutcome]]:
    async def run() -> list[list[RewardOutcome]]:
        async with RewardPool(config) as pool:
            await pool.self_test(requests)
            return await pool.score(requests)

    return asyncio.run(run())


def test_the_first_reward_passes_its_self_test(folder: Path) -> None:
    [[right, wrong]] = scored(example(folder, "last_word"), RewardRequest(("it is 5", "it is 6"), "5"))
    assert (right.score, wrong.score) == (1.0, 0.0)


def test_format_and_answer_with_metrics(folder: Path) -> None:
    responses = ("<answer> 5</answer>", "<answer>6</answer>", "5")
    [outcomes] = scored(example(folder, "tagged"), RewardRequest(responses, "", row={"answer": "5"}))
    assert [outcome.score for outcome in outcomes] == [1.0, 0.1, 0.0]
    assert outcomes[2].metrics == {"formatted": 0.0, "length": 1.0}


def test_compare_all_responses_to_a_prompt(folder: Path) -> None:
    [outcomes] = scored(example(folder, "shortest_right"), RewardRequest(("it is 5", "5", "6"), "5"))
    assert [outcome.score for outcome in outcomes] == [0.5, 1.0, 0.0]


def test_ask_a_judge_over_the_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Judge(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"grade": len(asked["answer"]) + len(asked["question"])}).encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.server_port}")
        [outcomes] = scored(example(folder, "judged"), RewardRequest(("a", "bb"), "5"))
        server.shutdown()
    assert [outcome.score for outcome in outcomes] == [1.0, 2.0]


def test_every_parameter_is_in_a_table() -> None:
    assert [name for name in ALL if f"`{name}`" not in PAGE] == []


def test_every_built_in_reward_has_a_row() -> None:
    section = PAGE.partition("## Built-in rewards")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(BUILT_IN)

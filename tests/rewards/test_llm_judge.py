"""Grades of a judge behind an endpoint: how they are read, and that an error is never a score."""

from __future__ import annotations

import asyncio
import http.server
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from roll.configs.scoring.built_in_rewards import BUILT_IN
from roll.configs.scoring.rewards import RewardConfig
from roll.rewards import llm_judge
from roll.rewards.calling import RewardOutcome, RewardRequest
from roll.rewards.llm_judge import JudgeError, filled, grade_in
from roll.usercode.reward_pool import RewardPool


class Judge:
    """An endpoint whose answers are made by `reply`: (status, headers, text of the message)."""

    def __init__(self, reply: Callable[[dict[str, Any]], tuple[int, dict[str, str], str]]) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most = self.running = 0
        lock = threading.Lock()
        judge = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    judge.bodies.append({**body, "path": self.path})
                    judge.headers.append(dict(self.headers))
                    judge.running += 1
                    judge.most = max(judge.most, judge.running)
                status, headers, text = reply(body)
                message = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
                with lock:
                    judge.running -= 1
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(message)))
                self.end_headers()
                self.wfile.write(message)

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/v1/"


@pytest.fixture
def judge() -> Iterator[Callable[..., Judge]]:
    made: list[Judge] = []

    def make(reply: Callable[[dict[str, Any]], tuple[int, dict[str, str], str]]) -> Judge:
        made.append(Judge(reply))
        return made[-1]

    yield make
    for each in made:
        each.server.shutdown()
        each.server.server_close()


def config(url: str, **options: Any) -> RewardConfig:
    return RewardConfig(function=BUILT_IN["llm_judge"].function, base_url=url, model="big", timeout_s=20, **options)


def scored(reward: RewardConfig, *responses: str) -> list[RewardOutcome]:
    async def run() -> list[RewardOutcome]:
        async with RewardPool(reward) as pool:
            [outcomes] = await pool.score([RewardRequest(responses, "the truth", row={})])
            return outcomes

    return asyncio.run(run())


def test_a_judge_sees_the_texts_and_grades_every_response(judge, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    made = judge(lambda body: (200, {}, "Grade: 5" if "good" in body["messages"][0]["content"] else "Grade: no"))
    template = "Task {prompt} truth {ground_truth} {{braces}}\n{response}"
    reward = config(made.url, api_key_env="JUDGE_KEY", prompt_template=template, wrong_score=-1.0)
    good, bad = scored(reward, "good {x}", "bad")
    assert (good.score, good.metrics) == (0.0, {"grade": 5.0, "retries": 0.0})
    assert (bad.score, bad.metrics["grade"]) == (-1.0, 0.0)
    [body] = [body for body in made.bodies if "good" in str(body)]
    assert body == {
        "path": "/v1/chat/completions",
        "model": "big",
        "messages": [{"role": "user", "content": "Task  truth the truth {braces}\ngood {x}"}],
        "temperature": 0.0,
        "max_tokens": 1024,
    }
    assert {headers["Authorization"] for headers in made.headers} == {"Bearer secret"}


def graded(reward: RewardConfig) -> dict[str, float]:
    """The grade of a response without a process; repeated requests are sent at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm_judge, "FIRST_DELAY_S", 0.0)
        return asyncio.run(llm_judge.judge_reward("response", "prompt", "the truth", reward))


def test_overload_and_answers_without_a_grade_are_repeated_and_counted(judge):
    replies = iter([(503, {"Retry-After": "0"}, ""), (200, {}, "I cannot say"), (200, {}, "Grade: 10")])
    grade = graded(config(judge(lambda body: next(replies)).url))
    assert (grade["score"], grade["retries"]) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("status", "text", "requests", "detail"),
    [
        (500, "", 2, "status 500"),
        (401, "", 1, "status 401"),
        (200, "no grade", 2, "has no match of grade_pattern: 'no grade' (after 1 repeated requests)"),
        (200, "Grade: 11", 2, "grade 11 does not lie between 0 and max_grade 10"),
    ],
)
def test_an_error_is_a_failure_and_never_a_score(judge, status, text, requests, detail):
    made = judge(lambda body: (status, {}, text))
    with pytest.raises(JudgeError, match=re.escape(detail)):
        graded(config(made.url, max_retries=1))
    assert len(made.bodies) == requests


def test_an_endpoint_that_cannot_be_reached_is_a_failure():
    [outcome] = scored(config("http://127.0.0.1:9/v1", max_retries=0), "response")
    assert (outcome.score, outcome.reason) == (None, "raised") and "ConnectError" in outcome.detail


def test_a_judge_that_does_not_answer_is_a_timeout(judge):
    made = judge(lambda body: (time.sleep(3), (200, {}, "Grade: 1"))[1])
    reward = config(made.url)
    reward.timeout_s = 0.3
    [outcome] = scored(reward, "response")
    assert (outcome.score, outcome.reason) == (None, "timeout")


def test_calls_at_a_time_are_bounded_and_waiting_is_not_part_of_their_time(judge):
    made = judge(lambda body: (time.sleep(0.5), (200, {}, "Grade: 10"))[1])
    reward = config(made.url, max_concurrent_calls=3)
    reward.timeout_s = 2.5
    outcomes = scored(reward, *[str(number) for number in range(18)])
    assert [outcome.score for outcome in outcomes] == [1.0] * 18
    assert made.most == 3


@pytest.mark.parametrize(
    ("answer", "share"), [("Grade: 3\nGrade: **7.5**", 0.75), ("grade: YES", 1.0), ("Grade: no", 0.0)]
)
def test_the_last_grade_counts(answer, share):
    assert grade_in(answer, RewardConfig()) == share


def test_a_pattern_of_the_user_reads_the_grade():
    own = RewardConfig(grade_pattern=r"score=(\S+)", max_grade=2.0)
    assert grade_in("score=1", own) == 0.5
    for answer in ("score=good", "score=-1", "score=nan", "7"):
        with pytest.raises(JudgeError):
            grade_in(answer, own)


def test_waits_double_up_to_a_bound(monkeypatch):
    waits: list[float] = []

    async def asked(question: str, reward: RewardConfig) -> str:
        raise llm_judge._Retriable("busy", wait_s=3.0 if len(waits) == 1 else 0.0)

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(llm_judge, "_ask", asked)
    monkeypatch.setattr(llm_judge.asyncio, "sleep", sleep)
    with pytest.raises(JudgeError, match="after 8 repeated requests"):
        asyncio.run(llm_judge.judge_reward("a", "b", "c", RewardConfig(max_retries=8)))
    assert 0.25 <= waits[0] <= 0.75 and waits[1] == 3.0 and 1.0 <= waits[2] <= 3.0
    assert all(10.0 <= wait <= 30.0 for wait in waits[6:])


def test_braces_in_texts_stay():
    texts = {"prompt": "{response}", "response": "{}", "ground_truth": "}"}
    assert filled("{prompt}|{response}|{ground_truth}", texts) == "{response}|{}|}"

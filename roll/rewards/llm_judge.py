"""Reward of a language model that grades responses, behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import os
import random
import re
import string
from functools import cache
from typing import Any

from roll.configs.scoring.rewards import RewardConfig

FIRST_DELAY_S = 0.5
"""Mean wait before the first repeated request; it doubles with each, up to LONGEST_DELAY_S."""

LONGEST_DELAY_S = 20.0

REPEATED_STATUS = {408, 409, 425, 429, 500, 502, 503, 504, 529}
"""Answers of a server after which the same request may succeed."""

WORDS = {"yes": 1.0, "no": 0.0}
"""Grades in words -> their share of `max_grade`."""


def warm_up() -> None:
    """Imports the client and reads certificates, whose time must not count towards the deadline of a sample."""
    _certificates()


class JudgeError(RuntimeError):
    """The judge gave no grade; the sample has no score."""


class _Retriable(JudgeError):
    """An error after which the request is repeated, with the wait that the server asks for, in seconds."""

    def __init__(self, text: str, wait_s: float = 0.0) -> None:
        super().__init__(text)
        self.wait_s = wait_s


async def judge_reward(response: str, prompt: str, ground_truth: str, config: RewardConfig) -> dict[str, float]:
    """Score between `wrong_score` and `correct_score` by the grade of a judge, and the metrics `grade` and `retries`.

    The question is `prompt_template` with the texts of prompt, response and ground truth; the last match of
    `grade_pattern` in the answer has the grade, a number from 0 to `max_grade`, yes or no. Connection errors, overload
    and answers without a grade are repeated `max_retries` times, after waits that double.

    Raises:
        JudgeError: there is no grade after all repetitions, or the endpoint refuses the request.
    """
    texts = {"prompt": prompt, "response": response, "ground_truth": ground_truth}
    question = filled(config.prompt_template, texts)
    for retries in range(config.max_retries + 1):
        try:
            share = grade_in(await _ask(question, config), config)
            score = config.share_score(share)
            return {"score": score, "grade": share * config.max_grade, "retries": float(retries)}
        except _Retriable as error:
            if retries == config.max_retries:
                raise JudgeError(f"{error} (after {retries} repeated requests)") from error
            delay = min(FIRST_DELAY_S * 2**retries, LONGEST_DELAY_S)
            await asyncio.sleep(max(random.uniform(0.5, 1.5) * delay, min(error.wait_s, LONGEST_DELAY_S)))
    raise AssertionError("the loop returns or raises")


def filled(template: str, texts: dict[str, str]) -> str:
    return string.Formatter().vformat(template, (), texts)


def grade_in(answer: str, config: RewardConfig) -> float:
    """The grade in an answer as a share of `max_grade`, between 0 and 1.

    Raises:
        JudgeError: there is none, or it is beyond `max_grade`.
    """
    matches = list(re.finditer(config.grade_pattern, answer, re.IGNORECASE))
    if not matches:
        raise _Retriable(f"the judge's answer has no match of grade_pattern: {_end_of(answer)!r}")
    text = (matches[-1][1] or "").strip().lower()
    try:
        share = WORDS[text] if text in WORDS else float(text) / config.max_grade
    except ValueError:
        raise _Retriable(f"the judge's grade {text!r} is neither a number nor yes or no") from None
    if not 0 <= share <= 1:
        raise _Retriable(f"the judge's grade {text} does not lie between 0 and max_grade {config.max_grade:g}")
    return share


def _end_of(answer: str) -> str:
    return answer if len(answer) <= 100 else f"...{answer[-100:]}"


_clients: dict[asyncio.AbstractEventLoop, Any] = {}
"""One client for each loop, so that connections are used again."""


@cache
def _certificates() -> Any:
    import httpx

    return httpx.create_ssl_context()


def _client() -> Any:
    import httpx

    loop = asyncio.get_running_loop()
    if loop not in _clients:
        _clients[loop] = httpx.AsyncClient(
            verify=_certificates(), timeout=None, limits=httpx.Limits(max_connections=None)
        )
    return _clients[loop]


async def _ask(question: str, config: RewardConfig) -> str:
    """The answer of the judge.

    Raises:
        JudgeError: the endpoint cannot be reached or answers with an error; one that may pass is a `_Retriable`.
    """
    import httpx

    key = os.environ.get(config.api_key_env or "")
    body = {
        "model": config.model,
        "messages": [{"role": "user", "content": question}],
        "temperature": config.judge_temperature,
        "max_tokens": config.judge_max_tokens,
    }
    url = f"{(config.base_url or '').rstrip('/')}/chat/completions"
    try:
        reply = await _client().post(url, json=body, headers={"Authorization": f"Bearer {key}"} if key else {})
    except httpx.HTTPError as error:
        raise _Retriable(f"{url}: {type(error).__name__}: {error}") from error
    if reply.status_code in REPEATED_STATUS:
        raise _Retriable(f"{url}: status {reply.status_code}: {reply.text[:200]}", _wait_s(reply.headers))
    if reply.status_code != 200:
        raise JudgeError(f"{url}: status {reply.status_code}: {reply.text[:200]}")
    try:
        answer = reply.json()["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError):
        answer = None
    if not isinstance(answer, str):
        raise _Retriable(f"{url}: the reply holds no text: {reply.text[:200]}")
    return answer


def _wait_s(headers: Any) -> float:
    """Seconds of the header Retry-After; 0 where it has none, or a date."""
    try:
        return max(float(headers.get("retry-after", 0)), 0.0)
    except ValueError:
        return 0.0

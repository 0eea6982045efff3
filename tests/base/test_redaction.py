"""Secrets are hidden wherever they stand, and nothing else is."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import pytest
import yaml

from roll.base.events import EVENTS_FILE, EventLog
from roll.base.redaction import redact
from roll.base.terminal import RedactedLines


@pytest.mark.parametrize(
    "text",
    [
        "http://user:PW@proxy:3128",
        "user:PW@proxy:3128",
        "mysql+pymysql://u:P@PW@h/db?timeout=3",
        "redis://:PW@h:1/0",
        "https://PW@github.com/x",
        "could not open https://h/x?page=2&token=PW&a=1: 403",
        "https://bucket/x?X-Amz-Signature=PW&X-Amz-Credential=PW",
        "Authorization: Bearer PW",
        "Authorization: Basic PW",
        '{"authorization": "Bearer PW"}',
        "host=h password=PW user=u",
        "AccountName=a;AccountKey=PW;",
        "roll run x.yaml tracker_kwargs.wandb.api_key=PW max_steps=3",
        "hf_PWPWPWPWPWPWPWPWPWPW",
        "eyJPWPWPWPWPW.PWPW.PWPW",
        "-----BEGIN RSA PRIVATE KEY-----\nPW\n-----END RSA PRIVATE KEY-----",
        "roll run x --token PW",
        "roll run x --api-key=PW",
        "curl -u user:PW https://h",
        "system_envs.MY_TOKEN: 'PW' is not a number",
        "HF_TOKEN=PW roll run",
        'export TOKEN="P W PW"',
        "mysql -u me -pPW db",
        "machine h login u password PW",
        "system_envs.HF_TOKEN=PW",
        "system_envs={MY_TOKEN: PW, DB_SALT: PW}",
        "tracker_kwargs={wandb: {key: PW}}",
        "tracker_kwargs.wandb.tokens=[PW,PW]",
        "https://h/back#access_token=PW",
        "https://hooks.slack.com/services/T0/B0/PW",
        "AIzaPWPWPWPWPWPWPWPWPWPWPWPWPWPWPWPWPWP",
        "sk_live_PWPWPWPWPWPWPWPW",
        "npm_PWPWPWPWPWPWPWPWPWPWPWPW",
        "pypi-PWPWPWPWPWPWPWPW",
    ],
)
def test_secrets_within_a_text_are_hidden(text: str) -> None:
    assert "PW" not in redact(text) and "***" in redact(text)
    assert redact(redact(text)) == redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "https://example.com/path@v1?page=2",
        "git@github.com:owner/name",
        "loss_agg_mode: token-mean, token_mean: 3",
        "prompt_key=prompt max_tokens=5",
        "Basic arithmetic: 3 + 4",
        "tests.integration.rewards:length_reward",
        "/data/a@b/train.jsonl",
        "max_tokens=5 tokens: 5, token: 7, first_token=0.3",
        "eos_token=</s> stop_token_ids=[1] --pad-token x --max-tokens 5",
        "special tokens: <pad>; tracker_kwargs.wandb.token: unknown key; secretary: me",
        "docker run -u 1000:1000 -p 8080:80",
    ],
)
def test_other_texts_stay(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize(
    "key",
    """api_key apiKey x-api-key password passphrase client_secret cookie access_token my_token csrftoken id-token
    accessToken login_key master_key storageKey hmac_key write_key service_key subscription-key client_key userPass pat
    jwt bearer otp webhook basic_auth private_key_id credentials""".split(),
)
def test_values_of_secret_keys_are_hidden_at_any_depth(key: str) -> None:
    assert redact({"a": [{key: "PW"}, {key: {"b": "PW"}}]}) == {"a": [{key: "***"}, {key: "***"}]}


def test_values_of_other_keys_stay() -> None:
    config = {"prompt_key": "prompt", "key": "prompt", "pad_token": "<pad>", "max_tokens": 5, "author": "me"}
    config |= {"use_auth": True, "api_key": None, "tokenizer": "x", "private": "no"}
    config |= {
        "secretary": "x",
        "stop_token_ids": [1],
        "stop_tokens": ["a"],
        "per_token": 3,
        "pass": 3,
        "tokens": ["a"],
    }
    config |= {
        "wandb": {"max_tokens": 3, "stop_tokens": ["a"]},
        "env": {"TOKENIZERS_PARALLELISM": "no", "AUTHOR": "me"},
    }
    assert redact(config) == config


def test_names_of_headers_and_flags_may_be_values() -> None:
    assert redact({"headers": [{"name": "X-Api-Key", "value": "PW"}]}) == {
        "headers": [{"name": "X-Api-Key", "value": "***"}]
    }
    assert redact(["--token", "PW", "--max-tokens", "5"]) == ["--token", "***", "--max-tokens", "5"]


def test_options_of_trackers_are_hidden_by_broader_names() -> None:
    assert redact({"tracker_kwargs": {"x": {"key": "PW", "tokens": ["PW"], "login": "PW", "project": "p"}}}) == {
        "tracker_kwargs": {"x": {"key": "***", "tokens": "***", "login": "***", "project": "p"}}
    }


@pytest.mark.parametrize("recipe", sorted(Path("examples").rglob("*.yaml")), ids=str)
def test_recipes_have_nothing_to_hide(recipe: Path) -> None:
    config = yaml.safe_load(recipe.read_text())
    assert redact(config) == config


@pytest.mark.parametrize(
    "section", "system_envs headers extra_headers envs env_vars environ environmentVariables".split()
)
def test_environment_variables_and_headers_are_hidden_by_broader_names(section: str) -> None:
    names = ["MY_TOKEN", "SIGNING_KEY", "AWS_SESSION", "PASSPHRASE", "COOKIE", "OTEL_HEADERS", "PRIVATE", "X-Api-Key"]
    names += ["DB_PASS", "GITHUB_PAT", "MY_JWT", "BEARER", "OTP", "DB_SALT", "SLACK_WEBHOOK_URL"]
    hidden = redact({section: dict.fromkeys(names, "PW") | {"OMP_NUM_THREADS": "4"}, "key": "prompt"})
    assert hidden == {section: dict.fromkeys(names, "***") | {"OMP_NUM_THREADS": "4"}, "key": "prompt"}


def test_events_and_lines_of_a_log_have_no_secrets(tmp_path: Path) -> None:
    EventLog(tmp_path).record("driver", "failed", "https://u:PW@h does not answer")
    assert json.loads((tmp_path / EVENTS_FILE).read_text())["message"] == "https://***@h does not answer"
    record = logging.LogRecord("roll", logging.ERROR, "", 0, "%s", ("password=PW",), None)
    assert RedactedLines().format(record) == "password=***"


@pytest.mark.parametrize(
    "part",
    [
        "a",
        "password",
        "?a",
        "&",
        "://",
        "Bearer ",
        "authorization ",
        "sk-",
        "a:",
        "-----BEGIN ",
        "eyJaaaaaaaa.",
        "a=",
        "--a ",
        "}",
        "token=",
        "{a: ",
        "mysql ",
        "pypi-",
        "machine a login b ",
        "-u a:",
    ],
)
def test_long_texts_take_time_in_proportion_to_their_length(part: str) -> None:
    def seconds(length: int) -> float:
        text = (part * length)[:length]
        start = time.process_time()
        redact(text)
        return time.process_time() - start

    assert min(seconds(100_000) for _ in range(3)) < 30 * max(min(seconds(10_000) for _ in range(3)), 1e-3)

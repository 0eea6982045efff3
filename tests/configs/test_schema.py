"""Files that cannot be read, and all problems of one together; golden_findings.py has single values."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.base.errors import ConfigError
from roll.loading.load import load_config
from tests.configs.samples import RLVR, refusal


def test_quotes_in_a_file_need_no_shell_quotes(tmp_path: Path) -> None:
    message = refusal(tmp_path, text=RLVR + "exp_name: 7\n")
    assert message.endswith("exp_name: 7 is not text; put it in quotes: '7'")


def test_dotted_key_in_a_file_is_explained(tmp_path: Path) -> None:
    message = refusal(tmp_path, text=RLVR + "'actor_train.training_args.warmup_steps': 1\n")
    assert "in a file a dot does not open a section; write actor_train: {training_args: {warmup_steps: ...}}" in message


LONG = {
    f"exp_name={'[' * 3000}": "are nested too deep",
    f"gamma=1{'0' * 400}": "gamma: 100000000000000000...0000000000000000000 is too large; the largest allowed number",
    f"seed=1{'0' * 400}": "seed: 100000000000000000...0000000000000000000 is too large",
    f"seed=1{'0' * 5000}": "contains a value that is not of its type: Exceeds the limit (4300 digits)",
}
"""Others are in tests/data/findings.txt."""


@pytest.mark.parametrize(("override", "message"), LONG.items())
def test_a_long_value_is_shortened_in_its_message(tmp_path: Path, override: str, message: str) -> None:
    assert message in refusal(tmp_path, override)


def test_all_problems_of_a_file_are_reported_together(tmp_path: Path) -> None:
    message = refusal(tmp_path, "rollout_batchsize=64", "gamma=2", "actor_train.model_args.dtype=half")
    assert message.splitlines()[0].endswith("config.yaml: 3 problems")
    for path in ("rollout_batchsize:", "gamma:", "actor_train.model_args.dtype:"):
        assert path in message


def test_all_broken_rules_are_reported_together(tmp_path: Path) -> None:
    message = refusal(
        tmp_path,
        "actor_infer.generating_args.temperature=0",
        "adv_estimator=gpro",
        "use_kl_loss=true",
        "rollout_batch_size=3",
    )
    for path in (
        "rollout_batch_size:",
        "actor_infer.generating_args.temperature:",
        "adv_estimator:",
        "reference.device_mapping:",
    ):
        assert path in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nmax_steps: 2\nseed: 3\n", "seed: is given on line 1 and again on line 3; keep one"),
        ("actor_train:\n  pg_variant: ppo\n  pg_variant: ppo\n", "pg_variant: is given on line 2 and again on line 3"),
        ("a: {seed: 1, seed: 1}\n", "seed: is given on line 1 and again on line 1"),
        ("seed: [1\n", "line 2, column 1: not YAML"),
        ("- seed\n", "the top level must be a mapping of `key: value` lines"),
        ("", "the top level must be a mapping of `key: value` lines"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n", "is a git-lfs pointer"),
    ],
)
def test_invalid_yaml_is_explained(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(tmp_path, text=text)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("nowhere.yaml", "nowhere.yaml: 1 problem\ncannot be read"),
        ("myrun.yml", r"No such file or directory; did you mean .*/my_run.yaml\?"),
        ("loop.yaml", "loop.yaml: 1 problem\ncannot be read: Too many levels of symbolic links"),
    ],
)
def test_a_file_that_cannot_be_read_is_reported(tmp_path: Path, file: str, message: str) -> None:
    (tmp_path / "my_run.yaml").touch()
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / file)


def test_options_of_an_unknown_engine_are_not_checked(tmp_path: Path) -> None:
    section = "actor_train.strategy_args={strategy_name: torchtitan, strategy_config: {offload: 1}}"
    message = refusal(tmp_path, section)
    assert "strategy_name: 'torchtitan' is not one of megatron_train, megatron_infer, sglang" in message
    assert "offload" not in message


def test_response_length_is_required(tmp_path: Path) -> None:
    text = RLVR.replace("response_length: 1024\n", "")
    assert "response_length: is not given; write response_length" in refusal(tmp_path, text=text)

"""Fields declare when their key has an effect; loading reports keys without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.algorithms.options.policy_options import POLICY_LOSSES, VARIANT_KEYS
from roll.base.schema import known_keys
from roll.configs.agentic import AgenticConfig
from roll.configs.check import check
from roll.hub.splits import READABLE
from roll.loading.load import PIPELINES
from tests.configs.samples import AGENTIC, RLVR, SFT, agentic, refusal, rlvr, write


def warnings(config) -> list[str]:
    return [str(problem) for problem in check(config).warnings]


def test_conditions_name_keys_that_exist() -> None:
    for root in PIPELINES.values():
        known = {key.path for key in known_keys(root)} | {key.path for key in known_keys(AgenticConfig)}
        for key in known_keys(root):
            head = key.path.rpartition(".")[0]
            for condition in key.field.metadata["only_for"]:
                causes = [
                    f"{head}{cause}".lstrip(".") if cause.startswith(".") else cause for cause in condition.causes
                ]
                relative = {cause for cause in causes if head and cause.startswith(head)}
                assert all(cause in known or cause.rpartition(".")[0] == head for cause in causes), key.path
                assert condition.reason and causes, key.path
                assert not relative or relative <= known | set(causes)


def test_keys_of_variants_belong_to_variants_that_exist() -> None:
    assert {name for names in VARIANT_KEYS.values() for name in names} <= set(POLICY_LOSSES)
    assert VARIANT_KEYS["pg_clip_low"] == ("ppo", "decoupled_ppo", "clip_cov")
    assert VARIANT_KEYS["topr_level"] == ("topr",)
    assert "loss_agg_mode" not in VARIANT_KEYS


@pytest.mark.parametrize("ending", READABLE)
def test_the_split_of_a_file_is_a_warning(tmp_path: Path, ending: str) -> None:
    message = warnings(
        rlvr(tmp_path, f"actor_train.data_args.file_name=train{ending}", "actor_train.data_args.split=a")
    )
    assert message == [
        "actor_train.data_args.split: has no effect: every file_name is a file; a dataset by name or folder has splits"
    ]


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (RLVR + "save_steps: 5\n", ["save_checkpoint=false"], "save_steps: has no effect: save_checkpoint is false"),
        (RLVR + "pg_clip_low: 0.1\n", ["actor_train.pg_variant=tis"], "pg_clip_low: has no effect: it belongs to"),
        (RLVR + "grpo_norm_by_std: false\n", ["adv_estimator=reinforce"], "grpo_norm_by_std: has no effect"),
        (
            RLVR + "correction: {weights: {level: token, upper: 3}}\n",
            ["correction.weights.level=null"],
            "upper: has no",
        ),
        (
            RLVR + "tracker_kwargs: {tensorboard: {flush_secs: 3}}\n",
            ["track_with=stdout"],
            "tracker_kwargs.tensorboard:",
        ),
        (
            RLVR
            + "rewards: {math_rule: {query_filter_config: {type: std_filter, filter_args: {std_threshold: 0.1}}}}\n",
            ["rewards.math_rule.query_filter_config.type=no_filter"],
            "filter_args.std_threshold: belongs to type std_filter, but type is no_filter",
        ),
    ],
)
def test_a_key_of_the_file_that_an_override_makes_unused_is_a_warning(
    tmp_path: Path, text: str, overrides: list[str], message: str
) -> None:
    assert any(message in warning for warning in warnings(rlvr(tmp_path, *overrides, text=text)))


def test_a_target_that_an_override_makes_unused_is_a_warning(tmp_path: Path) -> None:
    text = SFT + "eval_steps: 5\ntarget_loss: 0.1\nvalidation: {data_args: {file_name: a.jsonl}}\n"
    from roll.loading.load import load_config

    message = warnings(load_config(write(tmp_path, text), ["eval_steps=0"]))
    assert "target_loss: has no effect: it is never measured, since eval_steps is 0; use eval_steps 10" in message
    assert "target_loss: has no effect: it is never measured" in refusal(tmp_path, "target_loss=0.1", text=SFT)


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        (RLVR + "save_steps: 5\nsave_checkpoint: false\n", []),
        (RLVR, ["save_steps=5", "save_checkpoint=false"]),
        (RLVR + "save_checkpoint: false\n", ["save_steps=5"]),
    ],
)
def test_a_key_without_effect_that_is_given_with_its_cause_is_an_error(
    tmp_path: Path, text: str, overrides: list[str]
) -> None:
    assert "save_steps: has no effect: save_checkpoint is false" in refusal(tmp_path, *overrides, text=text)


def test_a_template_of_validation_must_be_that_of_training(tmp_path: Path) -> None:
    both = ["actor_train.data_args.template=qwen3", "validation.data_args.template=qwen3"]
    assert warnings(agentic(tmp_path, *both)) == []
    assert "validation.data_args.template: has no effect" in refusal(
        tmp_path, both[0], "validation.data_args.template=chatml", text=AGENTIC
    )

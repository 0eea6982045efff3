"""Rules of rewards: built-in ones and their keys, several for one tag, and the domains that prompts are drawn from."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from roll.base.errors import ConfigError
from roll.configs.check import check
from roll.configs.pipeline import RLVRConfig, RLVREngineRewardConfig
from roll.configs.scoring.built_in_rewards import BUILT_IN
from roll.configs.scoring.rewards import RewardConfig, domain_of, rewards_of, truths_read
from roll.plan.hardware import prepare_run
from roll.plan.plan import make_plan
from tests.configs.samples import SERVER, rlvr

SUM = "rewards={a: {tag_included: [x], weight: 2}, b: {tag_included: [x, y]}, c: {}}"
SHARES = "actor_train.data_args.domain_interleave_probs"


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name != "reward_model"])
def test_an_entry_with_the_name_of_a_built_in_reward_uses_it(tmp_path: Path, name: str) -> None:
    reward = rlvr(tmp_path, f"rewards={{{name}: {{}}}}").rewards[name]
    assert (reward.function, reward.timeout_s) == (BUILT_IN[name].function, BUILT_IN[name].timeout_s)
    assert reward.max_concurrent_calls == BUILT_IN[name].max_concurrent_calls


def test_a_function_may_be_the_name_of_a_built_in_reward(tmp_path: Path) -> None:
    rewards = rlvr(
        tmp_path, "rewards={a: {function: regex, timeout_s: 9, tag_included: [x]}, ifeval: {function: mine:f}}"
    ).rewards
    assert (rewards["a"].function, rewards["a"].timeout_s) == (BUILT_IN["regex"].function, 9.0)
    assert (rewards["ifeval"].function, rewards["ifeval"].timeout_s) == ("mine:f", 5.0)


def test_an_entry_with_another_name_is_the_math_rule(tmp_path: Path) -> None:
    assert rlvr(tmp_path, "rewards={strict: {}}").rewards["strict"].function == BUILT_IN["math_rule"].function


def test_a_judge_needs_an_endpoint_a_model_and_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    missing = {each.path for each in check(rlvr(tmp_path, "rewards={llm_judge: {api_key_env: JUDGE_KEY}}")).missing}
    assert {f"rewards.llm_judge.{key}" for key in ("base_url", "api_key_env")} <= missing
    endpoint = "rewards={llm_judge: {base_url: 'http://127.0.0.1:30000/v1'}}"
    assert "rewards.llm_judge.model" in {each.path for each in check(rlvr(tmp_path, endpoint)).missing}


def test_rewards_that_name_a_tag_are_added_and_the_one_without_tags_scores_the_others(tmp_path: Path) -> None:
    config = rlvr(tmp_path, SUM)
    assert [rewards_of(config.rewards, tag) for tag in "xyz"] == [["a", "b"], ["b"], ["c"]]
    assert check(config).warnings == []
    reordered = {"c": RewardConfig(), "a": RewardConfig(tag_included=["x"])}
    assert (rewards_of(reordered, "x"), rewards_of(reordered, "y")) == (["a"], ["c"])
    assert rewards_of({"a": RewardConfig(tag_included=["x"])}, "y") == []


def test_shares_name_one_reward_of_each_tag(tmp_path: Path) -> None:
    config = rlvr(tmp_path, SUM, f"{SHARES}={{b: 0.5, c: 0.5}}")
    shares = config.actor_train.data_args.domain_interleave_probs
    assert [domain_of(config.rewards, shares, tag) for tag in "xyz"] == ["b", "b", "c"]
    with pytest.raises(ConfigError, match="prompts tagged x belong to a and b, whose scores are added, so it is not"):
        rlvr(tmp_path, SUM, f"{SHARES}={{a: 0.5, b: 0.5}}")


MODEL_REWARD = "rewards={math_rule: {tag_included: [math]}, reward_model: {weight: 0.5}}"
"""The model scores what is not tagged math."""


@pytest.fixture
def reward_model(tmp_path: Path) -> Path:
    """The folder of a reward model, its config.json alone."""
    folder = tmp_path / "scores"
    folder.mkdir()
    config = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "model_type": "qwen2",
        "max_position_embeddings": 32768,
        "architectures": ["Qwen2ForSequenceClassification"],
        "id2label": {"0": "score"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_reward_model_is_a_role_with_devices_and_a_model_of_its_own(tmp_path: Path, reward_model: Path) -> None:
    config = rlvr(
        tmp_path, MODEL_REWARD, "reward.device_mapping=[0,1]", f"reward.model_args.model_name_or_path={reward_model}"
    )
    assert config.uses_reward_model and "reward" in config.device_roles()
    assert config.rewards["reward_model"].template == config.actor_train.data_args.template
    assert not [problem for problem in check(config).warnings if "reward" in problem.path]
    unused = rlvr(tmp_path, "rewards={math_rule: {}}")
    assert not unused.uses_reward_model and "reward" not in unused.device_roles()


JUDGE = ("rewards={math_rule: {tag_included: [math]}, llm_judge: {}}", "judge.device_mapping=[24]")


def judged(tmp_path: Path, model: Path | None, *overrides: str) -> RLVRConfig:
    named = [] if model is None else [f"judge.model_args.model_name_or_path={model}"]
    return rlvr(tmp_path, *JUDGE, *named, *overrides)


@pytest.fixture
def judge_model(reward_model: Path) -> Path:
    """The folder of a language model, its config.json alone."""
    config = json.loads((reward_model / "config.json").read_text())
    (reward_model / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen2ForCausalLM"]}))
    return reward_model


def test_a_judge_without_an_endpoint_is_a_role_with_engines_and_a_model_of_its_own(
    tmp_path: Path, judge_model: Path
) -> None:
    config = judged(tmp_path, judge_model)
    assert config.uses_judge and list(config.device_roles())[-1] == "judge"
    assert config.rewards["llm_judge"].template == "native"
    report = check(config)
    assert not [problem for problem in (*report.warnings, *report.missing) if "judge" in problem.path]
    unused = rlvr(tmp_path, "rewards={math_rule: {}}")
    assert not unused.uses_judge and "judge" not in unused.device_roles()
    endpoint = rlvr(tmp_path, "rewards={llm_judge: {base_url: 'http://judge/v1', model: big}}")
    assert not endpoint.uses_judge and check(endpoint).warnings == []


def test_a_judge_may_be_of_a_family_that_cannot_be_trained(tmp_path: Path, judge_model: Path) -> None:
    file = judge_model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["MixtralForCausalLM"]}))
    plan = make_plan(judged(tmp_path, judge_model), SERVER)
    assert "no memory estimate for judge: the model's architecture is not known here" in plan.warnings
    assert "judge" not in {memory.role for memory in plan.memory}
    file.write_text(json.dumps({"architectures": ["OtherForCausalLM"]}))
    with pytest.raises(ConfigError, match="judge.sequence_length: is not set, and .* does not say how many positions"):
        judged(tmp_path, judge_model)
    assert judged(tmp_path, judge_model, "judge.sequence_length=8192").judge.sequence_length == 8192


ENGINES = (MODEL_REWARD, "reward.device_mapping=[24]", "reward.strategy_args.strategy_name=sglang")


def test_a_reward_model_on_engines_has_the_keys_of_an_engine(tmp_path: Path, reward_model: Path) -> None:
    named = (*ENGINES, f"reward.model_args.model_name_or_path={reward_model}")
    config = rlvr(tmp_path, *named, "reward.num_gpus_per_worker=1", "reward.max_running_requests=7")
    assert isinstance(config, RLVREngineRewardConfig)
    assert (config.reward.max_running_requests, config.reward.layout.data) == (7, 1)
    assert config.uses_reward_model and "reward" in config.device_roles()
    assert not [problem for problem in check(config).warnings if "reward" in problem.path]
    megatron = rlvr(tmp_path, *ENGINES[:2], f"reward.model_args.model_name_or_path={reward_model}")
    assert not isinstance(megatron, RLVREngineRewardConfig)
    plan = make_plan(config, SERVER)
    assert [(role.strategy, role.workers) for role in plan.roles if role.role == "reward"] == [("sglang", 1)]


@pytest.mark.parametrize(
    ("platform", "architecture", "head_dim", "refused"),
    [
        ("cpu", "Qwen2ForSequenceClassification", 24, True),
        ("cpu", "Qwen2ForSequenceClassification", 16, False),
        ("cpu", "Qwen2ForSequenceClassification", None, False),
        ("cpu", "Qwen3ForSequenceClassification", 24, False),
        ("cuda", "Qwen2ForSequenceClassification", 24, False),
    ],
)
def test_an_engine_on_a_cpu_has_no_qwen2_whose_heads_have_a_size_of_their_own(
    tmp_path: Path, reward_model: Path, platform: str, architecture: str, head_dim: int | None, refused: bool
) -> None:
    file = reward_model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"head_dim": head_dim, "architectures": [architecture]}))
    named = (f"reward.model_args.model_name_or_path={reward_model}", f"platform={platform}")
    megatron, engine = (rlvr(tmp_path, *ENGINES[:count], *named) for count in (2, 3))
    make_plan(megatron, SERVER)
    with pytest.raises(ConfigError) if refused else nullcontext() as refusal:
        make_plan(engine, SERVER)
    if refused:
        message = "head_dim 24, which is not hidden_size 64 / num_attention_heads 4, and SGLang cannot load that on a"
        assert f"reward.model_args.model_name_or_path: {reward_model} is a {architecture}" in str(refusal.value)
        assert message in str(refusal.value)
        with pytest.raises(ConfigError, match="SGLang cannot load that on a CPU"):
            prepare_run(engine, SERVER)


@pytest.mark.parametrize("architecture", ["Gemma2ForSequenceClassification", "Qwen2ForRewardModel"])
def test_a_reward_model_of_another_family_or_head_is_refused_on_engines_too(
    tmp_path: Path, reward_model: Path, architecture: str
) -> None:
    file = reward_model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": [architecture]}))
    with pytest.raises(ConfigError, match=architecture):
        rlvr(tmp_path, *ENGINES, f"reward.model_args.model_name_or_path={reward_model}")


def test_only_prompts_that_a_reward_model_alone_scores_need_no_ground_truth() -> None:
    rewards = {
        "reward_model": RewardConfig(function=BUILT_IN["reward_model"].function, tag_included=["chat", "both"]),
        "math_rule": RewardConfig(tag_included=["both"]),
        "rest": RewardConfig(),
    }
    assert [[*truths_read(rewards, tag)] for tag in ("chat", "both", "other")] == [[], ["math_rule"], ["math_rule"]]


def test_a_judge_and_an_expression_read_the_ground_truth_only_where_their_text_asks_for_it() -> None:
    judge, regex = BUILT_IN["llm_judge"].function, BUILT_IN["regex"].function
    reads = {
        "judge": RewardConfig(function=judge),
        "blind": RewardConfig(function=judge, prompt_template="{response}"),
        "truth": RewardConfig(function=regex),
        "group": RewardConfig(function=regex, pattern="=(.*)"),
        "plain": RewardConfig(function=regex, pattern="="),
        "own": RewardConfig(function="my:score"),
    }
    assert [name for name, reward in reads.items() if truths_read({name: reward}, "any")] == ["judge", "truth", "group"]


def test_a_reward_model_may_read_fewer_tokens_than_the_policy_writes(tmp_path: Path, reward_model: Path) -> None:
    text = (reward_model / "config.json").read_text().replace("32768", "512")
    (reward_model / "config.json").write_text(text)
    model = f"reward.model_args.model_name_or_path={reward_model}"
    assert rlvr(tmp_path, MODEL_REWARD, "reward.device_mapping=[0,1]", model).sequence_length == 3072
